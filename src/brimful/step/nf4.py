"""QLoRA's storage: Linears in 4-bit normal floats with double quantisation, byte for byte as bitsandbytes keeps them.

bitsandbytes is asked for only when an operation runs on CUDA: forecasting, planning and CPU training need no package.
A weight of N·K numbers is N·K/2 bytes of packed codes, one byte of scale per 64 numbers, one fp32 scale of those
scales per 256 of them, and two small code books: 0.516 bytes a number.

Products follow bitsandbytes' MatMul4Bit in memory: the weight is dequantised to the input's dtype, used and freed, in
forward and again in backward; only the packed form is saved. The two halves of dequantising are two operators, because
the fp32 scales between them (4 bytes per 64 numbers) are a temporary that a trace has to see.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from brimful.core.errors import MissingPackage

BLOCK = 64
NESTED_BLOCK = 256
# Blocks dequantised at a time on a CPU: bounds the fp32 and index temporaries of a large weight.
_BLOCKS_AT_ONCE = 1 << 16
# Numbers quantised at a time by one thread: few enough to stay in its cache, and for PyTorch not to split each
# operation among threads that wait for one another.
_AT_ONCE = 1 << 15
# Up to so many bounds, comparing with each is faster than a binary search.
_MOST_COMPARED = 32

# Quantiles of the normal distribution, from the QLoRA paper's appendix; code 7 is zero.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@cache
def _dynamic_code() -> tuple[float, ...]:
    """The signed 8-bit dynamic code of the nested scales: seven decades, each with twice the steps of the one below."""
    values = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = (10 ** (exponent - 6) * ((bounds[:-1] + bounds[1:]) / 2.0)).tolist()
        values += means + [-value for value in means]
    return tuple(sorted(values))


class NF4Linear(nn.Linear):
    """A frozen Linear in nf4. An `nn.Linear`, so that peft wraps it as one; `weight` is the packed parameter.

    Built empty: `quantize` fills one from a weight, and a model on the meta device needs shapes only.
    """

    absmax: Tensor
    nested_absmax: Tensor
    nested_code: Tensor
    code: Tensor
    offset: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is the bias's; the weight has none of its own and takes that of the input it is multiplied by."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        numbers = in_features * out_features
        scales = -(-numbers // BLOCK)
        packed = torch.empty((-(-numbers // 2), 1), dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self.register_buffer("absmax", torch.empty(scales, dtype=torch.uint8, device=device))
        for name, shape in (
            ("nested_absmax", (-(-scales // NESTED_BLOCK),)),
            ("nested_code", (256,)),
            ("code", (16,)),
            ("offset", ()),
        ):
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32, device=device))

    def fill_description(self) -> None:
        """Fill all but the packed codes so that random codes stand for weights of about 0.02, as in a new model.

        For measurements, where a model's real weights do not matter.
        """
        self.code.copy_(torch.tensor(NF4))
        self.nested_code.copy_(torch.tensor(_dynamic_code()))
        self.absmax.zero_()
        self.nested_absmax.zero_()
        self.offset.fill_(0.035)

    def _scales(self) -> tuple[Tensor, ...]:
        return self.absmax, self.nested_absmax, self.nested_code, self.offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out_features, in_features] that a product sees."""
        return _dequantize(self.weight, self._scales(), self.code, self.out_features, self.in_features, dtype)

    @property
    def W_q(self) -> Tensor:  # noqa: N802, the name is peft's
        """peft's mark of a module that can `dequantize()` itself; DoRA needs the weight's norm."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return _Product.apply(input, bias, self.weight, self.code, *self._scales(), self.out_features)

    def _apply(self, fn: Any, recurse: bool = True) -> "NF4Linear":
        # `model.to(torch.bfloat16)` is meant for weights in floating point, not for the scales of quantised ones.
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, nf4"


class _Product(torch.autograd.Function):
    """x · Wᵀ + b with W dequantised for the moment of the product, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: Tensor, code: Tensor, *rest: Any) -> Tensor:
        *scales, ctx.out_features = rest
        ctx.in_features = x.shape[-1]
        ctx.save_for_backward(packed, code, *scales)
        with torch.autocast(x.device.type, enabled=False):
            weight = _dequantize(packed, scales, code, ctx.out_features, ctx.in_features, x.dtype)
            return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, code, *scales = ctx.saved_tensors
        grad_x = grad_bias = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[1]:
                grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
            if ctx.needs_input_grad[0]:
                grad_x = grad @ _dequantize(packed, scales, code, ctx.out_features, ctx.in_features, grad.dtype)
        return grad_x, grad_bias, *[None] * (3 + len(scales))


def _dequantize(
    packed: Tensor, scales: Sequence[Tensor], code: Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    # The fp32 scales die with this call, before the product is taken.
    return dequantize_nf4(packed, dequantize_absmax(*scales), code, out_features, in_features, dtype)


@torch.library.custom_op("brimful::dequantize_absmax", mutates_args=(), device_types="cpu")
def dequantize_absmax(absmax: Tensor, nested_absmax: Tensor, nested_code: Tensor, offset: Tensor) -> Tensor:
    """The fp32 scale of every block of 64 numbers, from its byte, the scale of its 256 neighbours and the offset."""
    scales = nested_code[absmax.int()]
    whole = scales.numel() // NESTED_BLOCK * NESTED_BLOCK
    scales[:whole].view(-1, NESTED_BLOCK).mul_(nested_absmax[: whole // NESTED_BLOCK].unsqueeze(1))
    scales[whole:].mul_(nested_absmax[-1])
    return scales.add_(offset)


@dequantize_absmax.register_fake
def _(absmax: Tensor, nested_absmax: Tensor, nested_code: Tensor, offset: Tensor) -> Tensor:
    return absmax.new_empty(absmax.shape, dtype=torch.float32)


@dequantize_absmax.register_kernel("cuda")
def _absmax_bitsandbytes(absmax: Tensor, nested_absmax: Tensor, nested_code: Tensor, offset: Tensor) -> Tensor:
    bnb = _bitsandbytes()
    state = bnb.QuantState(absmax=nested_absmax, code=nested_code, blocksize=NESTED_BLOCK, dtype=torch.float32)
    scales = bnb.dequantize_blockwise(absmax, state)
    scales += offset
    return scales


@torch.library.custom_op("brimful::dequantize_nf4", mutates_args=(), device_types="cpu")
def dequantize_nf4(
    packed: Tensor, absmax: Tensor, code: Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """The weight [out_features, in_features] from two codes a byte, the first in the high half, and fp32 scales."""
    out = torch.empty(out_features * in_features, dtype=dtype)
    for start in range(0, absmax.numel(), _BLOCKS_AT_ONCE):
        scales = absmax[start : start + _BLOCKS_AT_ONCE].unsqueeze(1)
        part = packed.view(-1)[start * BLOCK // 2 : (start + _BLOCKS_AT_ONCE) * BLOCK // 2]
        numbers = code[torch.stack((part >> 4, part & 15), dim=1).view(-1).int()]
        target = out[start * BLOCK : (start + _BLOCKS_AT_ONCE) * BLOCK]
        short = scales.shape[0] * BLOCK - numbers.numel()
        target.copy_((functional.pad(numbers, (0, short)).view(-1, BLOCK) * scales).view(-1)[: target.numel()])
    return out.view(out_features, in_features)


@dequantize_nf4.register_fake
def _(packed: Tensor, absmax: Tensor, code: Tensor, out_features: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return packed.new_empty((out_features, in_features), dtype=dtype)


@dequantize_nf4.register_kernel("cuda")
def _nf4_bitsandbytes(
    packed: Tensor, absmax: Tensor, code: Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    bnb = _bitsandbytes()
    made = torch.float32 if dtype == torch.float64 else dtype
    state = bnb.QuantState(
        absmax=absmax, shape=(out_features, in_features), code=code, blocksize=BLOCK, quant_type="nf4", dtype=made
    )
    return bnb.dequantize_4bit(packed, state).to(dtype)


@cache
def _bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional
    except ImportError as missing:
        raise MissingPackage("bitsandbytes", "a 4-bit weight on a GPU", extra="cuda") from missing
    return bitsandbytes.functional


def quantize(weight: Tensor, bias: Tensor | None = None) -> NF4Linear:
    """An NF4Linear of a weight [out, in], on its device; a weight without data (meta, fake) gives shapes only."""
    empty = weight.is_meta or isinstance(weight, torch._subclasses.FakeTensor)
    made_on = "meta" if weight.is_cuda and not empty else weight.device  # bitsandbytes makes its own tensors
    layer = NF4Linear(weight.shape[1], weight.shape[0], bias=False, device=made_on)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    if empty:
        return layer
    if weight.is_cuda:
        _fill_with_bitsandbytes(layer, weight.detach())
    else:
        fill_from(layer, [weight.detach().reshape(-1)])
    return layer


def _fill_with_bitsandbytes(layer: NF4Linear, weight: Tensor) -> None:
    source = weight.float() if weight.dtype == torch.float64 else weight
    packed, state = _bitsandbytes().quantize_4bit(
        source, blocksize=BLOCK, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8
    )
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.absmax, layer.nested_absmax, layer.nested_code = state.absmax, state.state2.absmax, state.state2.code
    layer.code, layer.offset = state.code, state.offset


def fill_from(layer: NF4Linear, pieces: Iterable[Tensor]) -> None:
    """Quantise a weight that arrives in pieces on the host into the layer's own tensors, on whichever device they are.

    A piece is flat; all but the last hold whole blocks. A piece may be overwritten once the next is asked for.
    """
    code, nested_code = torch.tensor(NF4), torch.tensor(_dynamic_code())
    packed, absmax = layer.weight.detach().view(-1), torch.empty(layer.absmax.numel())
    place, buffer = 0, torch.empty(0, dtype=torch.uint8)
    with ThreadPoolExecutor(_threads()) as pool:
        for piece in pieces:
            count = piece.numel()
            buffer = buffer.resize_(max(buffer.numel(), -(-count // 2)))
            half, scales = buffer[: -(-count // 2)], absmax[place // BLOCK :]
            list(pool.map(partial(_pack, piece, code, half, scales), range(0, count, _AT_ONCE)))
            packed[place // 2 : place // 2 + half.numel()].copy_(half)
            place += count
    offset = absmax.mean()
    nested_bytes, nested = _nearest(absmax.sub_(offset), nested_code, NESTED_BLOCK)
    for target, value in (
        (layer.absmax, nested_bytes),
        (layer.nested_absmax, nested),
        (layer.nested_code, nested_code),
        (layer.code, code),
        (layer.offset, offset),
    ):
        target.copy_(value)


def _pack(piece: Tensor, code: Tensor, half: Tensor, scales: Tensor, start: int) -> None:
    """Quantise the numbers of a piece from `start` on; their bytes and scales go where they belong."""
    codes, absmax = _nearest(piece[start : start + _AT_ONCE].float(), code, BLOCK)
    pairs = functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
    half[start // 2 : start // 2 + pairs.shape[0]] = (pairs[:, 0] << 4) | pairs[:, 1]
    scales[start // BLOCK : start // BLOCK + absmax.numel()] = absmax


def _threads() -> int:
    return min(8, torch.get_num_threads())


def working_set(numbers: int, piece: int) -> int:
    """Host bytes that `fill_from` holds at most for a weight in pieces, besides what it is given and fills.

    The piece's packed bytes and, for the numbers in work, two fp32 values, a code, a comparison and the halves of a
    byte. In the end, for all scales: two fp32 values, an int32 code and its byte.
    """
    scales = -(-numbers // BLOCK)
    return max(4 * scales + min(numbers, piece) // 2 + 11 * _AT_ONCE * _threads(), 13 * scales)


def _nearest(numbers: Tensor, code: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For every number the index (uint8) of the nearest code times its block's largest magnitude; those magnitudes."""
    count = numbers.numel()
    blocks = (functional.pad(numbers, (0, -count % block)) if count % block else numbers).view(-1, block)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / absmax.clamp_min(1e-38)).unsqueeze(1)).clamp_(-1, 1)
    bounds = (code[:-1] + code[1:]) / 2
    if len(bounds) > _MOST_COMPARED:
        return torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8).view(-1)[:count], absmax
    nearest = torch.zeros(scaled.shape, dtype=torch.uint8)
    above = torch.empty(scaled.shape, dtype=torch.bool)
    for bound in bounds.tolist():
        torch.gt(scaled, bound, out=above)
        nearest.add_(above.view(torch.uint8))
    return nearest.view(-1)[:count], absmax


def replace_linears(model: nn.Module, skip: Sequence[str] = ("lm_head", "embed_out", "score", "classifier")) -> int:
    """Swap every Linear of a model, except its head and those with a part of their name in `skip`; returns how many.

    To be called before adapters are added (theirs are Linears, too). A weight held by two modules, as a tied head's, is
    left alone: packing it for one would unpack the tie.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    holders: dict[int, int] = {}
    for _, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    count = 0
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module is head or holders[id(module.weight)] > 1:
            continue
        if any(part in skip for part in name.split(".")):
            continue
        layer = quantize(module.weight, module.bias)
        layer.train(module.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
        count += 1
    return count
