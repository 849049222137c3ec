"""The CUDA persona: what a CUDA kernel allocates beyond its outputs, for a GPU generation and a version of PyTorch.

A trace runs on fake CPU tensors and sees the outputs of every operation. What is added here is what only CUDA does:
workspaces that libraries take through PyTorch's allocator, and memory that kernels take for themselves while they run.
Every rule is a formula over shapes that was checked against PyTorch's memory history; none is keyed by a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from brimful.forecast.reductions import Multiprocessors, reduction_buffers

aten = torch.ops.aten
MIB = 1 << 20
CUBLASLT_WORKSPACE = MIB
SORTED_ABOVE = 3072  # tokens; the embedding's gradient sorts them from there on
MATRIX_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
}  # fmt: skip
REDUCTIONS = {  # and where among their arguments the reduced dimensions are
    aten.sum.default: 1, aten.sum.dim_IntList: 1, aten.mean.default: 1, aten.mean.dim: 1, aten.amax.default: 1,
    aten.linalg_vector_norm.default: 2,
}  # fmt: skip
HOST_OUTPUTS: dict[Any, Sequence[int]] = {aten._efficient_attention_forward.default: (2, 3)}  # seed and offset

Groups = Sequence[Sequence[int]]  # sizes that live together; one group is gone before the next begins
Rule = Callable[[Sequence[Any], dict[str, Any], Any], Groups]
RULES: dict[Any, Rule] = {}
HELD: dict[Any, Callable[[Sequence[Any]], tuple[Groups, Sequence[int]]]] = {}


STAND_INS: dict[Any, Callable[..., Any]] = {}


def stand_in(operation: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Describe the outputs of an operation in place of PyTorch's own fake implementation."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        STAND_INS[operation] = function
        return function

    return register


def held(operation: Any) -> Callable[[Any], Any]:
    """Say what an operation takes before it makes its outputs."""

    def register(function: Any) -> Any:
        HELD[operation] = function
        return function

    return register


def rule(*operations: Any) -> Callable[[Rule], Rule]:
    """Say what an operation takes for itself while it runs."""

    def register(function: Rule) -> Rule:
        for operation in operations:
            RULES[operation] = function
        return function

    return register


@dataclass
class Persona:
    """One process on one GPU: knows which libraries have already taken their workspace."""

    capability: tuple[int, int]
    multiprocessors: Multiprocessors
    _handles: set[tuple[str, str]] = field(default_factory=set)

    @property
    def cublas_workspace(self) -> int:
        """Bytes that cuBLAS takes for each thread's handle."""
        return 32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024

    def workspace(self, func: Any) -> Sequence[int]:
        """What a library takes at its first use in a thread and never returns. Backward runs in a thread of its own."""
        if func not in MATRIX_PRODUCTS:
            return ()
        thread = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        taken = [("cublas", thread, self.cublas_workspace)]
        if func is aten.addmm.default:  # a product with a bias goes to cuBLASLt
            taken.append(("cublasLt", thread, CUBLASLT_WORKSPACE))
        new = [size for library, where, size in taken if (library, where) not in self._handles]
        self._handles.update((library, where) for library, where, _ in taken)
        return new

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The outputs of an operation, by our own description where PyTorch's fake one is wrong."""
        own = STAND_INS.get(func)
        return own(*args, **kwargs) if own is not None else func(*args, **kwargs)

    def temporaries(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Groups:
        """What a kernel takes for itself while it runs."""
        if func in REDUCTIONS:
            place = REDUCTIONS[func]
            dims = args[place] if len(args) > place else kwargs.get("dim")
            dims = [dims] if isinstance(dims, int) else dims
            return [reduction_buffers(args[0], dims, self.multiprocessors)]
        found = RULES.get(func)
        return found(args, kwargs, out) if found is not None else ()

    def held(self, func: Any, args: Sequence[Any]) -> tuple[Groups, Sequence[int]]:
        """What a kernel takes before it makes its outputs: groups that are gone by then, and what it holds on to."""
        found = HELD.get(func)
        return found(args) if found is not None else ((), ())

    def on_host(self, func: Any) -> Sequence[int]:
        """Which outputs of an operation CUDA leaves on the host."""
        return HOST_OUTPUTS.get(func, ())


def _round(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@rule(aten._flash_attention_backward.default)
def _flash_backward(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Groups:
    """An fp32 accumulator of dq and the row sums, over rows rounded to 128; expanded dk and dv for grouped heads."""
    query, key, starts = args[1], args[2], args[6]
    heads, size = query.shape[-2:]
    size_rounded = _round(size, 32)
    if starts is None:
        rows, length = query.shape[0], _round(query.shape[1], 128)
        positions = rows * length
        softmax_d = rows * heads * length
    else:
        rows = starts.shape[0] - 1
        positions = query.shape[0] + 128 * rows
        softmax_d = heads * positions
    copies = [t.numel() * t.element_size() for t in (args[0], args[4]) if not t.is_contiguous()]
    temporaries = [*copies, 4 * softmax_d, 4 * positions * heads * size_rounded]
    if key.shape[-2] != heads:
        expanded = key.numel() // key.shape[-2] * heads * query.element_size()
        temporaries += [expanded, expanded]
    return [temporaries]


@stand_in(aten._efficient_attention_backward.default)
def _efficient_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None,
    *rest: Any, **_: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """PyTorch's fake implementation has forgotten the argument `out` and fails where a scale is given."""
    grad_bias = None
    if bias is not None and rest[-1]:
        width = _round(bias.shape[-1], 16)
        grad_bias = bias.new_empty((*bias.shape[:-1], width))[..., : bias.shape[-1]]
    return (*(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)), grad_bias)


@rule(aten._efficient_attention_backward.default)
def _efficient_backward_buffers(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Groups:
    """Row sums in fp32 and an fp32 accumulator of dq in tiles, each with a lock of 16 bytes."""
    query = args[1]
    rows, length, heads, size = query.shape
    starts, longest = args[6], args[8]
    if starts is not None:
        rows, length = starts.shape[0] - 1, longest
    sums = 4 * rows * heads * length
    tile = 64 if size <= 64 else 128
    tiles = -(-length // tile) * -(-size // tile)
    accumulator = rows * heads * tiles * (4 * tile * tile + 16)
    if query.dtype == torch.float32:  # the row sums are made by ordinary operations first
        return [(4 * query.numel(), sums, sums), (sums, accumulator)]
    return [(sums, accumulator)]


@rule(aten._flash_attention_forward.default)
def _flash_forward(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Groups:
    """With dropout, a scratch copy of the generator's state."""
    return [(16,)] if args[7] > 0 else ()


@held(aten._foreach_norm.Scalar)
def _foreach_norm(args: Sequence[Any]) -> tuple[Groups, Sequence[int]]:
    """A partial result per chunk of 65,536 elements, for as many chunks as the largest tensor has, for every tensor."""
    chunks = max(-(-tensor.numel() // 65536) for tensor in args[0])
    return (), (4 * len(args[0]) * chunks,)


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Groups:
    """Above 3,072 tokens they are sorted by their index, and partial sums are made in fp32 for runs of ten."""
    grad, indices, vocabulary = args[0], args[1], args[2]
    tokens, width = indices.numel(), _round(grad.shape[-1], 32)
    if tokens <= SORTED_ABOVE:
        return ()
    partial = tokens // 10 + min(tokens, vocabulary)
    return [(8 * tokens, 8, 8 * tokens, 8 * tokens, 8, 8 * partial, 4 * partial * width)]


@held(aten.embedding_dense_backward.default)
def _embedding_sort(args: Sequence[Any]) -> tuple[Groups, Sequence[int]]:
    """The sorted indices and where each came from; while sorting also a range and the sort's own memory."""
    tokens = args[1].numel()
    if tokens <= SORTED_ABOVE:
        return (), ()
    return [(8 * tokens, 16 * tokens + tokens // 4 + 16896)], (8 * tokens, 8 * tokens)


@stand_in(aten.native_layer_norm.default)
def _layer_norm(source: torch.Tensor, shape: Sequence[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """CUDA keeps mean and deviation in fp32; the CPU in the type of its input."""
    kept = (*source.shape[: source.dim() - len(shape)], *[1] * len(shape))
    wide = torch.promote_types(source.dtype, torch.float32)
    statistics = (torch.empty(kept, dtype=wide, device=source.device) for _ in range(2))
    return (torch.empty(source.shape, dtype=source.dtype, device=source.device), *statistics)


@stand_in(aten._grouped_mm.default)
def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None = None, *_: Any, **__: Any
) -> torch.Tensor:
    """PyTorch's fake implementation takes bf16 alone; CUDA falls back to one product a group for other types."""
    if left.dim() == 2 and right.dim() == 2:
        assert offsets is not None
        shape = (offsets.numel(), left.shape[0], right.shape[1])
    else:
        shape = (*left.shape[:-1], right.shape[-1])
    return left.new_empty(shape)


@stand_in(aten._fused_sgd_.default)
@stand_in(aten._fused_adamw_.default)
def _fused_update(*_: Any, **__: Any) -> None:
    """They change tensors in place and take nothing; without a fake implementation PyTorch would run them for real."""


@stand_in(aten._unsafe_view.default)
def _unsafe_view(source: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """The same storage under another shape; PyTorch's fake implementation is right but never cached, and slow."""
    return aten.view.default(source, size)
