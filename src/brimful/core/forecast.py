"""What a forecast says: the peaks, what they are made of, and whether the run fits a card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from brimful.core.tape import Category, Phase


class Verdict(StrEnum):
    """`fits`: the smallest surviving capacity × 1.02 is under the line; `tight`: it survives without that margin."""

    FITS = "fits"
    TIGHT = "tight"
    NO = "no"


@dataclass(frozen=True)
class PhasePeak:
    """The highest memory within one phase."""

    phase: Phase
    allocated: int
    reserved: int


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that is alive at the peak, or several alike from one place."""

    size: int
    count: int
    category: Category
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Culprit:
    """The allocation that made the peak."""

    op: str
    module: str
    line: str
    phase: Phase
    size: int


@dataclass(frozen=True)
class Card:
    """The GPU that a forecast is judged against: what PyTorch may reserve there, and why."""

    name: str
    total: int
    context: int
    line: int
    measured: bool


@dataclass(frozen=True)
class Forecast:
    """The tape replayed through the simulated allocator. All sizes are bytes."""

    job: Mapping[str, object]
    allocated: int
    reserved: int
    device_used: int
    smallest_capacity: int
    verdict: Verdict | None
    card: Card | None
    items: Mapping[str, int]
    phases: Sequence[PhasePeak]
    culprit: Culprit
    largest: Sequence[LiveTensor]
    trainable_parameters: int
    total_parameters: int
    host_ram: int
    notes: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    trace_s: float = 0.0
