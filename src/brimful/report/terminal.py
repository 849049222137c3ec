"""A forecast in the terminal: the answer first, then what it is made of, then what to blame.

Lines are laid out by hand and not as a rich table, because a piped table would be cut at 80 columns.
"""

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from brimful.core.forecast import Forecast, LiveTensor, PhasePeak, Verdict
from brimful.core.units import GiB, MiB, format_bytes
from brimful.report.words import dtype_word, job_words, last_straw, module_word, op_word, shape_words

_LABEL = 8
_INDENT = " " * _LABEL
_BAR = 32
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_VERDICTS = {Verdict.FITS: "bold green", Verdict.TIGHT: "bold yellow", Verdict.NO: "bold red"}
_COLOURS = {
    "weights": "blue",
    "adapters": "cyan",
    "gradients": "magenta",
    "optimizer state": "bright_magenta",
    "activations": "green",
    "logits and loss": "yellow",
    "temporaries": "bright_yellow",
}


def show_forecast(forecast: Forecast, console: Console) -> None:
    """Print the whole of `forecast`; without colour and uncut where `console` is not a terminal."""
    # prose is wrapped on a terminal, never cut; a pipe gets one line each
    width = console.width if console.is_terminal else sys.maxsize

    def wrapped(lines: Iterable[Text]) -> list[Text]:
        return [part for line in lines for part in _wrap(line, width, console)]

    sections = (
        wrapped(_verdict(forecast)),
        _items(forecast.items, unicode=_speaks_unicode(console)),
        wrapped([*_phases(forecast.phases), *_culprit(forecast)]),
        _largest(forecast.largest, width),
        [*_notes(forecast.notes, width), *_wrap(_footer(forecast), width, console, 0)],
    )
    for index, lines in enumerate(filter(None, sections)):
        if index:
            console.print()
        for line in lines:
            # a terminal gets an ellipsis where a pipe gets the whole line
            if console.is_terminal:
                console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
            else:
                console.print(line, soft_wrap=True, highlight=False)


def _wrap(line: Text, width: int, console: Console, indent: int = _LABEL) -> list[Text]:
    """A labelled line on as many as it takes, the later ones indented: between facts where it lists some."""
    if len(line) <= width:
        return [line]
    lines: list[Text] = []
    for fact in line[indent:].split(" · "):
        if lines and len(lines[-1]) + 3 + len(fact) <= width - indent - 2:
            lines[-1].append(" · ").append_text(fact)
        else:
            if lines:
                lines[-1].append(" ·")
            lines.extend(fact.wrap(console, max(20, width - indent - 2)))
    for part in lines:
        part.rstrip()
    first, *rest = lines
    return [line[:indent].append_text(first), *(Text(" " * indent).append_text(more) for more in rest)]


def _verdict(forecast: Forecast) -> list[Text]:
    needed, card = forecast.smallest_capacity, forecast.card
    if card is None or forecast.verdict is None:
        head = _line("needs", f"{format_bytes(needed)}", "bold")
        head.append("  no GPU was named: --gpu a10g says whether it fits one", "dim")
    else:
        word = forecast.verdict
        head = _line(word, f"{_of(needed, card.line)}", _VERDICTS[word])
        apart = format_bytes(abs(card.line - needed))
        reason = {
            Verdict.FITS: f"{apart} to spare",
            Verdict.TIGHT: f"{apart} to spare: it survives, but a margin of 2 % is missing",
            Verdict.NO: f"{apart} too much",
        }[word]
        head.append(f"  {card.name}, after its context: {reason}")
    figures = (
        ("allocated", forecast.allocated),
        ("reserved", forecast.reserved),
        ("driver shows", forecast.device_used),
    )
    peaks = Text(_INDENT + "peak  ", "dim").append(
        " · ".join(f"{name} {format_bytes(size)}" for name, size in figures), "not dim"
    )
    job = Text(_INDENT, "dim").append(job_words(forecast.job))
    return [head, peaks, *([job] if forecast.job else [])]


def _items(items: Mapping[str, int], unicode: bool) -> list[Text]:
    total = sum(items.values())
    # under a MiB nothing decides anything, and every line costs attention
    shown = sorted(((name, size) for name, size in items.items() if size >= MiB), key=lambda item: -item[1])
    if not shown:
        return []
    width = max(len(name) for name, _ in shown)
    largest = shown[0][1]
    lines = []
    for name, size in shown:
        line = Text(f"  {name:<{width}}  {format_bytes(size):>9}  {_percent(size / total):>4}  ")
        lines.append(line.append(_bar(size / largest, unicode), _COLOURS.get(name, "bright_black")))
    lines.append(Text(f"  {'in all':<{width}}  {format_bytes(total):>9}", "bold"))
    return lines


def _phases(phases: Sequence[PhasePeak]) -> list[Text]:
    if not phases:
        return []
    highest = max(peak.allocated for peak in phases)
    line = _line("phases", "", "bold")
    for index, peak in enumerate(phases):
        if index:
            line.append(" · ", "dim")
        line.append(f"{peak.phase} {format_bytes(peak.allocated)}", "bold" if peak.allocated == highest else "not bold")
    return [line.append("  (allocated)", "dim")]


def _culprit(forecast: Forecast) -> list[Text]:
    culprit = forecast.culprit
    line = _line("culprit", f"{format_bytes(culprit.size)} for {op_word(culprit.op)}", "bold")
    if culprit.module:
        line.append(f" in {module_word(culprit.module)}")
    line.append(f", {culprit.phase}", "dim")
    more = " · ".join(filter(None, (last_straw(forecast), culprit.line)))
    return [line, *([Text(_INDENT + more, "dim")] if more else [])]


def _largest(largest: Sequence[LiveTensor], width: int) -> list[Text]:
    """Size, category, shape, module and op; the op gives way first where a terminal is narrow, then a module's head."""
    if not largest:
        return []
    rows = [
        (
            format_bytes(tensor.size),
            f"× {tensor.count} = {format_bytes(tensor.size * tensor.count)}" if tensor.count > 1 else "",
            str(tensor.category),
            f"{shape_words(tensor.shape)} {dtype_word(tensor.dtype)}".strip(),
            module_word(tensor.module),
            op_word(tensor.op),
        )
        for tensor in largest
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    room = width - sum(widths[:4]) - 9
    with_op = widths[4] + 2 + widths[5] <= room
    lines = [Text("largest tensors alive at the peak", "bold")]
    for size, count, category, shape, module, op in rows:
        line = Text(f"  {size:>{widths[0]}} ")
        line.append(f"{count:<{widths[1]}}  " if widths[1] else " ")
        line.append(f"{category:<{widths[2]}}  ", _COLOURS.get(category, "bright_black"))
        line.append(f"{shape:<{widths[3]}}  ")
        line.append(f"{module:<{widths[4]}}  {op}" if with_op else _tail(module or op, room), "dim")
        line.rstrip()
        lines.append(line)
    return lines


def _tail(name: str, room: int) -> str:
    """The end of a name says most: as many of its last parts as there is room for."""
    if len(name) <= room:
        return name
    parts = name.split(".")
    kept = next((end for start in range(1, len(parts)) if len(end := ".".join(parts[start:])) < room), parts[-1])
    return f"…{kept}"


def _notes(notes: Iterable[str], width: int) -> list[Text]:
    lines = []
    for note in notes:
        first, *rest = textwrap.wrap(note, max(20, width - _LABEL)) or [""]
        lines.append(_line("note", "", "yellow").append(first))
        lines.extend(Text(_INDENT + more) for more in rest)
    return lines


def _footer(forecast: Forecast) -> Text:
    facts = []
    if forecast.total_parameters:
        share = forecast.trainable_parameters / forecast.total_parameters
        facts.append(
            f"trains {_count(forecast.trainable_parameters)} of {_count(forecast.total_parameters)} parameters"
            + (f" ({share:.2%})" if share < 1 else "")
        )
    if forecast.host_ram:
        facts.append(f"loading takes {format_bytes(forecast.host_ram)} of host RAM")
    if forecast.trace_s:
        facts.append(f"traced in {forecast.trace_s:.1f} s")
    facts.extend(f"{name} {version}" for name, version in forecast.versions.items())
    return Text(" · ".join(facts), "dim")


def _line(label: str, body: str, style: str) -> Text:
    return Text().append(f"{label:<{_LABEL}}", style).append(body, "bold" if body else "")


def _of(needed: int, line: int) -> str:
    """`17.9 of 21.5 GiB`: one unit for both, so that they can be compared at a glance."""
    if line < GiB:
        return f"{format_bytes(needed)} of {format_bytes(line)}"
    return f"{needed / GiB:.1f} of {line / GiB:.1f} GiB"


def _percent(share: float) -> str:
    return "<1%" if share < 0.005 else f"{share:.0%}"


def _bar(share: float, unicode: bool) -> str:
    if not unicode:
        return "#" * max(1, round(share * _BAR))
    eighths = max(1, round(share * _BAR * 8))
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _speaks_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _count(parameters: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g} {letter}"
    return str(parameters)
