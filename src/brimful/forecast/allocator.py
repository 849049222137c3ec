"""Replays a tape through a model of PyTorch's CUDA caching allocator: what is allocated, what is reserved, and where
it runs out.

The model is of torch 2.11 to 2.13 with one device and one stream, without CUDA graphs or private pools, and follows
the allocator byte for byte. Two things it cannot know:

- Addresses decide between free blocks of equal size. Segments from `cudaMalloc` are given rising addresses here; the
  driver may hand out an address again after a segment was released.
- The device is taken to have what the capacity allows, and an expandable segment to have address space without end
  (PyTorch takes 9/8 of the card).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from brimful.core.forecast import PhasePeak
from brimful.core.tape import Span, Tape
from brimful.forecast.allocator_blocks import NO_LIMIT, Allocator, Block
from brimful.forecast.allocator_settings import MIB, SMALL_REQUEST, SMALL_SEGMENT, Settings

__all__ = ["Replay", "Settings", "replay", "smallest_capacity"]

DEFAULT = Settings()
RESOLUTION = 2 * MIB
MOST_REPLAYS = 12
NEIGHBOURS = 2
MARGIN = 1.02
"""The verdict `fits` asks for this much more than the smallest capacity, so survival is tried there too."""


@dataclass(frozen=True)
class Replay:
    """What the allocator did with a tape. `allocated` and `reserved` mean what `torch.cuda` reports under these names.

    `died_at` is the event that ran out of memory, where the replay ends. `retries` is PyTorch's `num_alloc_retries`,
    which counts the last one, that did not help, too. A phase that was not reached has peaks of 0.
    """

    peak_allocated: int
    peak_allocated_event: int
    peak_reserved: int
    peak_reserved_event: int
    died_at: int | None
    retries: int
    phases: tuple[PhasePeak, ...]


def replay(tape: Tape, settings: Settings = DEFAULT, capacity: int | None = None) -> Replay:
    """Run the tape; `capacity` is the most that may be reserved, as `set_per_process_memory_fraction` limits it."""
    run = _Run(tape, settings, capacity)
    peak_allocated = max(run.allocated, default=0)
    peak_reserved = max(run.reserved, default=0)
    return Replay(
        peak_allocated=peak_allocated,
        peak_allocated_event=run.allocated.index(peak_allocated) if run.allocated else 0,
        peak_reserved=peak_reserved,
        peak_reserved_event=run.reserved.index(peak_reserved) if run.reserved else 0,
        died_at=run.died_at,
        retries=run.allocator.retries,
        phases=tuple(
            PhasePeak(
                span.phase,
                _peak_within(run.allocated, span, run.died_at),
                _peak_within(run.reserved, span, run.died_at),
            )
            for span in tape.spans
        ),
    )


def smallest_capacity(tape: Tape, settings: Settings = DEFAULT) -> int:
    """The smallest capacity with which the tape survives and above which none was seen to die.

    A replay can only change where the capacity crosses an amount that was asked of the device: from the largest amount
    granted to the smallest refused it stays the same. So each replay settles an interval of capacities, and the search
    ends on the edge of one, exact to the byte. (A garbage collection threshold moves with the capacity; the search then
    ends within 2 MiB.) Survival need not be monotone, so capacities just above the answer and 2 % above it are tried
    too. When the replays are used up the answer is the lowest capacity that survived above all that died.
    """
    granted = _Run(tape, settings, None).allocator.granted
    outcomes = [_Outcome(0, _least_reserved(tape, settings), survives=False)]
    threshold = settings.garbage_collection_threshold
    if threshold:
        outcomes += [_outcome(tape, settings, granted), _Outcome(int(granted / threshold) + 1, NO_LIMIT, survives=True)]
    else:
        outcomes += [_Outcome(granted, NO_LIMIT, survives=True)]
    while len(outcomes) <= MOST_REPLAYS:
        capacity = _doubtful(outcomes, RESOLUTION if threshold else 1)
        if capacity is None:
            break
        outcomes.append(_outcome(tape, settings, capacity))
    return _answer(outcomes)[1]


@dataclass(frozen=True)
class _Outcome:
    """How the replay ends with every capacity in [start, end)."""

    start: int
    end: int
    survives: bool


def _least_reserved(tape: Tape, settings: Settings) -> int:
    """What the live requests alone take at their peak: less than this cannot do."""
    sizes = _rounded(tape, settings)
    live, peak = [0, 0], 0
    for event in tape.events:
        size = sizes[abs(event) - 1]
        live[size <= SMALL_REQUEST] += size if event > 0 else -size
        peak = max(peak, live[False] - (-live[True] // SMALL_SEGMENT) * SMALL_SEGMENT)
    # An expandable segment grows by whole pages, and the capacity is compared with the request before rounding.
    return peak - settings.large_segment_size if settings.expandable_segments else peak


def _outcome(tape: Tape, settings: Settings, capacity: int) -> _Outcome:
    run = _Run(tape, settings, capacity)
    survives = run.died_at is None
    if settings.garbage_collection_threshold:
        return _Outcome(capacity, capacity + (RESOLUTION if survives else 1), survives)
    return _Outcome(run.allocator.granted, run.allocator.refused, survives)


def _answer(outcomes: Sequence[_Outcome]) -> tuple[int, int]:
    """Where the capacities seen to die end, and the lowest from there on that is known to survive."""
    dead = max(outcome.end for outcome in outcomes if not outcome.survives)
    return dead, min(outcome.start for outcome in outcomes if outcome.survives and outcome.start >= dead)


def _doubtful(outcomes: Sequence[_Outcome], resolution: int) -> int | None:
    """The capacity whose replay tells most: where the answer is narrowed down, then above it, or None if all is told.

    The answer mostly lies a little above what the live requests take, so the search goes up from there in growing steps
    until it halves what is left.
    """
    dead, alive = _answer(outcomes)
    gap = alive - dead
    if gap * 100 > alive:
        streak = sum(1 for _ in takewhile(lambda outcome: not outcome.survives, reversed(outcomes)))
        return dead + min(gap // 2, max(dead >> 5, RESOLUTION) << streak) // MIB * MIB
    # Tried before the last percent is: what dies there moves the answer, which takes replays.
    if not any(
        outcome.start <= alive * (MARGIN + 0.01) and outcome.end > alive * (MARGIN - 0.01) for outcome in outcomes
    ):
        return int(alive * MARGIN)
    if gap >= resolution:
        return dead + gap // 2 // MIB * MIB
    above = alive
    for _ in range(NEIGHBOURS):
        above = max((outcome.end for outcome in outcomes if outcome.start <= above < outcome.end), default=above)
        if not _settled(above, outcomes):
            return above
    return None


def _settled(capacity: int, outcomes: Sequence[_Outcome]) -> bool:
    return capacity >= NO_LIMIT or any(outcome.start <= capacity < outcome.end for outcome in outcomes)


def _rounded(tape: Tape, settings: Settings) -> list[int]:
    known: dict[int, int] = {size: settings.rounded(size) for size in {a.size for a in tape.allocations}}
    return [known[allocation.size] for allocation in tape.allocations]


def _peak_within(levels: Sequence[int], span: Span, died_at: int | None) -> int:
    """The highest level of a span, the level at which it begins included; 0 where the replay died before it."""
    if died_at is not None and span.start >= died_at:
        return 0
    return max(levels[max(0, span.start - 1) : span.end], default=0)


class _Run:
    """The tape's levels after each event, up to the end or to the event that ran out of memory."""

    def __init__(self, tape: Tape, settings: Settings, capacity: int | None) -> None:
        self.allocator = allocator = Allocator(settings, capacity)
        self.allocated: list[int] = []
        self.reserved: list[int] = []
        self.died_at: int | None = None
        sizes = _rounded(tape, settings)
        live: dict[int, Block] = {}
        for index, event in enumerate(tape.events):
            if event > 0:
                block = allocator.malloc(sizes[event - 1])
                if block is None:
                    self.died_at = index
                    break
                live[event] = block
            else:
                allocator.free(live.pop(-event), sizes[-event - 1] <= SMALL_REQUEST)
            self.allocated.append(allocator.allocated)
            self.reserved.append(allocator.reserved)
