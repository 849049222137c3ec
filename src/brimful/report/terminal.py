"""A forecast in the terminal: the answer first, then what it is made of, then what to blame.

Lines are laid out by hand and not as a rich table, because a piped table would be cut at 80 columns.
"""

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from brimful.core.forecast import Culprit, Forecast, LiveTensor, PhasePeak, Verdict
from brimful.core.units import GiB, MiB, format_bytes

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
    sections = (
        _verdict(forecast),
        _items(forecast.items, unicode=_speaks_unicode(console)),
        [*_phases(forecast.phases), *_culprit(forecast.culprit)],
        _largest(forecast.largest),
        [*_notes(forecast.notes, width), *_footer(forecast, width)],
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
        if not card.measured:
            head.append("  (never measured)", "yellow")
    figures = (
        ("allocated", forecast.allocated),
        ("reserved", forecast.reserved),
        ("driver shows", forecast.device_used),
    )
    peaks = Text(_INDENT + "peak  ", "dim").append(
        " · ".join(f"{name} {format_bytes(size)}" for name, size in figures), "not dim"
    )
    job = Text(_INDENT, "dim").append(_job(forecast.job))
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
    highest = max(peak.reserved for peak in phases)
    line = _line("phases", "", "bold")
    for index, peak in enumerate(phases):
        if index:
            line.append(" · ", "dim")
        line.append(f"{peak.phase} {format_bytes(peak.allocated)}", "bold" if peak.reserved == highest else "not bold")
    return [line.append("  (allocated)", "dim")]


def _culprit(culprit: Culprit) -> list[Text]:
    line = _line("culprit", f"{format_bytes(culprit.size)} for {_op(culprit.op)}", "bold")
    if culprit.module:
        line.append(f" in {_module(culprit.module)}")
    line.append(f", {culprit.phase}", "dim")
    return [line, *([Text(_INDENT + culprit.line, "dim")] if culprit.line else [])]


def _largest(largest: Sequence[LiveTensor]) -> list[Text]:
    if not largest:
        return []
    rows = [
        (
            format_bytes(tensor.size),
            f"× {tensor.count}" if tensor.count > 1 else "",
            f"{_shape(tensor.shape)} {tensor.dtype}".strip(),
            str(tensor.category),
            _op(tensor.op),
            _module(tensor.module),
        )
        for tensor in largest
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [Text("largest tensors alive at the peak", "bold")]
    for size, count, shape, category, op, module in rows:
        line = Text(f"  {size:>{widths[0]}} ")
        line.append(f"{count:<{widths[1]}}  " if widths[1] else " ")
        line.append(f"{shape:<{widths[2]}}  ")
        line.append(f"{category:<{widths[3]}}", _COLOURS.get(category, "bright_black"))
        line.append(f"  {op:<{widths[4]}}  {module}".rstrip(), "dim")
        line.rstrip()
        lines.append(line)
    return lines


def _notes(notes: Iterable[str], width: int) -> list[Text]:
    lines = []
    for note in notes:
        first, *rest = textwrap.wrap(note, max(20, width - _LABEL)) or [""]
        lines.append(_line("note", "", "yellow").append(first))
        lines.extend(Text(_INDENT + more) for more in rest)
    return lines


def _footer(forecast: Forecast, width: int) -> list[Text]:
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
    return [Text(line, "dim") for line in textwrap.wrap(" · ".join(facts), width)]


def _line(label: str, body: str, style: str) -> Text:
    return Text().append(f"{label:<{_LABEL}}", style).append(body, "bold" if body else "")


def _of(needed: int, line: int) -> str:
    """`17.9 of 21.5 GiB`: one unit for both, so that they can be compared at a glance."""
    if line < GiB:
        return f"{format_bytes(needed)} of {format_bytes(line)}"
    return f"{needed / GiB:.1f} of {line / GiB:.1f} GiB"


def _job(job: Mapping[str, object]) -> str:
    """The run file in one line: what decides memory, and what was pinned."""
    words = [str(job[key]) for key in ("model", "method", "batch") if job.get(key)]
    data, lora, pin = _inside(job, "data"), _inside(job, "lora"), _inside(job, "pin")
    if "lora" in str(job.get("method")) and lora.get("rank"):
        words[1:2] = [f"{job['method']} rank {lora['rank']}"]
    if data.get("max_length"):
        target = f" → {data['max_target_length']}" if data.get("max_target_length") else ""
        words.append(f"≤ {data['max_length']}{target} tokens")
    precision = job.get("precision")
    words.append("/".join(map(str, precision.values())) if isinstance(precision, Mapping) else str(precision or ""))
    words.append(str(_inside(job, "optimizer").get("name") or ""))
    for key, value in pin.items():
        if value is not None and (key, value) != ("recompute", "none"):
            listed = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"{key.replace('_', ' ')} {listed}")
    return " · ".join(filter(None, words))


def _inside(job: Mapping[str, object], key: str) -> Mapping[str, object]:
    inner = job.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _op(name: str) -> str:
    return name.removesuffix(".default")


def _module(name: str) -> str:
    # what peft wraps a model in says nothing about where in the model one is
    return name.removeprefix("base_model.model.")


def _percent(share: float) -> str:
    return "<1%" if share < 0.005 else f"{share:.0%}"


def _bar(share: float, unicode: bool) -> str:
    if not unicode:
        return "#" * max(1, round(share * _BAR))
    eighths = max(1, round(share * _BAR * 8))
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _speaks_unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _count(parameters: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= size:
            return f"{parameters / size:.3g} {letter}"
    return str(parameters)
