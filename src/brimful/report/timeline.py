"""The timeline: one HTML page, opened offline, that shows memory over the run and names every tensor under the pointer.

A tape of 300,000 events does not fit a screen or a page, so time is cut into columns and each column shows one true
instant: the highest of the events it covers. Nothing is averaged and nothing is added up across instants; the peak of
the page is the peak of the tape, to the byte. The tensors that cover most of the picture, and the largest ones alive
at each column, are drawn one by one; what remains is one band per category.
"""

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path

from brimful.core.forecast import Forecast, Verdict
from brimful.core.tape import Category, Phase, Tape
from brimful.core.units import MiB
from brimful.report.words import dtype_word, job_words, last_straw, module_word, op_word, shape_words

GIB = 2**30

# What stays lies at the bottom and what comes and goes on top, so that a free moves as little as possible.
STACK = (
    Category.WEIGHTS,
    Category.ADAPTERS,
    Category.OPTIMIZER,
    Category.WORKSPACE,
    Category.INPUTS,
    Category.GRADIENTS,
    Category.ACTIVATIONS,
    Category.LOSS,
    Category.TEMPORARIES,
)

NUM_COLUMNS = 5000
NUM_TENSORS = 10_000
NUM_NAMED_AT_PEAK = 3000
NUM_NAMED_PER_COLUMN = 10
EVENTS_AROUND_PEAK = 250
EVENTS_AROUND_PHASE_PEAK = 50
LOAD_SHARE = 0.08
NARROWEST_SHARE = 0.04


def write(path: Path, forecast: Forecast, tape: Tape) -> None:
    """Writes the page; a reader sees the old file or the whole new one, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(page(forecast, tape), "utf-8", newline="\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def page(forecast: Forecast, tape: Tape) -> str:
    """The page's text."""
    template = files("brimful.report").joinpath("timeline.html").read_text("utf-8")
    parts = {
        "title": escape(_title(forecast)),
        "facts": _facts(forecast),
        "verdict": _verdict(forecast),
        "numbers": _numbers(forecast),
        "culprit": _culprit(forecast),
        "items": _items(forecast),
        "phases": _phases(forecast),
        "largest": _largest(forecast),
        "notes": _notes(forecast),
        "data": _script_json(picture(forecast, tape)),
    }
    # One pass: what is put in is never searched for marks again.
    text = re.sub(r"<!--put:(\w+)-->", lambda mark: parts[mark[1]], template)
    # A name may come from a file's bytes and hold half a character, which no file in UTF-8 can.
    return text.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive events of one phase and the part of the picture's width, from 0 to 1, that they are given."""

    phase: str
    start: int
    end: int
    left: float
    right: float


def picture(forecast: Forecast, tape: Tape) -> dict[str, object]:
    """Everything that the page's script draws, as plain JSON values."""
    total = list(accumulate(_change(tape, event) for event in tape.events))
    segments = _segments(tape)
    peak = _highest(total, 0, len(total)) if total else -1
    edges = _edges(segments, total, peak)
    instants = [_highest(total, start, end) for start, end in pairwise(edges)]
    born, freed = _lifetimes(tape)
    first = [bisect_left(instants, event) for event in born]
    last = [bisect_left(instants, event) for event in freed]
    named = sorted(_named(tape, first, last, instants, peak), key=born.__getitem__)  # the older lies below
    rest, rest_count = _rest(tape, instants, named, first, last)

    strings: dict[str, int] = {}

    def intern(text: str) -> int:
        return strings.setdefault(text, len(strings))

    touched = [tape.allocations[abs(tape.events[instant]) - 1] for instant in instants]
    tensors = [tape.allocations[i] for i in named]
    rank = {category: i for i, category in enumerate(STACK)}
    card = forecast.card
    return {
        "categories": [[category.name.lower(), category.value] for category in STACK],
        "segments": [[s.phase, s.start, s.end, round(s.left, 6), round(s.right, 6)] for s in segments],
        "num_events": len(tape.events),
        "peak": {"event": peak, "bytes": total[peak] if total else 0},
        "allocated": forecast.allocated,
        "reserved": forecast.reserved,
        "card": {"name": card.name, "line": card.line} if card else None,
        "columns": {
            "start": _deltas(edges[:-1]),
            "instant": [instant - start for instant, start in zip(instants, edges[:-1], strict=True)],
            "change": [_change(tape, tape.events[instant]) for instant in instants],
            "op": [intern(op_word(a.op)) for a in touched],
            "module": [intern(module_word(a.module)) for a in touched],
            "line": [intern(a.line) for a in touched],
        },
        "rest": [_deltas(row) for row in rest],
        "rest_count": [_deltas(row) for row in rest_count],
        "tensors": {
            "size": [a.size for a in tensors],
            "category": [rank[a.category] for a in tensors],
            "op": [intern(op_word(a.op)) for a in tensors],
            "module": [intern(module_word(a.module)) for a in tensors],
            "shape": [intern(shape_words(a.shape, " × ")) for a in tensors],
            "dtype": [intern(dtype_word(a.dtype)) for a in tensors],
            "line": [intern(a.line) for a in tensors],
            "born": _deltas([born[i] for i in named]),
            "freed": [freed[i] - born[i] for i in named],
        },
        "strings": list(strings),
    }


def _change(tape: Tape, event: int) -> int:
    size = tape.allocations[abs(event) - 1].size
    return size if event > 0 else -size


def _highest(total: Sequence[int], start: int, end: int) -> int:
    return max(range(start, end), key=total.__getitem__)


def _segments(tape: Tape) -> list[_Segment]:
    """Cuts all events into phases (events of no span get an unnamed one) and shares the width out between them."""
    num_events = len(tape.events)
    cuts: list[tuple[str, int, int]] = []

    def add(phase: str, end: int) -> None:
        start = cuts[-1][2] if cuts else 0
        if end <= start:
            return
        if cuts and cuts[-1][0] == phase:
            start = cuts.pop()[1]
        cuts.append((phase, start, end))

    for span in sorted(tape.spans, key=lambda span: (span.start, span.end)):
        add("", min(span.start, num_events))
        add(span.phase.value, min(span.end, num_events))
    add("", num_events)

    # Loading is thousands of equal steps that nobody came to see: it gets a small share however long it is.
    num_loading = sum(end - start for phase, start, end in cuts if phase == Phase.LOAD)
    num_others = num_events - num_loading
    squeeze = min(1.0, LOAD_SHARE / (1 - LOAD_SHARE) * num_others / num_loading) if num_loading and num_others else 1.0
    weights = [(end - start) * (squeeze if phase == Phase.LOAD else 1.0) for phase, start, end in cuts]
    narrowest = min(NARROWEST_SHARE, 0.5 / len(cuts)) * sum(weights) if cuts else 0.0
    weights = [max(weight, narrowest) for weight in weights]
    borders = [border / sum(weights) for border in accumulate(weights)]
    return [_Segment(*cut, *sides) for cut, sides in zip(cuts, pairwise((0.0, *borders)), strict=True)]


def _edges(segments: Sequence[_Segment], total: Sequence[int], peak: int) -> list[int]:
    """Where the columns begin, and the end: even within a phase, and event by event around the peaks."""
    edges = {len(total)}

    def look_closely(event: int, reach: int, start: int, end: int) -> None:
        edges.update(range(max(start, event - reach), min(end, event + reach + 1)))

    for segment in segments:
        num_events = segment.end - segment.start
        num_columns = min(num_events, max(1, round(NUM_COLUMNS * (segment.right - segment.left))))
        edges.update(segment.start + num_events * i // num_columns for i in range(num_columns))
        phase_peak = _highest(total, segment.start, segment.end)
        look_closely(phase_peak, EVENTS_AROUND_PHASE_PEAK, segment.start, segment.end)
    look_closely(peak, EVENTS_AROUND_PEAK, 0, len(total))
    return sorted(edges)


def _lifetimes(tape: Tape) -> tuple[list[int], list[int]]:
    """For each allocation the event that makes it and the one that frees it (one past the end if none does)."""
    never = len(tape.events)
    born = [never] * len(tape.allocations)
    freed = [never] * len(tape.allocations)
    for at, event in enumerate(tape.events):
        if event > 0:
            born[event - 1] = at
        else:
            freed[-event - 1] = at
    return born, freed


def _named(tape: Tape, first: Sequence[int], last: Sequence[int], instants: Sequence[int], peak: int) -> set[int]:
    """The allocations drawn one by one.

    First those alive at the peak, then the largest alive at each column, however short their lives, for half of the
    places at most; the rest go to those that catch the eye, by size and lifetime.
    """
    sizes = [allocation.size for allocation in tape.allocations]
    seen = [i for i, size in enumerate(sizes) if size and first[i] < last[i]]
    largest_first = sorted(seen, key=lambda i: -sizes[i])
    peak_column = bisect_left(instants, peak)
    at_peak = [i for i in largest_first if first[i] <= peak_column < last[i]]
    chosen = set(at_peak[:NUM_NAMED_AT_PEAK])

    num_columns = len(instants)
    room = [NUM_NAMED_PER_COLUMN] * num_columns
    # onward[c] leads to the next column, from c on, that still has room (paths are halved as they are walked).
    onward = list(range(num_columns + 1))

    def next_with_room(column: int) -> int:
        while onward[column] != column:
            onward[column] = onward[onward[column]]
            column = onward[column]
        return column

    for i in largest_first:
        if len(chosen) >= NUM_TENSORS // 2:
            break
        column = next_with_room(first[i])
        if column < last[i]:
            chosen.add(i)
        while column < last[i]:
            room[column] -= 1
            if not room[column]:
                onward[column] = column + 1
            column = next_with_room(column + 1)
    # The root: what is short-lived but tall is seen and asked about, what is long-lived but thin is not.
    for i in sorted(seen, key=lambda i: -sizes[i] * (last[i] - first[i]) ** 0.5):
        if len(chosen) >= NUM_TENSORS:
            break
        chosen.add(i)
    return chosen


def _rest(
    tape: Tape, instants: Sequence[int], named: Iterable[int], first: Sequence[int], last: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Per category and column: the bytes and the number of live allocations that are not drawn one by one."""
    rank = {category: i for i, category in enumerate(STACK)}
    steps = [[0] * (len(instants) + 1) for _ in STACK]
    counts = [[0] * (len(instants) + 1) for _ in STACK]
    apart = set(named)
    for i, allocation in enumerate(tape.allocations):
        if i in apart or not allocation.size or first[i] >= last[i]:
            continue
        row = rank[allocation.category]
        steps[row][first[i]] += allocation.size
        steps[row][last[i]] -= allocation.size
        counts[row][first[i]] += 1
        counts[row][last[i]] -= 1
    return [list(accumulate(row[:-1])) for row in steps], [list(accumulate(row[:-1])) for row in counts]


def _deltas(values: Sequence[int]) -> list[int]:
    """Differences between neighbours: short to write, and most are 0."""
    return [value - before for before, value in pairwise((0, *values))]


def _script_json(data: object) -> str:
    """JSON that can stand inside a script element: no character that HTML might read as markup."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _gib(size: int) -> str:
    """GiB; below one, the unit in which the number can be read."""
    if abs(size) >= GIB or not size:
        return f"{size / GIB:,.2f} GiB"
    if abs(size) >= MiB / 10:
        return f"{size / MiB:,.{0 if abs(size) >= 100 * MiB else 1}f} MiB"
    return f"{size / 2**10:,.1f} KiB"


def _title(forecast: Forecast) -> str:
    return str(forecast.job.get("model") or "Training run")


def _facts(forecast: Forecast) -> str:
    _, *facts = job_words(forecast.job).split(" · ")
    return "".join(f"<li>{escape(fact)}</li>" for fact in facts)


def _verdict(forecast: Forecast) -> str:
    card, verdict = forecast.card, forecast.verdict
    if card is None or verdict is None:
        return ""
    words = {Verdict.FITS: "Fits", Verdict.TIGHT: "Tight on", Verdict.NO: "Does not fit"}[verdict]
    spare = card.line - forecast.smallest_capacity
    margin = f"{_gib(spare)} to spare" if spare >= 0 else f"{_gib(-spare)} too much"
    source = "" if card.measured else " (not measured on this card)"
    return (
        f'<p class="verdict {verdict.value}"><b>{words} {escape(card.name)}</b>'
        f"<span>needs {_gib(forecast.smallest_capacity)}, PyTorch may reserve {_gib(card.line)}{source}: {margin}"
        "</span></p>"
    )


def _numbers(forecast: Forecast) -> str:
    rows = [
        ("Peak allocated", _gib(forecast.allocated)),
        ("Peak reserved", _gib(forecast.reserved)),
        ("Driver shows", _gib(forecast.device_used)),
        ("Smallest capacity", _gib(forecast.smallest_capacity)),
        ("Trainable", f"{forecast.trainable_parameters:,} of {forecast.total_parameters:,}"),
    ]
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows)


def _culprit(forecast: Forecast) -> str:
    culprit = forecast.culprit
    module = f" in <code>{escape(module_word(culprit.module))}</code>" if culprit.module else ""
    line = f" at <code>{escape(culprit.line)}</code>" if culprit.line else ""
    straw = last_straw(forecast)
    return (
        f"The peak is reached in {escape(culprit.phase.value)} by <code>{escape(op_word(culprit.op))}</code>"
        f"{module}{line}, which takes {_gib(culprit.size)}{f': {escape(straw)}' if straw else ''}."
    )


def _swatch(name: str) -> str:
    keys: Mapping[str, str] = {category.value: category.name.lower() for category in Category}
    return f'<i class="swatch" style="--c:var(--c-{keys.get(name, "none")})"></i>'


def _items(forecast: Forecast) -> str:
    whole = sum(forecast.items.values())
    # under a MiB nothing decides anything
    shown = sorted(((name, size) for name, size in forecast.items.items() if size >= MiB), key=lambda item: -item[1])
    longest = max(forecast.items.values(), default=0)
    return "".join(
        f'<tr><th scope="row">{_swatch(name)}{escape(name)}</th><td class="n">{_gib(size)}</td>'
        f'<td class="n">{_percent(size / whole)}</td>'
        f'<td class="bar"><i style="width:{100 * max(size, 0) / longest if longest else 0:.1f}%"></i></td></tr>'
        for name, size in shown
    )


def _percent(share: float) -> str:
    return "< 0.1%" if share < 0.0005 else f"{share:.1%}"


def _phases(forecast: Forecast) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(peak.phase.value)}</th><td class="n">{_gib(peak.allocated)}</td>'
        f'<td class="n">{_gib(peak.reserved)}</td></tr>'
        for peak in forecast.phases
    )


def _largest(forecast: Forecast) -> str:
    return "".join(
        f'<tr><td class="n">{_gib(tensor.size)}</td><td class="n">{tensor.count:,}</td>'
        f'<td class="n">{_gib(tensor.size * tensor.count)}</td>'
        f"<td>{_swatch(tensor.category.value)}{escape(tensor.category.value)}</td>"
        f"<td><code>{escape(op_word(tensor.op))}</code></td><td><code>{escape(module_word(tensor.module))}</code></td>"
        f"<td>{escape(shape_words(tensor.shape, ' × '))} <small>{escape(dtype_word(tensor.dtype))}</small></td></tr>"
        for tensor in forecast.largest
    )


def _notes(forecast: Forecast) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in forecast.notes)
    versions = " · ".join(f"{escape(name)} {escape(version)}" for name, version in forecast.versions.items())
    return (f"<ul>{notes}</ul>" if notes else "") + (f"<p>Forecast for {versions}.</p>" if versions else "")
