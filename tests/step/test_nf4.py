"""4-bit weights: bytes, values and gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from brimful.step.nf4 import BLOCK, NF4, NF4Linear, quantize, replace_linears


def weight(rows: int = 96, columns: int = 128, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02).to(kind)


def stored_bytes(layer: nn.Module) -> int:
    return sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))


def tiny_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def test_a_number_costs_0_516_bytes() -> None:
    layer = NF4Linear(4096, 4096, bias=False, device="meta")
    assert stored_bytes(layer) / 4096**2 == pytest.approx(0.516, abs=5e-4)
    assert (layer.weight.shape, layer.weight.dtype) == ((4096 * 4096 // 2, 1), torch.uint8)
    assert layer.absmax.shape == (4096 * 4096 // 64,)
    assert layer.nested_absmax.shape == (4096 * 4096 // 64 // 256,)
    assert not layer.weight.requires_grad


def test_every_number_comes_back_as_the_nearest_code_of_its_block() -> None:
    original = weight()
    back = quantize(original).dequantize()
    blocks, found = original.view(-1, BLOCK), back.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / scales).unsqueeze(-1).sub(torch.tensor(NF4)).abs().min(-1).values * scales
    # the scale is itself quantised to a byte: an error of a few thousandths on top of the code's
    assert ((found - blocks).abs() <= nearest + 0.02 * scales).all()


def test_the_error_of_normal_numbers_is_that_of_nf4() -> None:
    original = weight(512, 512)
    error = (quantize(original).dequantize() - original).square().mean().sqrt() / original.std()
    assert error.item() == pytest.approx(0.092, abs=0.006)


def test_the_extremes_of_a_block_and_zeros_survive() -> None:
    zeros = quantize(torch.zeros(4, 64)).dequantize()
    assert zeros.count_nonzero() == 0
    original = torch.full((4, 64), 0.5)
    torch.testing.assert_close(quantize(original).dequantize(), original)


def test_quantising_what_was_dequantised_changes_no_code() -> None:
    first = quantize(weight())
    second = quantize(first.dequantize())
    assert torch.equal(first.weight, second.weight)


def test_a_weight_that_fills_no_whole_block_is_kept_too() -> None:
    for shape in ((3, 7), (5, 13), (1, 65)):
        original = weight(*shape)
        layer = quantize(original)
        assert layer.weight.shape == ((original.numel() + 1) // 2, 1)
        assert (layer.dequantize() - original).abs().max() < 0.2 * original.abs().max()
        x = torch.randn(2, shape[1], requires_grad=True)
        layer(x).sum().backward()
        torch.testing.assert_close(x.grad, layer.dequantize().sum(0).expand(2, -1))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_of_the_dequantised_linear(kind: torch.dtype) -> None:
    bias = torch.randn(96, dtype=kind, requires_grad=True)
    layer = quantize(weight(kind=kind), bias)
    dense = layer.dequantize(kind)
    x = torch.randn(2, 5, 128, dtype=kind, requires_grad=True)
    incoming = torch.randn(2, 5, 96, dtype=kind)
    expected = nn.functional.linear(x, dense, layer.bias)
    found = layer(x)
    assert torch.equal(found, expected)
    inputs = (x, layer.bias)
    for one, other in zip(
        torch.autograd.grad(found, inputs, incoming), torch.autograd.grad(expected, inputs, incoming), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_autocast_computes_in_its_precision() -> None:
    layer = quantize(weight(), torch.zeros(96))
    x = torch.randn(3, 128, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


def test_only_the_packed_form_is_saved_for_backward() -> None:
    layer = quantize(weight())
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer(torch.randn(2, 128, requires_grad=True))
    ours = {t.data_ptr() for t in (layer.weight, *layer.buffers())}
    assert {t.data_ptr() for t in saved} <= ours


def test_casting_a_model_leaves_codes_and_scales_alone() -> None:
    layer = quantize(weight(), torch.zeros(96))
    before = layer.dequantize()
    layer.to(torch.bfloat16)
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.dequantize(), before)


class Made(TorchDispatchMode):
    """Shapes and dtypes of what Brimful's own operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.namespace == "brimful":
            self.made.append((func._opname, tuple(out.shape), out.dtype))
        return out


def test_a_trace_sees_scales_and_weight_once_per_direction() -> None:
    with FakeTensorMode():
        layer = NF4Linear(128, 96, bias=False)
        x = torch.empty(2, 5, 128, dtype=torch.bfloat16, requires_grad=True)
        with Made() as forward:
            y = layer(x)
        with Made() as backward:
            y.backward(torch.empty_like(y))
    once = [
        ("dequantize_absmax", (96 * 128 // 64,), torch.float32),
        ("dequantize_nf4", (96, 128), torch.bfloat16),
    ]
    assert forward.made == backward.made == once


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_linears_are_replaced_but_head_and_embeddings_are_not(device: str) -> None:
    with torch.device(device):
        model = tiny_model()
    assert replace_linears(model) == 14
    assert replace_linears(model) == 0
    assert type(model.lm_head) is nn.Linear
    packed = [m for m in model.modules() if isinstance(m, NF4Linear)]
    assert len(packed) == 14
    assert {t.device.type for m in packed for t in (*m.parameters(), *m.buffers())} == {device}


def test_a_weight_that_two_modules_share_is_left_alone() -> None:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(32, 64), "out": nn.Linear(64, 32, bias=False), "in": nn.Linear(64, 64)}
    )
    model["out"].weight = model["embedding"].weight
    assert replace_linears(model) == 1
    assert isinstance(model["in"], NF4Linear)


@pytest.mark.parametrize("dora", [False, True])
def test_peft_wraps_and_trains_adapters_on_packed_linears(dora: bool) -> None:
    torch.manual_seed(0)
    model = tiny_model()
    replace_linears(model)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, use_dora=dora)
    model = get_peft_model(model, config)
    packed = {n: p.clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
    ids = torch.randint(0, 64, (2, 7))
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [n for n, p in model.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora_" in n for n in trained)
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if n in trained)
    assert all(torch.equal(p, packed[n]) for n, p in model.named_parameters() if n in packed)


def test_peft_wraps_packed_linears_without_memory() -> None:
    with torch.device("meta"):
        model = tiny_model()
        replace_linears(model)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    adapters = [p for n, p in model.named_parameters() if "lora_" in n]
    assert len(adapters) == 28
    assert {(p.device.type, p.dtype) for p in adapters} == {("meta", torch.float32)}


def test_random_codes_stand_for_weights_of_an_initialised_model() -> None:
    layer = NF4Linear(256, 128, bias=False)
    layer.weight.random_(0, 256)
    layer.fill_description()
    assert layer.dequantize().std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_reads_what_the_cpu_packed_and_packs_the_same() -> None:
    pytest.importorskip("bitsandbytes")
    here, there = quantize(weight()), quantize(weight().cuda())
    assert torch.equal(here.weight, there.weight.cpu())
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        read = quantize(weight()).cuda()
        torch.testing.assert_close(read.dequantize(kind).cpu(), here.dequantize(kind), rtol=1e-6, atol=0)
