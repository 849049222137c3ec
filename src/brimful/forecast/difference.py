"""Where a forecast's tape and a GPU's real history part ways: at which operation, by how much, how often.

Both are long and nearly equal. They are aligned by size (Myers' algorithm, a stretch at a time), and what is left over
on either side is read as stretches of time in which the GPU holds more or less than was forecast. The stretches that
are open at the peak (the higher of the two) add up to the difference there, so they are told first. Needs no torch.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from brimful.core.tape import Phase, Tape
from brimful.core.units import KiB, format_bytes

BLOCK = 512
WORTH_TELLING = 64 * KiB
MOST_EDITS = 64  # in one stretch of the alignment
ANCHOR = 12  # so many events in a row are not equal by accident
FURTHEST_ANCHOR = 20_000
SWAP = 4  # what is only so many events apart is another order, not another lifetime

History = Sequence[tuple[int, str]]
Steps = list[tuple[bool, int, int]]
"""Edits: whether it is the measured side's event, and how many events of each side were passed before it."""


@dataclass(frozen=True)
class Place:
    """Where in the forecast's tape: the op of the last allocation, its module with layer numbers starred."""

    op: str = ""
    module: str = ""
    line: str = ""
    phase: Phase | None = None

    def __str__(self) -> str:
        op = self.op.partition(".")[0]
        return f"{op} in {self.module}" if self.module else op or "the start"


@dataclass(frozen=True)
class Parting:
    """Places alike from which on the GPU holds `bytes` more (less, if negative) than forecast, each of `times` times.

    `forecast` and `measured` are the signed sizes that only one side has there. `at_peak` is how much more
    the GPU holds because of all of them at the higher of the two peaks. `until` is where it ends, if it does; `moved`
    says that it is the same event, only earlier or later.
    """

    after: Place
    before: str
    forecast: tuple[int, ...]
    measured: tuple[int, ...]
    measured_line: str
    bytes: int
    at_peak: int
    times: int
    until: Place | None
    moved: bool

    def __str__(self) -> str:
        times = f" ({self.times} times)" if self.times > 1 else ""
        line = f", at {self.measured_line}" if self.measured_line else ""
        peak = f"; {_more(self.at_peak)} at the peak" if self.at_peak else ""
        return f"at {self.after} the GPU {self._does()}{times}{line}{peak}"

    def _does(self) -> str:
        took, taken = _sum_of_takes(self.forecast), _sum_of_takes(self.measured)
        amount = format_bytes(abs(self.bytes))
        ends = self.until is not None and self.until.op != self.after.op
        until = f" until {self.until}" if ends else ""
        if taken and took:
            return f"takes {format_bytes(taken)} where {format_bytes(took)} are forecast"
        if taken:
            return f"takes {amount} early" if self.moved else f"also takes {amount}{until}"
        if took:
            return f"takes {amount} later" if self.moved else f"does not take {amount}{until}"
        if self.bytes > 0:
            return f"keeps {amount}{until or (' a little longer' if self.until else ' to the end')}"
        return f"frees {amount} early" + (f", not only at {self.until}" if ends else "")


@dataclass(frozen=True, slots=True)
class _Edit:
    """An event that only one side has, where `at` events of the measured and `after` of the forecast were passed."""

    at: int
    after: int
    size: int
    measured: bool
    line: str = ""

    @property
    def forecast_time(self) -> float:
        """Its place among the forecast's events."""
        return self.after + 0.5 if self.measured else self.after

    @property
    def change(self) -> int:
        """What it does to measured less forecast."""
        return self.size if self.measured else -self.size


@dataclass(frozen=True, slots=True)
class _Stretch:
    """From an edit on the two sides differ by its change, until another one undoes that."""

    begin: _Edit
    end: _Edit | None

    def covers(self, peak: "_Peak") -> bool:
        """Whether it is open at the peak."""
        begun, ended = (
            edit is not None and (edit.at <= peak.event if peak.measured else edit.forecast_time <= peak.event)
            for edit in (self.begin, self.end)
        )
        return begun and not ended


@dataclass(frozen=True, slots=True)
class _Peak:
    """Just after an event of one of the two sides."""

    event: int
    measured: bool


def partings(tape: Tape, history: History, smallest: int = WORTH_TELLING) -> tuple[Parting, ...]:
    """Where they part, what matters to the peak first; empty if they agree but for order and small change."""
    theirs = [_rounded(size) for size, _ in history]
    sizes = [_rounded(allocation.size) for allocation in tape.allocations]
    ours = [sizes[event - 1] if event > 0 else -sizes[-event - 1] for event in tape.events]
    peak = _highest(ours, theirs)
    takes = list(accumulate((size >= smallest for size in theirs), initial=0))
    stretches = _stretches(_edits(ours, theirs, history, smallest))
    return _told(tape, [s for s in stretches if s.covers(peak) or not _only_order(s, takes)], peak)


def _only_order(stretch: _Stretch, takes: Sequence[int]) -> bool:
    """Whether the same event merely comes a little earlier or later: a free, with nothing taken in between."""
    begin, end = stretch.begin, stretch.end
    if end is None or begin.measured == end.measured:
        return False
    return end.at - begin.at <= SWAP or (begin.size < 0 and takes[begin.at] == takes[end.at])


def _rounded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK if size > 0 else size // BLOCK * BLOCK


def _highest(ours: Sequence[int], theirs: Sequence[int]) -> _Peak:
    def top(changes: Sequence[int], measured: bool) -> tuple[int, _Peak]:
        level, event = max(((level, -index) for index, level in enumerate(accumulate(changes))), default=(0, 0))
        return level, _Peak(-event, measured)

    return max(top(theirs, True), top(ours, False), key=lambda found: found[0])[1]


def _edits(ours: Sequence[int], theirs: Sequence[int], history: History, smallest: int) -> list[_Edit]:
    left, right = _worth_telling(ours, smallest), _worth_telling(theirs, smallest)
    edits = []
    for measured, i, j in align([ours[k] for k in left], [theirs[k] for k in right]):
        at = right[j] if j < len(right) else len(theirs)
        after = left[i - 1] if i else 0
        if measured:
            edits.append(_Edit(at, after, theirs[at], True, history[at][1]))
        else:
            edits.append(_Edit(at, left[i], ours[left[i]], False))
    return edits


def _worth_telling(sizes: Sequence[int], smallest: int) -> list[int]:
    """The events that are not small, without the frees at the very end: there a process lets go of all it has."""
    end = max((index for index, size in enumerate(sizes) if size > 0), default=-1) + 1
    return [index for index in range(end) if abs(sizes[index]) >= smallest]


def align(ours: Sequence[int], theirs: Sequence[int]) -> Steps:
    """What to leave out on either side so that the rest is equal: nearly as little as can be, in nearly linear time."""
    steps: Steps = []
    i = j = 0
    while i < len(ours) or j < len(theirs):
        stretch, x, y, ended = _few_edits(ours, theirs, i, j)
        if not ended:
            anchor = _anchor(ours, theirs, i, j) if len(stretch) * 4 > x - i + y - j else None
            if anchor is not None:
                x, y = anchor
                stretch = [(False, k, j) for k in range(i, x)] + [(True, x, k) for k in range(j, y)]
            else:  # the end of a path that is cut short is a guess: only the first half is taken
                stretch = stretch[: MOST_EDITS // 2]
                measured, x, y = stretch[-1]
                x, y = (x, y + 1) if measured else (x + 1, y)
        steps += stretch
        i, j = x, y
    return steps


def _few_edits(ours: Sequence[int], theirs: Sequence[int], i: int, j: int) -> tuple[Steps, int, int, bool]:
    """Myers' greedy search from (i, j): the edits, where they lead, and whether that is the end of both."""
    reached = {1: i}
    trail: list[dict[int, int]] = []
    width, height, offset = len(ours), len(theirs), j - i
    for edits in range(MOST_EDITS + 1):
        trail.append(dict(reached))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (
                diagonal != edits and reached.get(diagonal - 1, -1) < reached.get(diagonal + 1, -1)
            )
            x = reached[diagonal + 1] if down else reached[diagonal - 1] + 1
            y = x + offset - diagonal
            while x < width and y < height and ours[x] == theirs[y]:
                x += 1
                y += 1
            reached[diagonal] = x
            if x >= width and y >= height:
                return _path(trail, edits, diagonal, x, offset), width, height, True
    ends = range(-MOST_EDITS, MOST_EDITS + 1, 2)
    inside = [d for d in ends if reached[d] <= width and reached[d] + offset - d <= height]
    best = max(inside, key=lambda d: 2 * reached[d] - d)
    x = reached[best]
    return _path(trail, MOST_EDITS, best, x, offset), x, x + offset - best, False


def _path(trail: Sequence[dict[int, int]], edits: int, diagonal: int, x: int, offset: int) -> Steps:
    steps: Steps = []
    for count in range(edits, 0, -1):
        reached = trail[count]
        down = diagonal == -count or (
            diagonal != count and reached.get(diagonal - 1, -1) < reached.get(diagonal + 1, -1)
        )
        diagonal += 1 if down else -1
        x = reached[diagonal]
        steps.append((down, x, x + offset - diagonal))
    return steps[::-1]


def _anchor(ours: Sequence[int], theirs: Sequence[int], i: int, j: int) -> tuple[int, int] | None:
    """The nearest place from where both go on alike for a while."""
    places: dict[tuple[int, ...], int] = {}
    for y in range(min(len(theirs) - ANCHOR, j + FURTHEST_ANCHOR), j - 1, -1):
        places[tuple(theirs[y : y + ANCHOR])] = y
    best: tuple[int, int] | None = None
    for x in range(i, min(len(ours) - ANCHOR, i + FURTHEST_ANCHOR) + 1):
        if best is not None and x - i >= sum(best) - i - j:
            break
        y = places.get(tuple(ours[x : x + ANCHOR]), -1)
        if y >= 0 and (best is None or x + y < sum(best)):
            best = (x, y)
    return best


def _stretches(edits: Iterable[_Edit]) -> list[_Stretch]:
    """Each edit with the next that undoes it: of the same size the other way."""
    waiting: dict[int, list[_Edit]] = defaultdict(list)
    stretches = []
    for edit in edits:
        if waiting[-edit.change]:
            stretches.append(_Stretch(waiting[-edit.change].pop(), edit))
        else:
            waiting[edit.change].append(edit)
    stretches += [_Stretch(edit, None) for left in waiting.values() for edit in left]
    return sorted(stretches, key=lambda stretch: (stretch.begin.at, stretch.begin.after))


def _told(tape: Tape, stretches: Sequence[_Stretch], peak: _Peak) -> tuple[Parting, ...]:
    """What begins at one place is one parting; partings alike but for the layer's number are told once."""
    atlas = _Atlas(tape)
    alike: dict[tuple[object, ...], list[list[_Stretch]]] = defaultdict(list)
    for after, group in groupby(stretches, key=lambda stretch: atlas.taken_before(stretch.begin.after)):
        here = list(group)
        place = atlas.place(after)
        ours, theirs = (tuple(s.begin.size for s in here if s.begin.measured is side) for side in (False, True))
        alike[(place.op, place.module, ours, theirs)].append(here)
    found = []
    for (_, _, ours, theirs), repeats in alike.items():
        first = repeats[0]
        ends = [stretch.end for stretch in first if stretch.end is not None]
        found.append(
            Parting(
                after=atlas.place(atlas.taken_before(first[0].begin.after)),
                before=atlas.next_op(first[0].begin.after),
                forecast=ours,
                measured=theirs,
                measured_line=next((s.begin.line for s in first if s.begin.line), ""),
                bytes=sum(stretch.begin.change for stretch in first),
                at_peak=sum(s.begin.change for repeat in repeats for s in repeat if s.covers(peak)),
                times=len(repeats),
                until=atlas.place(atlas.taken_before(ends[-1].after)) if ends else None,
                moved=all(s.end is not None and s.end.measured != s.begin.measured for s in first),
            )
        )
    return tuple(sorted(found, key=lambda p: (-abs(p.at_peak), -abs(p.bytes) * p.times)))


class _Atlas:
    """Finds the place of an event of the tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.takes = [index for index, event in enumerate(tape.events) if event > 0]

    def taken_before(self, event: int) -> int:
        """The last allocation up to an event; -1 where there is none."""
        return bisect_right(self.takes, event) - 1

    def place(self, take: int) -> Place:
        """Where an allocation was made."""
        if take < 0:
            return Place()
        event = self.takes[take]
        made = self.tape.allocations[self.tape.events[event] - 1]
        module = ".".join("*" if part.isdigit() else part for part in made.module.split("."))
        phase = next((span.phase for span in self.tape.spans if span.start <= event < span.end), None)
        return Place(made.op, module, made.line, phase)

    def next_op(self, event: int) -> str:
        """The op of the first allocation after an event."""
        take = self.taken_before(event) + 1
        return self.tape.allocations[self.tape.events[self.takes[take]] - 1].op if take < len(self.takes) else ""


def _sum_of_takes(sizes: Iterable[int]) -> int:
    return sum(size for size in sizes if size > 0)


def _more(size: int) -> str:
    return f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'}"
