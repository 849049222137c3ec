"""What a GPU really did with a run, and how far a forecast was off."""

from dataclasses import dataclass

from brimful.core.forecast import Forecast, PhasePeak


@dataclass(frozen=True)
class Measurement:
    """What a GPU really used. `died` is set when it ran out of memory; the peaks are then those up to that point."""

    allocated: int
    reserved: int
    device_used: int
    phases: tuple[PhasePeak, ...]
    retries: int
    seconds: float
    died: str | None = None
    history: tuple[tuple[int, str], ...] | None = None


@dataclass(frozen=True)
class Survival:
    """The capacities nearest to each other of which one let a run live and the other did not; None: not found."""

    survives_at: int | None
    dies_at: int | None
    num_probes: int


def errors(forecast: Forecast, measured: Measurement) -> dict[str, float]:
    """Forecast over measured, less one, for allocated and reserved."""
    pairs = {
        "allocated": (forecast.allocated, measured.allocated),
        "reserved": (forecast.reserved, measured.reserved),
    }
    return {name: ours / theirs - 1 for name, (ours, theirs) in pairs.items() if theirs}
