"""The loss contract: a micro-batch returns the sum of its token losses.

Nothing here normalises; the step divides by the step's count of targets, which the host knows from the rows, so that a
loss does not depend on slicing. Labels are already shifted by the caller; `IGNORE` marks positions that are no target.

`plain` keeps all logits and lets autograd do the rest: 12 to 14 bytes per logit. `linear_cross_entropy` walks over the
tokens in chunks, computes a chunk's logits, their loss and at once their gradient, and keeps only what is as large as
the hidden states or the head. Both know what a model may do to its logits: softcap·tanh(scale·(h·Wᵀ + b) / softcap).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from brimful.core.errors import MissingPackage

IGNORE = -100
Kernel = Literal["torch", "liger"]

# Rows of the head's gradient computed at a time where the GPU cannot accumulate a product in fp32 by itself.
_HEAD_ROWS = 8192


def default_chunk(tokens: int, hidden: int, vocab: int) -> int:
    """Liger's rule: the power of two at or above tokens / ⌈vocab / hidden⌉, at most `tokens`.

    Then a chunk's logits are about as large as the hidden states of all tokens, whatever the vocabulary.
    """
    slices = -(-vocab // hidden)
    wanted = -(-tokens // slices)
    return max(1, min(1 << (wanted - 1).bit_length() if wanted > 0 else 1, tokens))


def plain(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    labels: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Sum of token losses through all logits at once; in fp32, or in fp64 if the logits are."""
    logits = head(hidden)
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.to(_wide(logits.dtype)).reshape(-1, logits.shape[-1])
    return functional.cross_entropy(logits, labels.reshape(-1), reduction="sum", ignore_index=IGNORE)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    chunk: int,
    kernel: Kernel = "torch",
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Sum of token losses of hidden [T, H] under the head weight [V, H], `chunk` tokens at a time.

    Computes in `hidden`'s dtype with softmax in fp32 (fp64 if hidden is); the head's gradient is summed over chunks in
    fp32 and returned in the weight's dtype. Gradients are made in forward, and only those that autograd will ask for.
    """
    if chunk < 1:
        raise ValueError(f"a chunk of {chunk} tokens")
    if kernel not in ("torch", "liger"):
        raise ValueError(f"unknown loss kernel {kernel!r}: torch or liger")
    inputs = (hidden, weight, bias)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs)
    settings = _Settings(min(chunk, max(1, hidden.shape[0])), kernel, softcap, scale, needs)
    if any(needs):
        return _LinearCrossEntropy.apply(hidden, weight, bias, labels, settings)
    return _forward(hidden, weight, bias, labels, settings)[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss is computed and summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Settings:
    chunk: int
    kernel: Kernel
    softcap: float | None
    scale: float
    needs: tuple[bool, ...]


_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
) -> tuple[Tensor, _Gradients]:
    """Loss and the gradients asked for. The logits of all chunks share one buffer: V-wide memory is taken once."""
    needs_hidden, needs_weight, needs_bias = settings.needs
    tokens, vocab, wide = hidden.shape[0], weight.shape[0], _wide(hidden.dtype)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        logits_of_chunks = hidden.new_empty((settings.chunk, vocab))
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        grad_bias = torch.zeros(vocab, dtype=wide, device=hidden.device) if needs_bias else None
        # One chunk's product is already summed in fp32 by the matrix multiplication: no buffer to sum chunks in.
        at_once = settings.chunk >= tokens and weight.dtype == hidden.dtype
        grad_weight: Tensor | None = None
        if needs_weight:
            grad_weight = torch.empty_like(weight) if at_once else torch.zeros_like(weight, dtype=wide)
        for start in range(0, tokens, settings.chunk):
            part = slice(start, min(start + settings.chunk, tokens))
            h, logits = hidden[part], logits_of_chunks[: part.stop - start]
            torch.mm(h, head.t(), out=logits)
            if bias is not None:
                logits.add_(bias)
            if settings.scale != 1.0:
                logits.mul_(settings.scale)
            compute = _torch_kernel_ if settings.kernel == "torch" else softmax_cross_entropy_
            total += compute(logits, labels[part], settings.softcap, any(settings.needs)).sum()
            if any(settings.needs) and settings.scale != 1.0:
                logits.mul_(settings.scale)
            if grad_hidden is not None:
                torch.mm(logits, head, out=grad_hidden[part])
            if grad_weight is not None:
                if at_once:
                    torch.mm(logits.t(), h, out=grad_weight)
                else:
                    add_product_(grad_weight, logits, h)
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=wide)
        # Freed before the head's gradient is cast: the two together would set the peak.
        del logits_of_chunks, head
        if tokens:
            del logits
        return total, (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients ready after forward; backward scales them in place, without asking the device what the scale is."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: _Settings
    ) -> Tensor:
        total, gradients = _forward(hidden, weight, bias, labels, settings)
        # Not save_for_backward: what is neither input nor output needs none of its checks, and hooks that offload
        # saved activations should not carry gradients away.
        ctx.gradients = gradients
        return total

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the loss was differentiated twice without retain_graph=True")
        if torch._C._autograd._get_current_graph_task_keep_graph():
            scaled = tuple(None if g is None else g * incoming.to(g.dtype) for g in ctx.gradients)
        else:
            scaled = tuple(None if g is None else g.mul_(incoming) for g in ctx.gradients)
            ctx.gradients = None
        return *scaled, None, None


def _torch_kernel_(logits: Tensor, labels: Tensor, softcap: float | None, gradient: bool) -> Tensor:
    """Token losses of [c, V] logits in plain torch; overwrites the logits with their gradient (or with anything).

    Temporaries: one fp32 [c, V] unless the logits are fp32 or fp64 themselves, one more under a softcap.
    """
    work = logits.to(_wide(logits.dtype))
    tanh = None
    if softcap is not None:
        tanh = work.div_(softcap).tanh_()
        work = tanh * softcap
    target = labels != IGNORE
    index = labels.clamp_min(0).unsqueeze(1)
    work.sub_(work.amax(1, keepdim=True))
    picked = work.gather(1, index)
    normaliser = work.exp_().sum(1, keepdim=True)
    losses = normaliser.log().sub_(picked).squeeze(1).masked_fill_(~target, 0)
    if not gradient:
        return losses
    # Dividing by infinity clears the rows that are no target, without one more pass over them.
    work.div_(normaliser.masked_fill_(~target.unsqueeze(1), float("inf")))
    work.scatter_(1, index, work.gather(1, index).sub_(target.unsqueeze(1).to(work.dtype)))
    if tanh is not None:
        work.mul_(tanh.square_().neg_().add_(1))
    if work is not logits:
        logits.copy_(work)
    return losses


@torch.library.custom_op("brimful::softmax_cross_entropy_", mutates_args={"logits"}, device_types="cpu")
def softmax_cross_entropy_(logits: Tensor, labels: Tensor, softcap: float | None, gradient: bool) -> Tensor:
    """Token losses; the logits become their gradient. On CUDA Liger's kernel, which allocates only the losses."""
    return _torch_kernel_(logits, labels, softcap, gradient)


@softmax_cross_entropy_.register_fake
def _(logits: Tensor, labels: Tensor, softcap: float | None, gradient: bool) -> Tensor:
    return logits.new_empty(labels.shape, dtype=_wide(logits.dtype))


@softmax_cross_entropy_.register_kernel("cuda")
def _liger_kernel_(logits: Tensor, labels: Tensor, softcap: float | None, gradient: bool) -> Tensor:
    # The kernel itself and not Liger's `cross_entropy_forward`: that one waits for the device three times per call
    # (.item() and two asserts) and stores the losses in the logits' dtype, bf16.
    kernel, block, warps = _liger(logits.element_size())
    losses = torch.zeros(labels.shape, dtype=torch.float32, device=logits.device)
    known = {
        "X_ptr": logits,
        "X_stride": logits.stride(0),
        "Y_ptr": labels,
        "Y_stride": labels.stride(0),
        "loss_ptr": losses,
        "loss_stride": 1,
        "n_cols": logits.shape[1],
        "n_non_ignore": 1,
        "sum_non_ignore_weight": 1,
        "weight_sum": 0.0,
        "ignore_index": IGNORE,
        "lse_square_scale": 0.0,
        "label_smoothing": 0.0,
        "reduction": "sum",
        "softcap": softcap,
        "BLOCK_SIZE": min(block, 1 << (logits.shape[1] - 1).bit_length()),
        "HAS_SOFTCAPPING": softcap is not None,
        "HAS_GRADIENTS": gradient,
    }
    # Versions differ in the extras that they can return or weigh by; all of those are off.
    off: dict[str, Any] = {"_ptr": None, "_stride": 0, "RETURN_": False, "HAS_": False}
    for name in kernel.arg_names:
        if name not in known:
            known[name] = next(v for part, v in off.items() if name.endswith(part) or name.startswith(part))
    with torch.cuda.device(logits.device) if logits.is_cuda else torch.no_grad():
        kernel[(logits.shape[0],)](**{name: known[name] for name in kernel.arg_names}, num_warps=warps)
    return losses


@cache
def _liger(element_size: int) -> tuple[Any, int, int]:
    """Liger's kernel, its largest block and its number of warps (its own choices)."""
    try:
        from liger_kernel.ops import cross_entropy
    except ImportError as missing:
        raise MissingPackage("liger-kernel", "the fused loss", extra="cuda") from missing
    blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
    warps = 8 if blackwell and element_size == 2 else 32
    return cross_entropy.liger_cross_entropy_kernel, cross_entropy.MAX_FUSED_SIZE, warps


@torch.library.custom_op("brimful::add_product_", mutates_args={"total"}, device_types="cpu")
def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [V, H] += leftᵀ [V, c] · right [c, H], summed in `total`'s dtype; allocates nothing on CUDA from sm_80."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    else:
        _add_product_in_parts_(total, left.to(total.dtype), right.to(total.dtype))


@add_product_.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None


@add_product_.register_kernel("cuda")
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif torch.cuda.get_device_capability(total.device)[0] >= 8:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        _add_product_in_parts_(total, left, right)


def _add_product_in_parts_(total: Tensor, left: Tensor, right: Tensor) -> None:
    for start in range(0, total.shape[0], _HEAD_ROWS):
        rows = slice(start, start + _HEAD_ROWS)
        total[rows].add_(torch.mm(left[:, rows].t(), right))
