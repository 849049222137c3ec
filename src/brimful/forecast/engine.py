"""Autograd's engine adds gradients in place where it owns them; with fake tensors it does not, so a trace has to.

Where several gradients meet at one tensor the engine adds the later ones into the first, unless somebody else still
holds that one. For tensor subclasses, fake ones included, it always makes a new tensor. `adds_in_place` recognises an
addition of the engine that a real run would do in place, by the number of holders of its first operand.
"""

import sys
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_ADD = torch.ops.aten.add.Tensor


def adds_in_place(func: Any, args: Any) -> bool:
    """Whether this call is the engine adding into a gradient that nobody else holds."""
    if func is not _ADD or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    first = args[0]
    if not (isinstance(first, torch.Tensor) and isinstance(args[1], torch.Tensor) and _called_by_engine()):
        return False
    return _is_dense(first) and _holders(first) <= alone()


def _called_by_engine() -> bool:
    """No Python frame lies between the dispatch and the engine's own call."""
    frame = sys._getframe(3)
    while frame is not None and frame.f_code.co_name in ("_fn", "inner", "__torch_dispatch__"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return storage, tensor._use_count()


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() and tensor._is_view() is False


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and torch._C._current_graph_task_id() != -1:
            self.seen.append(_holders(args[0]))
        return func(*args, **(kwargs or {}))


@cache
def alone() -> tuple[int, int]:
    """What the counts are when the engine is the only holder, in this version of PyTorch. Ask before a trace begins."""
    with FakeTensorMode(), _Count() as count:
        x = torch.empty(4, 4, requires_grad=True)
        y = x * 2.0
        ((y @ y.detach()) * (y @ y.detach())).sum().backward()
    return count.seen[0]
