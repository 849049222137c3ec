"""Runs the forecast's phases for real on a GPU and reads what PyTorch's allocator says."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from brimful.core.errors import MissingPackage
from brimful.core.forecast import PhasePeak
from brimful.core.measurement import Measurement, Survival
from brimful.core.runfile import RunFile
from brimful.core.tape import Category, Phase
from brimful.forecast.fresh import call
from brimful.forecast.phases import play
from brimful.forecast.survival import bisect
from brimful.step.assemble import assemble, shape_model
from brimful.step.step import Observer, TrainStep
from brimful.step.target import this_machine
from brimful.step.weights import weights_for

LEFT_BEHIND = 1 << 20


class _Gauge(Observer):
    """Reads the peaks of each phase."""

    def __init__(self) -> None:
        self.peaks: list[PhasePeak] = []

    @contextmanager
    def phase(self, phase: Phase, default: Category | None = None) -> Iterator[None]:
        """Peaks from here to the end of the block."""
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            self.peaks.append(PhasePeak(phase, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))

    def decide(self, flag: torch.Tensor) -> bool:
        """Wait as a step does, but never skip the update: its memory is what is measured, not its values."""
        bool(flag)
        return False

    def gradients_made(self, step: TrainStep) -> None:
        """Nothing to learn here."""

    def state_made(self, step: TrainStep) -> None:
        """Nothing to learn here."""


def require_gpu() -> None:
    """Refuse where there is nothing to measure on."""
    if not torch.cuda.is_available():
        raise MissingPackage("a CUDA GPU", "measure", hint="a forecast needs none: brimful forecast …")


def measure_survival(run: RunFile, forecast: int) -> Survival:
    """The smallest capacity that the run survives here, near the forecast one.

    Probes share this process as long as each leaves nothing behind that the next would be judged by.
    """

    def survives(capacity: int) -> bool:
        clean_slate()
        if torch.cuda.memory_allocated() <= LEFT_BEHIND:
            return measure_run(run, capacity, saving=False).died is None
        found = call(_died, run, capacity)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found["died"] is None

    require_gpu()
    return bisect(survives, forecast)


def _died(run: RunFile, capacity: int) -> dict[str, str | None]:
    return {"died": measure_run(run, capacity, saving=False).died}


def measure_run(run: RunFile, cap: int | None = None, *, history: bool = False, saving: bool = True) -> Measurement:
    """Run the phases on this machine's GPU, which may be made to look like a card with `cap` bytes to reserve.

    Without `saving` the copies of a save are left out: they take long and nothing on the GPU.
    """
    require_gpu()
    clean_slate()
    total = torch.cuda.get_device_properties(0).total_memory
    with _conditions(run, (cap or total) / total, history):
        gauge, started, died = _Gauge(), time.perf_counter(), None
        try:
            _phases(run, gauge, saving)
        except torch.OutOfMemoryError as error:
            died = str(error).split(". ")[0]
        seconds = time.perf_counter() - started
        free, _ = torch.cuda.mem_get_info()
        return Measurement(
            max((p.allocated for p in gauge.peaks), default=0),
            max((p.reserved for p in gauge.peaks), default=0),
            total - free,
            tuple(gauge.peaks),
            torch.cuda.memory_stats().get("num_alloc_retries", 0),
            seconds,
            died,
            _history() if history else None,
        )


@contextmanager
def _conditions(run: RunFile, share: float, history: bool) -> Iterator[None]:
    """The cap, the allocator's settings and the recording of its history, as they were before when it is over."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    if run.pin.allocator:
        _set_allocator(run.pin.allocator)
    if history:
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, context="alloc", stacks="python")
    try:
        yield
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.set_per_process_memory_fraction(1.0)
        if run.pin.allocator:
            clean_slate()
            _set_allocator(_defaults(run.pin.allocator))


def _phases(run: RunFile, gauge: _Gauge, saving: bool) -> None:
    """In a function of its own, so that nothing is alive when it has returned or raised."""
    with gauge.phase(Phase.LOAD):
        model = shape_model(run)
        fill = weights_for(model, seed=run.seed, scratch=run.method == "scratch")
        step = assemble(run, model, this_machine(), gauge, fill=fill)
    play(run, step, gauge, saving=saving)


def clean_slate() -> None:
    """As if the process had just begun: no cached segments, no library workspaces, fresh counters."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def _set_allocator(settings: str) -> None:
    """At run time, by the name that this version of PyTorch has for it."""
    own = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (own or torch.cuda.memory._set_allocator_settings)(settings)


def _defaults(settings: str) -> str:
    """The options of `settings`, set back to what PyTorch starts with."""
    start = {
        "expandable_segments": "False",
        "garbage_collection_threshold": "0",
        "max_split_size_mb": str((1 << 63) >> 20),
        "roundup_power2_divisions": "1",
    }
    return ",".join(f"{name}:{value}" for name, value in start.items() if name in settings)


def _history() -> tuple[tuple[int, str], ...]:
    """The real tape: positive sizes for allocations, negative for frees, each with its innermost line of Python."""
    snapshot = torch.cuda.memory._snapshot()
    events = []
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            events.append((entry["size"], _line(entry.get("frames", ()))))
        elif entry["action"] == "free_completed":
            events.append((-entry["size"], ""))
    return tuple(events)


def _line(frames: list[dict[str, object]]) -> str:
    for frame in frames:
        file = str(frame["filename"])
        if "/torch/" not in file:
            return f"{file.rsplit('/', 1)[-1]}:{frame['line']}"
    return ""
