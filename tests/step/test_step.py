"""One update: precisions, clipping, loss scaling, optimizers, groups, evaluation."""

from typing import Any

import pytest
import torch

from brimful.core.errors import UsageError
from brimful.step.batch import Row, make_batch

BF16 = {"weights": "bf16", "compute": "bf16", "gradients": "bf16", "optimizer": "bf16"}
QUIET = {"attention_dropout": 0.0}


def values(step) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    return {name: p.detach().clone() for name, p in step.parameters.items()}


def gradients(step, batches) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """What one step's gradients are, read before the update."""
    targets = sum(batch.target_count for batch in batches)
    for batch in batches:
        step.accumulate(batch, targets)
    found = {}
    for name, parameter in step.parameters.items():
        grad = step.wide.sums[parameter] if step.wide is not None else parameter.grad
        found[name] = grad.double()
    return found


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    return sum((found[name] - exact[name]).square().sum().item() for name in exact) ** 0.5


def refuse_to_save(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"{tuple(tensor.shape)} was kept for backward")


def test_gradients_accumulated_in_fp32_lose_less_than_in_bf16(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama", **QUIET)
    sums: dict[str, dict[str, torch.Tensor]] = {}
    for accumulated_in in ("bf16", "fp32"):
        step = bench.step(model, precision=BF16 | {"gradients": accumulated_in})
        batches = bench.batches(step, (1,) * 5) * 8
        sums[accumulated_in] = gradients(step, batches)
        parts = [gradients_of_one(step, batch, sum(b.target_count for b in batches)) for batch in batches]
        exact = {name: sum(part[name] for part in parts) for name in sums[accumulated_in]}
        sums[f"{accumulated_in} error"] = error(sums[accumulated_in], exact)
    assert sums["fp32 error"] < 1e-3 * sums["bf16 error"]


def gradients_of_one(step, batch, targets: int) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    if step.wide is not None:
        step.wide.sums.clear()
    step.optimizer.zero_grad()
    step.accumulate(batch, targets)
    return {
        name: (step.wide.sums[p] if step.wide is not None else p.grad).double() for name, p in step.parameters.items()
    }


def test_wide_gradients_leave_nothing_on_the_weights_and_the_update_takes_them(bench) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder("llama"), precision=BF16 | {"gradients": "fp32"})
    batch = bench.batches(step, (5,))[0]
    before = values(step)
    step.accumulate(batch, batch.target_count)
    assert all(p.grad is None for p in step.parameters.values())
    assert all(total.dtype == torch.float32 for total in step.wide.sums.values())
    step.update()
    assert not step.wide.sums
    assert any(not torch.equal(before[name], p) for name, p in step.parameters.items())


@pytest.mark.parametrize("gradients_in", ["bf16", "fp32"])
def test_master_weights_remember_updates_that_bf16_cannot_hold(bench, gradients_in: str) -> None:  # type: ignore[no-untyped-def]
    precision = BF16 | {"optimizer": "fp32", "gradients": gradients_in}
    step = bench.step(bench.folder("llama"), precision=precision, optimizer={"learning_rate": 1e-6})
    before = values(step)
    masters = {name: step.masters[p].detach().clone() for name, p in step.parameters.items()}
    for number in range(3):
        step.run(bench.batches(step, (2, 3), number))
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = step.parameters[name]
    unmoved = (before[name] == weight).float().mean().item()
    assert unmoved > 0.9
    assert not torch.equal(masters[name], step.masters[weight])
    for parameter, master in step.masters.items():
        assert master.dtype == torch.float32
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, master.bfloat16())
        assert parameter.grad is None
        assert master.grad is None


def test_an_overflow_leaves_the_weights_alone_and_halves_the_scale(bench) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder("llama", **QUIET), precision="fp16-scaled")
    before = values(step)
    step.scale.scale.fill_(2.0**120)
    step.run(bench.batches(step, (2, 3)))
    assert step.scale.scale == 2.0**119
    assert all(torch.equal(before[name], p) for name, p in step.parameters.items())
    assert not step.optimizer.state
    assert all(p.grad is None for p in step.parameters.values())


def test_a_scaled_step_is_the_unscaled_one(bench) -> None:  # type: ignore[no-untyped-def]
    model, sgd = bench.folder("llama", **QUIET), {"name": "sgd", "learning_rate": 0.5}
    scaled = bench.step(model, precision="fp16-scaled", optimizer=sgd)
    scaled.scale.scale.fill_(1024.0)
    exact = bench.step(model, precision="fp32", optimizer=sgd)
    for step in (scaled, exact):
        step.run(bench.batches(step, (2, 3)))
    assert scaled.scale.scale == 1024.0
    torch.testing.assert_close(values(scaled), values(exact), rtol=0.02, atol=2e-3)


def test_the_scale_grows_after_a_long_stretch_without_overflow(bench) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder("llama"), precision="fp16-scaled")
    step.scale.scale.fill_(256.0)
    step.scale.steady.fill_(step.scale.GROW_EVERY - 1)
    step.run(bench.batches(step, (5,)))
    assert step.scale.scale == 512.0


def test_autocast_computes_in_bf16_and_learns_in_fp32(bench) -> None:  # type: ignore[no-untyped-def]
    model, sgd = bench.folder("llama", **QUIET), {"name": "sgd", "learning_rate": 0.5}
    for loss in ("plain", "chunked"):
        narrow = bench.step(model, {"loss": loss}, precision="fp32-autocast", optimizer=sgd)
        exact = bench.step(model, precision="fp32", optimizer=sgd)
        for step in (narrow, exact):
            step.run(bench.batches(step, (2, 3)))
        assert {p.dtype for p in narrow.parameters.values()} == {torch.float32}
        torch.testing.assert_close(values(narrow), values(exact), rtol=0.05, atol=0.02)
        assert not torch.equal(values(narrow)["lm_head.weight"], values(exact)["lm_head.weight"])


def test_clipping_bounds_the_norm_over_all_slices(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama")

    def moved(clip: float, slices: tuple[int, ...]) -> float:
        step = bench.step(model, optimizer={"name": "sgd", "learning_rate": 1.0, "clip": clip})
        before = values(step)
        step.run(bench.batches(step, slices))
        return error(values(step), before)

    free = moved(0.0, (2, 3))
    assert moved(free / 4, (2, 3)) == pytest.approx(free / 4, rel=1e-5)
    assert moved(free / 4, (1,) * 5) == pytest.approx(free / 4, rel=1e-5)
    assert moved(free * 4, (5,)) == pytest.approx(free, rel=1e-9)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_foreach_and_fused_updates_are_the_same(bench, name: str) -> None:  # type: ignore[no-untyped-def]
    model, found = bench.folder("llama"), []
    for impl in ("foreach", "fused"):
        keys: dict[str, Any] = {"name": name, "learning_rate": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
        step = bench.step(model, {"optimizer_impl": impl}, optimizer=keys)
        for number in range(2):
            step.run(bench.batches(step, (5,), number))
        found.append(values(step))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_every_optimizer_lowers_the_loss(bench, optimizer: str) -> None:  # type: ignore[no-untyped-def]
    rate = {"adamw": 1e-2, "sgd": 0.5, "adafactor": 1e-2}[optimizer]
    step = bench.step(bench.folder("llama", **QUIET), optimizer={"name": optimizer, "learning_rate": rate})
    losses = [step.run(bench.batches(step, (2, 3))).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_group_has_a_rate_of_its_own(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama")
    keys: dict[str, Any] = {"optimizer": {"name": "sgd", "learning_rate": 1e-3, "clip": 0}}

    def moves(**more: Any) -> dict[str, torch.Tensor]:
        step = bench.step(model, **keys, **more)
        before = values(step)
        step.run(bench.batches(step, (5,)))
        return {name: p.detach() - before[name] for name, p in step.parameters.items()}

    groups = [{"match": "*q_proj*", "learning_rate": "×10"}, {"match": "*.layers.0.*", "learning_rate": 0.0}]
    plain, grouped = moves(), moves(groups=groups)
    for name, move in plain.items():
        factor = 10.0 if "q_proj" in name else 0.0 if ".layers.0." in name else 1.0
        torch.testing.assert_close(grouped[name], move * factor, rtol=1e-9, atol=1e-15)


def test_a_group_that_matches_nothing_is_refused(bench) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="matches no weight"):
        bench.step(bench.folder("llama"), groups=[{"match": "*indexer*", "learning_rate": 1.0}])


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_evaluation_is_the_plain_loss_without_dropout_and_keeps_nothing(bench, family: str) -> None:  # type: ignore[no-untyped-def]
    silent = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "t5": {"dropout_rate": 0.0}}[family]
    quiet = bench.step(bench.folder(family, **silent), optimizer={"learning_rate": 0.0})
    expected = quiet.run(bench.batches(quiet, (5,)))
    for pin in ({}, {"loss": "chunked", "recompute": "all"}):
        step = bench.step(bench.folder(family), pin)
        before = values(step)
        with torch.autograd.graph.saved_tensors_hooks(refuse_to_save, lambda t: t):
            found = step.evaluate(bench.batches(step, (5,))[0])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        assert not found.requires_grad
        assert all(part.training for part in step.model.module.modules())
        assert all(p.grad is None for p in step.parameters.values())
        assert all(torch.equal(before[name], p) for name, p in step.parameters.items())


def test_evaluation_that_fails_leaves_the_model_in_training(bench) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder("llama"))
    with pytest.raises(IndexError):
        step.evaluate(make_batch([Row(0, [99], [99])], padded=True))
    assert step.model.module.training


def test_a_step_without_a_single_target_changes_nothing(bench) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder("llama"))
    before = values(step)
    loss = step.run([make_batch([Row(0, [3, 4, 5], [-100] * 3)], padded=True)])
    assert loss == 0
    assert all(torch.equal(before[name], p) for name, p in step.parameters.items())


def test_a_row_whose_labels_do_not_lie_at_its_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="row 7 has 3 tokens and 2 labels"):
        make_batch([Row(7, [3, 4, 5], [4, 5])], padded=True)


@pytest.mark.parametrize("precision", ["bf16", {"weights": "fp16"}, "fp32-autocast", "fp16-scaled"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_learn_in_every_precision(bench, method: str, precision) -> None:  # type: ignore[no-untyped-def]
    model, keys = bench.folder("llama", **QUIET), {"method": method, "lora": {"targets": "all-linear"}}
    for pin in ({}, {"loss": "chunked", "recompute": "all", "layout": "unpadded"}):
        step = bench.step(model, pin, precision=precision, optimizer={"learning_rate": 1e-2}, **keys)
        if step.scale is not None:
            step.scale.scale.fill_(128.0)
        losses = [step.run(bench.batches(step, (2, 3), **pin)).item() for _ in range(4)]
        assert losses[-1] < losses[0]
        assert {p.dtype for p in step.parameters.values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["bf16", "fp32-autocast", {"weights": "bf16", "optimizer": "fp32"}])
@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_modules_saved_whole_learn_beside_the_adapter(bench, precision, loss: str) -> None:  # type: ignore[no-untyped-def]
    lora = {"save_modules": ["lm_head", "embed_tokens"]}
    step = bench.step(bench.folder("llama"), {"loss": loss}, precision=precision, method="lora", lora=lora)
    before = values(step)
    assert sum("modules_to_save" in name for name in before) == 2
    step.run(bench.batches(step, (2, 3)))
    assert all(not torch.equal(before[name], p) for name, p in step.parameters.items())
    assert all(p.grad is None for p in step.parameters.values())
