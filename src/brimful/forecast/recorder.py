"""Records the tape: every storage that a traced run makes and lets go, with where it came from.

A dispatch mode sees the outputs of every operation; a storage's end is seen through a finalizer. Categories are settled
at the end, when it is known how long a storage lived: an activation is what forward made and backward let go.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.core.tape import Allocation, Category, Phase, Span, Tape
from brimful.forecast import engine
from brimful.forecast.persona import Persona
from brimful.step.step import Observer, Section, TrainStep

_ASK_DEVICE = torch.ops.prim.device.default
_READ_SCALAR = torch.ops.aten._local_scalar_dense.default
WORTH_A_LINE = 1 << 20
_OWN_FILES = ("/torch/", "/brimful/forecast/", "/transformers/utils/", "/transformers/modeling_layers.py")


class _Made:
    """A storage while the trace runs."""

    __slots__ = ("category", "dtype", "freed_in", "line", "module", "op", "recomputed", "section", "shape", "size")

    def __init__(self, size: int, op: str, section: Section | None) -> None:
        self.size = size
        self.op = op
        self.section = section
        self.freed_in: Section | None = None
        self.recomputed = False
        self.category: Category | None = None
        self.module = self.line = self.dtype = ""
        self.shape: tuple[int, ...] = ()


class Recorder(TorchDispatchMode, Observer):
    """Watches a traced run. `section` and `phase` say what is going on; the rest is seen."""

    def __init__(self, persona: Persona) -> None:
        super().__init__()
        engine.alone()
        self.persona = persona
        self.made: list[_Made] = []
        self.events: list[int] = []
        self.spans: list[Span] = []
        self._live: dict[int, int] = {}
        self._section: Section | None = None
        self._default: Category | None = None
        self._modules: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A trace never compiles, so PyTorch need not guard every call against it."""
        return False

    # what goes on

    @contextmanager
    def section(self, section: Section) -> Iterator[None]:
        """A part of the step begins; it ends with the block."""
        before, self._section = self._section, section
        try:
            yield
        finally:
            self._section = before

    @contextmanager
    def phase(self, phase: Phase, default: Category | None = None) -> Iterator[None]:
        """A phase of the run; what is made outside any section belongs to `default`."""
        start, self._default = len(self.events), default
        yield
        self._default = None
        self.spans.append(Span(phase, start, len(self.events)))

    def loss_made(self, hidden: torch.Tensor, total: torch.Tensor) -> None:
        """Mark the loss's part of the graph, so that its backward is known by its name."""
        stop, todo = hidden.grad_fn, [total.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node is stop or "place" in node.metadata:
                continue
            node.metadata["place"] = ("loss", "")
            todo.extend(after for after, _ in node.next_functions)

    def gradients_made(self, step: TrainStep) -> None:
        """Know gradients by their owners."""
        for name, parameter in step.parameters.items():
            if parameter.grad is not None:
                self.belongs(parameter.grad, Category.GRADIENTS, name)
        if step.wide is not None:
            for total in step.wide.sums.values():
                self.belongs(total, Category.GRADIENTS)

    def state_made(self, step: TrainStep) -> None:
        """Know the optimizer's state by its owner. Without `fused`, the count of steps is a scalar on the host."""
        owners = {parameter: name for name, parameter in step.parameters.items()}
        for parameter, state in step.optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if name == "step" and not step.optimizer.defaults.get("fused"):
                    self.forget(value)
                else:
                    self.belongs(value, Category.OPTIMIZER, owners.get(parameter, ""))

    def decide(self, flag: torch.Tensor) -> bool:
        """A trace assumes that nothing overflows."""
        return False

    def name_modules(self, module: torch.nn.Module) -> list[Any]:
        """Follow which module is running, by hooks; returns their handles."""
        names = {part: name for name, part in module.named_modules()}

        def enter(part: torch.nn.Module, _: Any) -> None:
            self._modules.append(names.get(part, ""))

        def leave(part: torch.nn.Module, _: Any, out: Any) -> None:
            name = self._modules.pop() if self._modules else ""
            first = out[0] if isinstance(out, tuple) and out else out
            node = getattr(first, "grad_fn", None)
            for _ in range(6):
                if node is None or "place" in node.metadata:
                    break
                node.metadata["place"] = (name, "")
                node = node.next_functions[0][0] if node.next_functions else None

        handles = []
        for part in module.modules():
            handles.append(part.register_forward_pre_hook(enter))
            handles.append(part.register_forward_hook(leave))
        return handles

    # what is made and let go

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ASK_DEVICE:  # two of three calls; nothing is made
            return args[0].fake_device if hasattr(args[0], "fake_device") else func(*args)
        if func is _READ_SCALAR and self._section is Section.OPTIMIZER:
            return 1.0  # the count of steps, which optimizers keep in a tensor
        if engine.adds_in_place(func, args):
            return args[0]
        out = self.persona.run(func, args, kwargs or {})
        if self._section is Section.HOST:
            return out
        place: tuple[str, str] | None = None
        passing, held = self.persona.held(func, args)
        numbers = [self._take(func, size) for size in held]
        for sizes in passing:
            self._pass_through(func, sizes, self._place())
        hosted = self.persona.on_host(func)
        for position, tensor in enumerate(_tensors(out)):
            if position in hosted:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if size == 0 or key in self._live:
                continue
            place = place or self._place()
            made = self._add(size, func, place)
            made.shape, made.dtype = tuple(tensor.shape), str(tensor.dtype)[6:]
            if size >= WORTH_A_LINE and not made.line:
                made.line = _own_line()
            self._live[key] = len(self.made)
            weakref.finalize(storage, self._free, key)
        for size in self.persona.workspace(func):
            self._add(size, func, place or self._place()).category = Category.WORKSPACE
        for sizes in self.persona.temporaries(func, args, kwargs or {}, out):
            self._pass_through(func, sizes, place or self._place())
        self.events.extend(-number for number in reversed(numbers))
        return out

    def _add(self, size: int, func: Any, place: tuple[str, str]) -> _Made:
        made = _Made(size, func.__name__ if hasattr(func, "__name__") else str(func), self._section)
        made.module, made.line = place
        made.category = self._default if self._section is None else None
        # forward inside backward: recomputation
        made.recomputed = self._section is Section.BACKWARD and torch.is_grad_enabled()
        self.made.append(made)
        self.events.append(len(self.made))
        return made

    def _pass_through(self, func: Any, sizes: Sequence[int], place: tuple[str, str]) -> None:
        """Memory that a kernel takes for itself and returns before it ends."""
        numbers = [self._take(func, size, place) for size in sizes]
        self.events.extend(-number for number in reversed(numbers))

    def _take(self, func: Any, size: int, place: tuple[str, str] | None = None) -> int:
        self._add(size, func, place or self._place()).category = Category.TEMPORARIES
        return len(self.made)

    def _free(self, key: int) -> None:
        number = self._live.pop(key, None)
        if number is not None:
            made = self.made[number - 1]
            made.freed_in = self._section
            # backward proper runs without gradients; what it lets go was kept for it
            made.recomputed = made.recomputed and not torch.is_grad_enabled()
            self.events.append(-number)

    def _place(self) -> tuple[str, str]:
        """The module under way; in backward, the one whose forward made the running node."""
        if torch._C._current_graph_task_id() == -1:
            if self._section in (Section.LOSS, Section.CLIP, Section.OPTIMIZER):
                return (self._section.value, "")
            return (self._modules[-1] if self._modules else "", "")
        node = torch._C._current_autograd_node()
        if node is None:
            return ("", "")
        return node.metadata.get("place", ("", ""))

    def belongs(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Settle the category of a storage that is known by its owner, and whose it is."""
        number = self._live.get(tensor.untyped_storage()._cdata)
        if number is not None:
            made = self.made[number - 1]
            made.category, made.module = category, name or made.module

    def forget(self, tensor: torch.Tensor) -> None:
        """Take a storage off the tape that lives on the host in a real run."""
        number = self._live.pop(tensor.untyped_storage()._cdata, None)
        if number is not None:
            self.made[number - 1].size = 0

    def tape(self) -> Tape:
        """What was recorded, with every category settled."""
        lines: dict[str, str] = {}  # backward has no line of its own: the one where its module's forward was
        for m in self.made:
            if m.line:
                lines.setdefault(m.module, m.line)
        allocations = tuple(
            Allocation(m.size, _category(m), m.op, m.module, m.shape, m.dtype, m.line or lines.get(m.module, ""))
            for m in self.made
        )
        gone = {i + 1 for i, m in enumerate(self.made) if m.size == 0}
        if not gone:
            return Tape(allocations, tuple(self.events), tuple(self.spans))
        kept, moved = [], [0]
        for event in self.events:
            if abs(event) not in gone:
                kept.append(event)
            moved.append(len(kept))
        spans = tuple(Span(s.phase, moved[s.start], moved[s.end]) for s in self.spans)
        return Tape(allocations, tuple(kept), spans)


def _category(made: _Made) -> Category:
    if made.category is not None:
        return made.category
    if made.section is Section.INPUTS:
        return Category.INPUTS
    if made.section is Section.LOSS or made.module == "loss":
        return Category.LOSS
    if made.recomputed or (made.section is Section.FORWARD and made.freed_in is not Section.FORWARD):
        return Category.ACTIVATIONS
    if made.section is Section.OPTIMIZER and made.freed_in is None:
        return Category.OPTIMIZER
    return Category.TEMPORARIES


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for item in out:
            yield from _tensors(item)


def _own_line() -> str:
    """The innermost line of the model's or the user's code, as file:line."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("/brimful/step/step.py"):  # called by autograd's engine: no line of a model
            return ""
        if not any(part in file for part in _OWN_FILES):
            return f"{'/'.join(file.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
