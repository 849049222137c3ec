"""The tape: the ordered allocations and frees of a run, each with size, category, op and module."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """What a piece of GPU memory is for."""

    WEIGHTS = "weights"
    ADAPTERS = "adapters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    LOSS = "logits and loss"
    TEMPORARIES = "temporaries"
    WORKSPACE = "library workspace"


class Phase(StrEnum):
    """The parts of a run that have a memory peak of their own, in the order in which they are traced.

    A rehearsal does what the first step does: the worst micro-batch, backward, and the optimizer's state.
    """

    LOAD = "load"
    FIRST_STEP = "first step"
    STEADY = "steady state"
    UPDATE = "clipping and update"
    EVALUATE = "evaluation"
    SAVE = "saving"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One storage: its exact size in bytes (not rounded as the allocator rounds) and where it came from."""

    size: int
    category: Category
    op: str
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A phase and the half-open range of events that belong to it."""

    phase: Phase
    start: int
    end: int


@dataclass(frozen=True)
class Tape:
    """Events in order: `i + 1` allocates `allocations[i]`, `-(i + 1)` frees it."""

    allocations: Sequence[Allocation]
    events: Sequence[int]
    spans: Sequence[Span] = ()
