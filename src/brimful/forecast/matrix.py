"""Many runs in one go: forecasts, measurements, and the two side by side.

A matrix is a YAML file of `name: {keys of a run file}`. Each row gets a process of its own, so rows cannot spoil each
other, and a row that fails is an `error` in its result. Results are plain JSON, so that they can be committed.
"""

import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import yaml

from brimful.core.errors import UsageError
from brimful.core.runfile import from_mapping
from brimful.core.units import GiB
from brimful.forecast.fresh import Fresh

Row = dict[str, Any]
Rows = dict[str, Row]
Say = Callable[[str], None]

UNKNOWN = 60 * GiB  # taken for a row that has no forecast
MARGIN = 1.1
OVERHEAD = 2 * GiB  # a process's context and libraries
SHARE = 0.94  # of the card, for all rows that run at a time


def read_matrix(path: str | Path, only: str | None = None) -> Rows:
    """The rows of a matrix; `only` keeps those whose name contains one of its comma-separated parts."""
    try:
        rows = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", "give a file of name: {keys of a run file}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise UsageError(f"{path} is not a matrix", "write each row as name: {model: gpt2, batch: 8}")
    kept = {str(n): r for n, r in rows.items() if only is None or any(part in str(n) for part in only.split(","))}
    if not kept:
        raise UsageError(f"{path} has no row that contains {only}" if only else f"{path} has no rows")
    return kept


def forecast_rows(rows: Rows, *, workers: int = 2, say: Say = print) -> Rows:
    """The forecast of each row."""
    found: Rows = {}
    for name, result in _in_processes({n: (forecast_row, row) for n, row in rows.items()}, workers):
        found[name] = result
        say(f"{name} {result.get('error') or _sizes(result)}")
    return {name: found[name] for name in rows if name in found}


def forecast_row(row: Row) -> Row:
    """One forecast, in the words of the results file."""
    from brimful.forecast.summary import forecast_run

    started = time.perf_counter()
    result, _ = forecast_run(from_mapping(row))
    return {
        "allocated": result.allocated,
        "reserved": result.reserved,
        "smallest": result.smallest_capacity,
        "weights": result.items["weights"],
        "phases": {str(p.phase): [p.allocated, p.reserved] for p in result.phases},
        "versions": dict(result.versions),
        "seconds": round(time.perf_counter() - started, 1),
    }


def measure_rows(
    rows: Rows,
    forecasts: Rows,
    *,
    workers: int = 2,
    history: bool = False,
    cap: int | None = None,
    bisect: bool = False,
    limit_s: float | None = None,
    out: str | Path | None = None,
    say: Say = print,
) -> Rows:
    """Measure each row on this machine's GPU, as many at a time as their forecasts fit it together.

    `out` is written anew after each row, so that nothing is lost when time is up.
    """
    import torch

    from brimful.forecast.measure import require_gpu

    require_gpu()
    room = int(torch.cuda.get_device_properties(0).total_memory * SHARE)
    needs = {name: _need(forecasts.get(name, {})) for name in rows}
    calls: dict[str, tuple[Any, ...]] = {
        name: (measure_row, row, history, cap, forecasts.get(name, {}).get("smallest") if bisect else None)
        for name, row in sorted(rows.items(), key=lambda item: -needs[item[0]])
    }
    found: Rows = {}
    started = time.perf_counter()
    for name, result in _in_processes(calls, workers, needs, room, limit_s):
        found[name] = result
        if workers > 1 and "device_used" in result:
            result["device_used"] = None  # others were on the card too
        outcome = result.get("trace") or result.get("error") or _told(result)
        say(f"{time.perf_counter() - started:5.0f}s {name} {outcome}")
        if out is not None:
            save_measured(out, found)
    if out is not None and history:
        save_histories(out, found)
    if left := [name for name in rows if name not in found]:
        say(f"time is up; left: {', '.join(left)}")
    return found


def measure_row(row: Row, history: bool, cap: int | None, smallest: int | None) -> Row:
    """One measurement, in the words of the results file."""
    from brimful.forecast.measure import measure_run, measure_survival

    run = from_mapping(row)
    result = measure_run(run, cap, history=history, saving=False)
    found: Row = {
        "allocated": result.allocated,
        "reserved": result.reserved,
        "device_used": result.device_used,
        "phases": {str(p.phase): [p.allocated, p.reserved] for p in result.phases},
        "retries": result.retries,
        "seconds": round(result.seconds, 2),
        "died": result.died,
    }
    if smallest is not None:
        survival = measure_survival(run, smallest)
        found |= {"survives_at": survival.survives_at, "dies_at": survival.dies_at, "smallest": smallest}
    if history:
        found["history"] = result.history
    return found


def save_measured(path: str | Path, found: Rows) -> None:
    """Results with the machine's versions, without the histories, which are long."""
    plain = {name: {key: value for key, value in row.items() if key != "history"} for name, row in found.items()}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps({"rows": plain, "machine": machine()}, indent=1))
    beside.replace(path)  # whole or not at all


def save_histories(path: str | Path, found: Rows) -> None:
    """The histories, in a file beside the results."""
    with gzip.open(Path(path).with_suffix(".history.json.gz"), "wt") as file:
        json.dump({name: row["history"] for name, row in found.items() if row.get("history")}, file)


def machine() -> dict[str, str]:
    """What the figures were measured on and with."""
    from importlib.metadata import version

    import torch

    return {"gpu": torch.cuda.get_device_name(0)} | {name: version(name) for name in ("torch", "transformers", "peft")}


def compare(forecasts: Rows, measured: Rows, *, phases: bool = False) -> Iterator[str]:
    """Lines of a table: forecast, measured and error, for allocated and reserved."""
    width = max([32, *map(len, measured)])
    yield f"{'':{width}} {'allocated':>22}  {'error':>7} {'reserved':>20} {'error':>7}"
    for name, theirs in measured.items():
        ours = forecasts.get(name, {"error": "no forecast"})
        if "error" in ours or "error" in theirs:
            yield f"{name:{width}} {ours.get('error', '')[:60]} | {theirs.get('error', '')[:60]}"
            continue
        cells = []
        for key in ("allocated", "reserved"):
            error = ours[key] / theirs[key] - 1 if theirs[key] else float("nan")
            cells.append(f"{ours[key] / GiB:9.3f} {theirs[key] / GiB:9.3f} {error:+8.2%}")
        yield f"{name:{width}} {' '.join(cells)}{'  died' if theirs.get('died') else ''}"
        if theirs.get("smallest"):
            yield f"    smallest capacity {_survival(theirs)}"
        if phases:
            for phase, pair in ours["phases"].items():
                real = theirs["phases"].get(phase, [0, 0])
                peaks = [f"{mine / GiB:9.3f} {its / GiB:9.3f}" for mine, its in zip(pair, real, strict=True)]
                yield f"    {phase:14} {'   '.join(peaks)}"


def _in_processes(
    calls: Mapping[str, tuple[Any, ...]],
    workers: int,
    needs: Mapping[str, int] | None = None,
    room: int = 0,
    limit_s: float | None = None,
) -> Iterator[tuple[str, Row]]:
    """Results as they come; with `needs`, only as many calls at a time as have room together (or one alone)."""
    waiting = dict(calls)
    running: dict[str, Fresh] = {}
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        while waiting or running:
            for name in list(waiting):
                taken = sum(needs[other] for other in running) if needs else 0
                if len(running) < workers and (not running or not needs or taken + needs[name] <= room):
                    running[name] = Fresh(*waiting.pop(name))
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            wait([process.connection for process in running.values()], left_s)
            for name in [name for name, process in running.items() if process.done]:
                yield name, running.pop(name).result()
    finally:
        for process in running.values():
            process.stop()


def _need(forecast: Row) -> int:
    return int(forecast.get("reserved", UNKNOWN) * MARGIN) + OVERHEAD


def _sizes(result: Row) -> str:
    return f"{result['allocated'] / GiB:.3f} / {result['reserved'] / GiB:.3f}"


def _told(result: Row) -> str:
    survival = f" smallest capacity {_survival(result)}" if result.get("smallest") else ""
    return f"{_sizes(result)} {result['seconds']}s {result['died'] or ''}{survival}"


def _survival(result: Row) -> str:
    """`survives at × 1.003, dies at × 0.995 of 14.210 GiB`."""
    parts = [
        f"{word} at × {result[key] / result['smallest']:.3f}"
        for key, word in (("survives_at", "survives"), ("dies_at", "dies"))
        if result[key] is not None
    ]
    return f"{', '.join(parts)} of {result['smallest'] / GiB:.3f} GiB"
