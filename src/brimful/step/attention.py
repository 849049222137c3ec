"""Attention inside each row, by a kernel that is chosen here and not by PyTorch's dispatcher.

Choosing it ourselves makes the choice visible to the planner and the same in the trace and on the GPU. The kernels are
PyTorch's own (flash, memory-efficient); `exact` is plain tensor operations, for CPUs and what no kernel can express.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import AttentionInterface

from brimful.step import context
from brimful.step.batch import Layout
from brimful.step.dropout import keyed_dropout_scores
from brimful.step.target import Target

NAME = "brimful"
CAUSAL_FROM_TOP_LEFT = 1


@dataclass(frozen=True)
class Demand:
    """What a model asks of an attention kernel."""

    head_size: int
    dtype: torch.dtype
    bias: bool = False
    softcap: bool = False
    sinks: bool = False
    value_size: int | None = None  # where values are not as wide as queries


KERNELS = ("flash", "efficient", "exact")


def can_express(kernel: str, demand: Demand, target: Target) -> bool:
    """Whether a kernel computes what the demand says, on the target."""
    if kernel == "exact":
        return True
    if not target.on_cuda or demand.softcap or demand.sinks:
        return False
    ampere = target.capability >= (8, 0)
    if kernel == "flash":
        half = demand.dtype in (torch.float16, torch.bfloat16)
        fits = demand.head_size <= 256 and demand.head_size % 8 == 0 and demand.value_size in (None, demand.head_size)
        return half and ampere and fits and not demand.bias
    return demand.dtype in (torch.float16, torch.float32) or (demand.dtype == torch.bfloat16 and ampere)


def choose_kernel(demand: Demand, target: Target) -> str:
    """`flash`, `efficient` or `exact`: the fastest that can express the demand on the target."""
    return next(kernel for kernel in KERNELS if can_express(kernel, demand, target))


def can_run_unpadded(demand: Demand, target: Target) -> bool:
    """Whether rows can lie end to end: a kernel with row boundaries, or exact attention row by row on the CPU."""
    return choose_kernel(demand, target) == "flash" or (
        not demand.bias and (not target.on_cuda or choose_kernel(demand, target) == "efficient")
    )


def _flash(query, key, value, layout: Layout, *, causal, scale, dropout, window):
    """Flash attention; grouped key heads are used as they are, rows are kept apart by their starts."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    left, right = (window - 1, 0) if window else (None, None)
    if layout.padded:
        starts, longest_q, longest_k = None, query.shape[1], key.shape[1]
    else:
        query, key, value = (t.squeeze(0) for t in (query, key, value))
        starts, longest_q = layout.row_starts, max(layout.lengths)
        longest_k = longest_q
    out = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest_q, longest_k, dropout, causal, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
    return out if layout.padded else out.unsqueeze(0)


def _efficient(query, key, value, layout: Layout, *, causal, scale, dropout, window, bias):
    """The memory-efficient kernel: takes an additive bias and fp32, but wants as many key heads as query heads."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (_repeat(t, groups) for t in (key, value))
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    starts = longest = None
    if not layout.padded:
        starts, longest = layout.row_starts, max(layout.lengths)
    mask = CAUSAL_FROM_TOP_LEFT if causal else 0
    if window is not None:
        return _WindowedEfficient.apply(query, key, value, starts, longest, dropout, mask, scale, window)
    return torch.ops.aten._efficient_attention_forward(
        query, key, value, bias, starts, starts, longest, longest, dropout, mask, torch.is_grad_enabled(), scale=scale
    )[0]


class _WindowedEfficient(torch.autograd.Function):
    """PyTorch's own derivative of this kernel forgets the window, which makes wrong gradients; this one does not."""

    @staticmethod
    def forward(ctx, query, key, value, starts, longest, dropout, mask, scale, window):
        out, sums, seed, offset, longest_q, longest_k = torch.ops.aten._efficient_attention_forward(
            query, key, value, None, starts, starts, longest, longest, dropout, mask, True,
            scale=scale, window_size=window,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, starts, out, sums, seed, offset)
        ctx.options = (longest_q, longest_k, dropout, mask, scale, window)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, starts, out, sums, seed, offset = ctx.saved_tensors
        longest_q, longest_k, dropout, mask, scale, window = ctx.options
        grads = torch.ops.aten._efficient_attention_backward(
            grad, query, key, value, None, out, starts, starts, longest_q, longest_k, sums, dropout, seed, offset, mask,
            False, scale=scale, window_size=window,
        )  # fmt: skip
        return (*grads[:3], *(None,) * 6)


def _repeat(heads: torch.Tensor, groups: int) -> torch.Tensor:
    batch, count, length, size = heads.shape
    return heads[:, :, None].expand(batch, count, groups, length, size).reshape(batch, count * groups, length, size)


def _exact(query, key, value, *, causal, scale, dropout, window, bias, softcap, sinks, keys, module_id):
    """Plain tensor operations over one dense block of rows; dropout is keyed by row, head and positions."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (_repeat(t, groups) for t in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if causal:
        rows = torch.arange(query.shape[2], device=query.device)[:, None]
        columns = torch.arange(key.shape[2], device=query.device)[None, :]
        hidden = columns > rows
        if window:
            hidden = hidden | (columns <= rows - window)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    upcast = torch.promote_types(scores.dtype, torch.float32)
    if sinks is not None:  # a logit for each head that takes its share of the probability and gives no value
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    probabilities = functional.softmax(scores, dim=-1, dtype=upcast).to(query.dtype)
    if sinks is not None:
        probabilities = probabilities[..., :-1]
    if dropout:
        positions = torch.arange(key.shape[2], device=query.device).expand(query.shape[0], -1)
        probabilities = keyed_dropout_scores(probabilities, keys, positions, module_id, dropout)
    return torch.matmul(probabilities, value).transpose(1, 2).contiguous()


def _exact_rows(query, key, value, layout: Layout, query_keys, **options):
    """Exact attention of unpadded rows, one after the other."""
    pieces = []
    for q, k, v, row_keys in zip(
        query.split(layout.lengths, 2), key.split(layout.lengths, 2), value.split(layout.lengths, 2),
        query_keys.view(-1).split(layout.lengths), strict=True,
    ):  # fmt: skip
        pieces.append(_exact(q, k, v, keys=row_keys.unsqueeze(0), **options))
    return torch.cat(pieces, 1)


def shared_bias(role: str, position_bias: torch.Tensor) -> torch.Tensor:
    """T5's bias of relative positions as the kernel wants it, with the encoder's padding in it.

    T5 makes it once, transposed, and all layers share it: put straight, cast and masked here, it costs that once.
    """
    now = context.current()
    position_bias = position_bias.contiguous()
    if now.compute is not None:
        position_bias = position_bias.to(now.compute)
    if role != "encoder" or now.batch.padding is None:
        return position_bias
    return position_bias + _mask(now.batch.padding, position_bias.dtype)


def _mask(padding: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(padding.shape, dtype=dtype, device=padding.device)
    return mask.masked_fill(padding, torch.finfo(dtype).min)[:, None, None, :]


def _bias(role: str, position_bias, padding, dtype):
    """The additive bias of an attention: T5's positions, or for its cross-attention the encoder's padding alone."""
    if role != "cross":
        return position_bias
    return None if padding is None else _mask(padding, dtype)  # transformers passes zeros for the positions


def attend(
    module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
    position_bias=None, s_aux=None, **_,
):  # fmt: skip
    """The function that transformers calls in every attention layer. Shapes are (rows, heads, positions, head size)."""
    now = context.current()
    now.attended.append(module)
    role = getattr(module, "attention_role", "decoder")
    batch = now.batch
    if now.compute is not None:
        query, key, value = (t.to(now.compute) for t in (query, key, value))
    layout = batch.decoder_layout if batch.decoder_layout is not None and role != "encoder" else batch.layout
    causal = role == "decoder"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if sliding_window is not None and sliding_window >= (max(layout.lengths) if not layout.padded else layout.width):
        sliding_window = None
    bias = _bias(role, position_bias, batch.padding, query.dtype)
    demand = Demand(
        query.shape[-1], query.dtype, bias is not None, softcap is not None, s_aux is not None, value.shape[-1]
    )
    kernel = now.attention or choose_kernel(demand, now.target)
    options = {"causal": causal, "scale": scale, "dropout": dropout, "window": sliding_window}
    if kernel == "flash":
        return _flash(query, key, value, layout, **options), None
    if kernel == "efficient":
        return _efficient(query, key, value, layout, bias=bias, **options), None
    keys = batch.decoder_keys if batch.decoder_keys is not None and role != "encoder" else batch.keys
    options |= {"bias": bias, "softcap": softcap, "sinks": s_aux, "module_id": getattr(module, "dropout_id", 0)}
    if layout.padded:
        return _exact(query, key, value, keys=keys.view(query.shape[0], -1), **options), None
    return _exact_rows(query, key, value, layout, keys, **options), None


AttentionInterface.register(NAME, attend)
