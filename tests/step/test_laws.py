"""The weights after a step are the user's: no choice that the planner makes changes them."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from brimful.step.assemble import attention_demand
from brimful.step.attention import can_run_unpadded
from brimful.step.step import LossChoice
from brimful.step.target import Target

DECODERS = ("llama", "mistral", "qwen3", "gemma2", "gpt2", "gpt_neox", "phi3", "olmo2", "qwen3_moe")
FAMILIES = (*DECODERS, "gemma3_text", "gpt_oss", "t5")
METHODS = [
    *((family, method) for family in FAMILIES for method in ("full", "lora")),
    *((family, "qlora") for family in ("llama", "gemma2", "t5")),
]
LAW = {"rtol": 1e-9, "atol": 1e-11}  # a weight whose gradient is zero in theory moves by rate · noise / epsilon
CUTS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((1, 1, 1, 1, 1), {}),
    ((2, 3), {"recompute": "all", "loss": "fused"}),
    ((3, 1, 1), {"loss": "chunked", "recompute": [1]}),
    ((5,), {"layout": "unpadded", "loss": "chunked", "loss_chunk": 4}),
    ((1, 4), {"layout": "unpadded", "recompute": "all"}),
)


@pytest.fixture
def fp64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's norms compute in fp32 whatever the weights are, and sum their weight's gradient over tokens in it."""
    narrow = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda t: t if t.dtype == torch.float64 else narrow(t))


def weights_after(bench, model: str, slices: tuple[int, ...], pin: dict[str, Any], steps: int = 1, **keys: Any):  # type: ignore[no-untyped-def]
    step = bench.step(model, pin, **keys)
    losses = [step.run(bench.batches(step, slices, number, **pin)) for number in range(steps)]
    return losses, {name: p.detach() for name, p in step.parameters.items()}


@pytest.mark.parametrize(("family", "method"), METHODS)
def test_weights_after_a_step_do_not_depend_on_slicing_layout_loss_or_recomputation(
    bench, request, family, method
) -> None:  # type: ignore[no-untyped-def]
    if family.startswith("gemma"):
        request.getfixturevalue("fp64_throughout")
    model = bench.folder(family)
    expected = weights_after(bench, model, (5,), {}, method=method)
    for slices, pin in CUTS:
        if family == "t5":
            pin = {key: value for key, value in pin.items() if key != "layout"}
        found = weights_after(bench, model, slices, pin, method=method)
        torch.testing.assert_close(found, expected, **LAW)


def test_two_steps_of_any_variant_of_lora_obey_the_law_too(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama")
    for lora in ({"variant": "dora", "save_modules": ["lm_head"]}, {"variant": "rslora", "targets": "all-linear"}):
        keys = {"method": "lora", "lora": {"dropout": 0.2, **lora}, "steps": 2}
        expected = weights_after(bench, model, (5,), {}, **keys)
        pin = {"layout": "unpadded", "recompute": "all", "loss": "chunked"}
        torch.testing.assert_close(weights_after(bench, model, (2, 3), pin, **keys), expected, **LAW)


@pytest.mark.parametrize(
    ("family", "silent"),
    [
        ("llama", {"attention_dropout": 0.0}),
        ("gpt2", {"attn_pdrop": 0.0}),
        ("gpt2", {"resid_pdrop": 0.0}),
        ("gpt_neox", {"hidden_dropout": 0.0}),
        ("t5", {"dropout_rate": 0.0}),
    ],
)
def test_dropout_of_every_kind_is_on_while_the_law_is_tested(bench, family, silent) -> None:  # type: ignore[no-untyped-def]
    with_it, _ = weights_after(bench, bench.folder(family), (5,), {})
    without, _ = weights_after(bench, bench.folder(family, **silent), (5,), {})
    assert with_it[0] != without[0]


def test_lora_dropout_is_on_while_the_law_is_tested(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("mistral")
    one, other = (weights_after(bench, model, (5,), {}, method="lora", lora={"dropout": p})[0] for p in (0.05, 0.0))
    assert one[0] != other[0]


def test_each_step_draws_masks_of_its_own(bench) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder("gpt2"), optimizer={"learning_rate": 0.0})
    first, again, next_one = (step.run(bench.batches(step, (5,), number)) for number in (0, 0, 1))
    assert first == again
    assert first != next_one


@pytest.mark.parametrize("family", [*DECODERS, "gemma3_text", "gpt_oss", "granite", "cohere", "t5"])
def test_the_loss_is_the_one_of_transformers_on_the_same_weights(bench, family) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    step = bench.step(bench.folder(family))
    saved = str(bench.root / "saved")
    step.model.base.save_pretrained(saved)
    encoder_decoder = step.model.source.encoder_decoder
    kind = AutoModelForSeq2SeqLM if encoder_decoder else AutoModelForCausalLM
    experts = {"experts_implementation": "eager"} if family in ("qwen3_moe", "gpt_oss") else {}
    theirs = kind.from_pretrained(saved, dtype=torch.float64, attn_implementation="eager", **experts).eval()
    total = total_by_logits = 0.0
    for row in bench.rows(step):
        labels = torch.tensor([row.labels])
        count = (labels[:, 0 if encoder_decoder else 1 :] != -100).sum()
        if count == 0:
            continue
        with torch.no_grad():
            out = theirs(input_ids=torch.tensor([row.tokens]), labels=labels)
        total += (out.loss * count).item()
        logits, targets = (out.logits[0], labels[0]) if encoder_decoder else (out.logits[0, :-1], labels[0, 1:])
        total_by_logits += functional.cross_entropy(logits.double(), targets, reduction="sum").item()
    ours = step.evaluate(bench.batches(step, (5,))[0]).item()
    assert ours == pytest.approx(total, rel=1e-5)
    assert ours == pytest.approx(total_by_logits, rel=1e-6)  # their attention takes its softmax in fp32
    if not encoder_decoder:
        assert step.evaluate(bench.batches(step, (5,), layout="unpadded")[0]).item() == pytest.approx(ours, rel=1e-9)


def test_recomputation_and_loss_can_change_between_two_micro_batches(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("gpt2")
    _, expected = weights_after(bench, model, (2, 2, 1), {})
    step = bench.step(model)
    batches = bench.batches(step, (2, 2, 1))
    targets = sum(batch.target_count for batch in batches)
    changes = ((frozenset(), LossChoice("plain")), (frozenset({0, 1}), LossChoice("chunked", 3)),
               (frozenset({1}), LossChoice("chunked", 100)))  # fmt: skip
    for batch, (step.recompute.chosen, step.loss) in zip(batches, changes, strict=True):
        step.accumulate(batch, targets)
    step.update()
    torch.testing.assert_close({n: p.detach() for n, p in step.parameters.items()}, expected, **LAW)


def test_a_kernel_for_rows_end_to_end_is_promised_only_where_one_exists(bench) -> None:  # type: ignore[no-untyped-def]
    hopper, here = Target("cuda", (9, 0), traced=True), Target("cpu")
    promised = {}
    for family in ("llama", "gemma2", "gpt_oss", "t5"):
        step = bench.step(bench.folder(family))
        run = bench.run(step.model.source.name, precision="bf16")
        demand = attention_demand(run, step.model)
        promised[family] = (can_run_unpadded(demand, hopper), can_run_unpadded(demand, here))
    assert promised == {"llama": (True, True), "gemma2": (False, True), "gpt_oss": (False, True), "t5": (False, False)}


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_layers_are_those_of_the_model_and_not_their_parts(bench, family, layers) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder(family, **{"num_layers" if family == "t5" else "num_hidden_layers": layers}))
    kinds = [type(layer).__name__ for layer in step.model.layers]
    assert kinds == (["T5Block"] * 2 * layers if family == "t5" else ["LlamaDecoderLayer"] * layers)
