"""A forecast beside what a GPU really did, in the terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from brimful.core.forecast import Forecast
from brimful.core.measurement import Measurement, Survival, errors
from brimful.core.units import format_bytes
from brimful.report.words import job_words

WORTH_TELLING = 0.01
GROSS = 0.03


@dataclass(frozen=True)
class Place:
    """The GPU of the measurement and the most that it was allowed to reserve."""

    gpu: str
    cap: int | None = None

    def __str__(self) -> str:
        return f"{self.gpu} capped at {format_bytes(self.cap)}" if self.cap else self.gpu


def show_comparison(
    forecast: Forecast, measured: Measurement, where: Place, partings: Sequence[object] | None, console: Console
) -> None:
    """Peaks and phases side by side, then where the tapes part; None for `partings` means that nobody looked."""
    lines = [_head(forecast, measured, where), Text("        " + job_words(forecast.job), "dim"), Text("")]
    lines += _table(forecast, measured)
    if measured.retries:
        lines += [
            Text(""),
            Text(f"retries {measured.retries}: the allocator had to give back its cache first", "yellow"),
        ]
    if partings is not None:
        lines += [Text(""), *_told(partings)]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def show_survival(survival: Survival, forecast: int, console: Console) -> None:
    """The smallest capacity that the GPU survived, as a share of the forecast one."""

    def at(capacity: int | None) -> str:
        return f"{format_bytes(capacity)} (forecast × {capacity / forecast:.3f})" if capacity else "not found"

    console.print(
        f"\nsmallest capacity: forecast {format_bytes(forecast)} · survives at {at(survival.survives_at)}"
        f" · dies at {at(survival.dies_at)} · {survival.num_probes} probes",
        soft_wrap=True,
        highlight=False,
    )


def _head(forecast: Forecast, measured: Measurement, where: Place) -> Text:
    if measured.died:
        expected = f"forecast: {format_bytes(forecast.smallest_capacity)} are needed"
        return Text("died    ", "bold red").append(f"{where}: {measured.died}; {expected}", "")
    off = max(errors(forecast, measured).values(), key=abs, default=0.0)
    style = "bold green" if abs(off) <= WORTH_TELLING else "bold yellow" if abs(off) <= GROSS else "bold red"
    return Text("agrees  " if abs(off) <= WORTH_TELLING else "differs ", style).append(
        f"by {abs(off):.2%} at most, on {where}, in {measured.seconds:.1f} s", ""
    )


def _table(forecast: Forecast, measured: Measurement) -> Iterator[Text]:
    rows = [
        ("peak allocated", forecast.allocated, measured.allocated),
        ("peak reserved", forecast.reserved, measured.reserved),
        ("driver shows", forecast.device_used, measured.device_used),
    ]
    real = {peak.phase: peak for peak in measured.phases}
    for peak in forecast.phases:
        if peak.phase in real:
            rows.append((f"{peak.phase}, allocated", peak.allocated, real[peak.phase].allocated))
            rows.append((f"{peak.phase}, reserved", peak.reserved, real[peak.phase].reserved))
    width = max(len(name) for name, _, _ in rows)
    yield Text(f"  {'':<{width}}  {'forecast':>10}  {'measured':>10}  {'error':>8}", "dim")
    for name, ours, theirs in rows:
        line = Text(f"  {name:<{width}}  {format_bytes(ours):>10}  {format_bytes(theirs):>10}  ")
        if theirs and not measured.died:  # peaks up to a death are nobody's error
            error = ours / theirs - 1
            line.append(f"{error:>+8.2%}", "bold red" if abs(error) > GROSS else "bold" if abs(error) > 0.01 else "")
        yield line


def _told(partings: Sequence[object], most: int = 10) -> Iterator[Text]:
    if not partings:
        yield Text("the tapes agree: what differs is how the allocator cut its segments, or many small tensors")
        return
    yield Text("where the tapes part", "bold")
    yield from (Text(f"  {parting}") for parting in partings[:most])
    if len(partings) > most:
        yield Text(f"  … and {len(partings) - most} more; --json has them all", "dim")
