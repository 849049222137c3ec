"""CUDA's autocast on the CPU: which operations run in fp32 differs between the two, and memory with it.

While a trace runs, the CPU's lists are overridden where they differ from CUDA's for operations that models use.
Products are on both lists. (CUDA's lists: aten/src/ATen/autocast_mode.h.)
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

KEY = "AutocastCPU"
# run in fp32, their inputs cast
WIDENED = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "cosine_similarity", "logsumexp", "kl_div", "l1_loss", "smooth_l1_loss", "cdist", "renorm",
    "nll_loss", "cross_entropy_loss",
)  # fmt: skip
# compute in fp32 from what they are given, unless told otherwise
WIDE_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList",
    "linalg_vector_norm",
)  # fmt: skip
# not on CUDA's list at all; the CPU promotes their inputs by copies
UNTOUCHED = ("cat", "stack", "index_copy")


@contextmanager
def like_cuda(enabled: bool) -> Iterator[None]:
    """Until the end of the block, autocast on the CPU casts as autocast on CUDA would."""
    if not enabled:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden is the point
            for name in UNTOUCHED:
                _override(library, name, torch.library.fallthrough_kernel)
            for name in WIDENED:
                _override(library, name, _widened(_operator(name)))
            for name in WIDE_RESULT:
                _override(library, name, _wide_result(_operator(name)))
        yield
    finally:
        library._destroy()


def _override(library: torch.library.Library, name: str, kernel: Any) -> None:
    if _operator(name) is not None:
        library.impl(name, kernel, KEY, allow_override=True)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None) if found is not None else None


def _below() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _widened(operator: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _below():
            args, kwargs = tree_map(lambda v: v.float() if _is_half(v) else v, (args, kwargs))
            return operator(*args, **kwargs)

    return run


def _wide_result(operator: Any) -> Any:
    place = next((i for i, a in enumerate(operator._schema.arguments) if a.name == "dtype"), None)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place is not None and place < len(args) else kwargs.get("dtype")
        if given is None and _is_half(args[0]):
            args = args[:place] if place is not None else args
            kwargs = {**kwargs, "dtype": torch.float32}
            if not operator._schema.arguments[place].kwarg_only:
                args, kwargs = (*args, *(None,) * (place - len(args)), torch.float32), {}
        with _below():
            return operator(*args, **kwargs)

    return run
