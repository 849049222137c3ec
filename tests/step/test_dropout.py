"""Randomness belongs to the row: masks do not depend on slicing, layout, thread, device or process."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import T5Config, T5ForConditionalGeneration

from brimful.step.dropout import (
    RowDropout,
    RowKeys,
    install,
    keyed_dropout,
    keyed_dropout_scores,
    module_id,
    token_keys,
)

LENGTHS = (5, 9, 1, 7)
MODULE = module_id("model.layers.0.mlp.dropout")


def padded_keys(rows: range, width: int, step: int = 3) -> torch.Tensor:
    return token_keys(11, step, torch.tensor(rows)[:, None], torch.arange(width)[None, :])


def unpadded_keys() -> torch.Tensor:
    ids = torch.cat([torch.full((length,), row) for row, length in enumerate(LENGTHS)])
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return token_keys(11, 3, ids, positions)


def mask(keys: torch.Tensor, features: int = 64, module: int = MODULE, p: float = 0.3) -> torch.Tensor:
    return keyed_dropout(torch.ones(*keys.shape, features, dtype=torch.float64), keys, module, p) == 0


def test_a_row_has_the_same_mask_padded_unpadded_and_alone() -> None:
    padded, unpadded = mask(padded_keys(range(4), 9)), mask(unpadded_keys())
    start = 0
    for row, length in enumerate(LENGTHS):
        alone = mask(padded_keys(range(row, row + 1), length))[0]
        assert torch.equal(padded[row, :length], alone)
        assert torch.equal(unpadded[start : start + length], alone)
        start += length


def test_a_leading_dimension_of_one_changes_nothing() -> None:
    keys = unpadded_keys()
    x = torch.randn(len(keys), 32)
    assert torch.equal(keyed_dropout(x[None], keys, MODULE, 0.5)[0], keyed_dropout(x, keys[None], MODULE, 0.5))


def test_seed_step_row_position_and_module_each_change_the_mask() -> None:
    one = torch.zeros(1, dtype=torch.long)
    keys = [
        token_keys(0, 0, one, one),
        token_keys(1, 0, one, one),
        token_keys(0, 1, one, one),
        token_keys(0, 0, one + 1, one),
        token_keys(0, 0, one, one + 1),
    ]
    masks = [mask(key, 4096) for key in keys] + [mask(keys[0], 4096, module_id("elsewhere"))]
    for i, first in enumerate(masks):
        for second in masks[i + 1 :]:
            assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_drop_rate_is_p(p: float) -> None:
    drops = mask(padded_keys(range(64), 64), 256, p=p).double()
    sigma = (p * (1 - p) / drops.numel()) ** 0.5
    assert abs(drops.mean().item() - p) < 4 * sigma
    for axis in (0, 1, 2):  # no row, position or feature is favoured: the means spread as independent draws would
        others = [a for a in (0, 1, 2) if a != axis]
        means = drops.mean(others)
        expected = (p * (1 - p) / (drops.numel() / len(means))) ** 0.5
        assert means.std().item() == pytest.approx(expected, rel=0.6)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    pair = torch.stack((first.flatten().double(), second.flatten().double()))
    return abs(torch.corrcoef(pair)[0, 1].item()) * first.numel() ** 0.5


def test_neighbouring_features_positions_rows_modules_and_steps_are_uncorrelated() -> None:
    drops = mask(padded_keys(range(64), 64), 256)
    for lag in (1, 2, 3, 16, 64):
        if lag < 64:
            assert correlation(drops[lag:], drops[:-lag]) < 4.5
            assert correlation(drops[:, lag:], drops[:, :-lag]) < 4.5
        assert correlation(drops[..., lag:], drops[..., :-lag]) < 4.5
    assert correlation(drops[1:, 1:], drops[:-1, :-1]) < 4.5
    assert correlation(drops, mask(padded_keys(range(64), 64), 256, module=MODULE + 1)) < 4.5
    assert correlation(drops, mask(padded_keys(range(64), 64, step=4), 256)) < 4.5


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_kept_elements_are_scaled_in_every_precision(kind: torch.dtype) -> None:
    x, keys = torch.randn(4, 9, 40).to(kind), padded_keys(range(4), 9)
    y = keyed_dropout(x, keys, MODULE, 0.25)
    assert y.dtype == kind
    assert torch.equal(y, (x * (1 / 0.75)).masked_fill(mask(keys, 40, p=0.25), 0))


def test_an_input_of_any_strides_gives_the_same_contiguous_output() -> None:
    keys = padded_keys(range(4), 9)
    x = torch.randn(9, 4, 40).transpose(0, 1)
    y = keyed_dropout(x, keys, MODULE, 0.25)
    assert y.is_contiguous()
    assert torch.equal(y, keyed_dropout(x.contiguous(), keys, MODULE, 0.25))


def test_everything_is_dropped_at_one_and_nothing_at_zero() -> None:
    x, keys = torch.randn(2, 3, 8), padded_keys(range(2), 3)
    assert keyed_dropout(x, keys, MODULE, 1.0).count_nonzero() == 0
    assert keyed_dropout(x, keys, MODULE, 0.0) is x


def test_the_gradient_is_that_of_the_mask() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    keys = padded_keys(range(2), 3)
    assert torch.autograd.gradcheck(lambda x: keyed_dropout(x, keys, MODULE, 0.4), x)
    scores = torch.rand(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(3).expand(2, 3)
    assert torch.autograd.gradcheck(lambda s: keyed_dropout_scores(s, keys, positions, MODULE, 0.4), scores)


def test_attention_probabilities_of_a_row_have_the_same_mask_wherever_the_row_lies() -> None:
    width = max(LENGTHS)
    together = keyed_dropout_scores(
        torch.ones(4, 3, width, width), padded_keys(range(4), width), torch.arange(width).expand(4, width), MODULE, 0.3
    )
    assert (together == 0).float().mean().item() == pytest.approx(0.3, abs=0.06)
    for row, length in enumerate(LENGTHS):
        keys, positions = padded_keys(range(row, row + 1), length), torch.arange(length)[None]
        alone = keyed_dropout_scores(torch.ones(1, 3, length, length), keys, positions, MODULE, 0.3)
        assert torch.equal(together[row, :, :length, :length], alone[0])
    assert not torch.equal(together[:, 0], together[:, 1])


class Allocations(TorchDispatchMode):
    """Names the operators that made a new storage."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        known = {id(a.untyped_storage()) for a in args if isinstance(a, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and id(out.untyped_storage()) not in known and "detach" not in str(func):
            self.ops.append(str(func))
        return out


def test_forward_and_backward_allocate_their_output_and_nothing_else() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, dtype=torch.bfloat16, requires_grad=True)
        keys = torch.empty(2, 3, dtype=torch.long)
        incoming = torch.empty(2, 3, 8, dtype=torch.bfloat16)
        with Allocations() as forward:
            y = keyed_dropout(x, keys, MODULE, 0.1)
        with Allocations() as backward:
            torch.autograd.grad(y, x, incoming)
    assert forward.ops == backward.ops == ["brimful.row_dropout.default"]


def test_recomputation_in_backward_sees_the_same_mask() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), RowDropout(0.5, MODULE), nn.Linear(8, 8)).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    gradients = []
    for recompute in (False, True):
        layer.zero_grad()
        with RowKeys(padded_keys(range(2), 3)):
            y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            y.square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_evaluation_drops_nothing_and_needs_no_keys() -> None:
    x = torch.randn(2, 3, 8)
    assert RowDropout(0.5, MODULE).eval()(x) is x


def test_training_without_keys_is_refused() -> None:
    with pytest.raises(RuntimeError, match="outside"):
        RowDropout(0.5, MODULE)(torch.randn(2, 8))
    with RowKeys(padded_keys(range(2), 3)), pytest.raises(RuntimeError, match="none of"):
        RowDropout(0.5, MODULE)(torch.randn(2, 4, 8))


def test_install_reaches_adapters_and_keeps_p() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Dropout(0.0), nn.Linear(8, 8))
    wrapped = get_peft_model(model, LoraConfig(target_modules=["0", "3"], r=2, lora_dropout=0.05))
    assert install(wrapped) == 3
    assert install(wrapped) == 0
    dropouts = [m for m in wrapped.modules() if isinstance(m, RowDropout)]
    assert sorted(d.p for d in dropouts) == [0.05, 0.05, 0.2]
    assert len({d.module_id for d in dropouts}) == 3
    with RowKeys(padded_keys(range(2), 3)):
        wrapped(torch.randn(2, 3, 8)).sum().backward()


def test_an_encoder_decoder_draws_for_each_side_from_its_own_tokens() -> None:
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.3,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).double().train()
    model = get_peft_model(model, LoraConfig(target_modules=["q", "k", "v"], r=2, lora_dropout=0.5))
    assert install(model) > 0
    streams = {name: m.stream for name, m in model.named_modules() if isinstance(m, RowDropout)}
    assert {s for n, s in streams.items() if ".encoder." in n} == {"tokens"}
    assert {s for n, s in streams.items() if "EncDecAttention.q." in n} == {"decoder"}
    assert {s for n, s in streams.items() if "EncDecAttention.k." in n or "EncDecAttention.v." in n} == {"tokens"}
    with RowKeys(padded_keys(range(2), 5), decoder=padded_keys(range(2), 3)):
        for module in model.modules():  # attention probabilities go through torch.nn.functional, not through a module
            if type(module).__name__ == "T5Attention":
                module.dropout = 0.0
        model(input_ids=torch.ones(2, 5).long(), labels=torch.ones(2, 3).long()).loss.backward()


def test_a_module_id_is_the_same_in_every_process() -> None:
    assert module_id("model.layers.0.mlp.dropout") == -6259746395049597997
    assert module_id("model._orig_mod.layers.0._checkpoint_wrapped_module.mlp.dropout") == MODULE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_drops_and_scales_exactly_as_the_cpu(kind: torch.dtype) -> None:
    for shape in ((4, 9, 5000), (4, 9, 40), (36, 128)):
        x, keys = torch.randn(shape).to(kind), padded_keys(range(4), 9)
        assert torch.equal(
            padded_keys(range(4), 9), token_keys(11, 3, torch.arange(4).cuda()[:, None], torch.arange(9).cuda()).cpu()
        )
        there = keyed_dropout(x.cuda(), keys.cuda(), MODULE, 0.1).cpu()
        assert torch.equal(there, keyed_dropout(x, keys, MODULE, 0.1))
    x, keys = torch.randn(9, 4, 40).to(kind).transpose(0, 1), padded_keys(range(4), 9)
    assert torch.equal(keyed_dropout(x.cuda(), keys.cuda(), MODULE, 0.1).cpu(), keyed_dropout(x, keys, MODULE, 0.1))
    scores, positions = torch.rand(4, 3, 9, 17).to(kind), torch.arange(17).expand(4, 17)
    there = keyed_dropout_scores(scores.cuda(), keys.cuda(), positions.cuda(), MODULE, 0.1).cpu()
    assert torch.equal(there, keyed_dropout_scores(scores, keys, positions, MODULE, 0.1))
