"""`brimful measure`: the same step on this machine's GPU, beside its forecast."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brimful.cli.flags import takes_run
from brimful.core.errors import ExitCode, MissingPackage, UsageError

if TYPE_CHECKING:
    from brimful.core.forecast import Forecast
    from brimful.core.runfile import RunFile
    from brimful.core.tape import Tape

WORTH_TELLING = 0.01


@takes_run(optional=True)
def measure(
    run: "RunFile | None",
    cap: Annotated[
        str | None, typer.Option(help="Let PyTorch reserve no more than this, such as 21.5GiB. Default: --gpu's line.")
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Find the smallest capacity that the run survives, to 1 %.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history", help="Say where the tapes part even if forecast and GPU agree to 1 %.")
    ] = False,
    matrix: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Many runs, as name: {keys of a run file}; needs --out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Where the matrix's results go, after each row.")
    ] = None,
    forecasts: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="The matrix's forecasts, if they were made before.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Rows of the matrix whose names contain one of these, comma-separated.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Most rows of the matrix at a time.")] = 2,
    limit: Annotated[float | None, typer.Option(help="Seconds after which no row of the matrix is waited for.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run the step on this machine's GPU and print what it took beside the forecast.

    Flags mirror the keys of the run file and win over it. With --gpu, this machine's GPU stands in for that card. Where
    forecast and GPU differ by more than 1 %, the ops at which they part are named. Exit code 3: the run ran out of
    memory; 7: no GPU.
    """
    if (run is None) == (matrix is None):
        raise UsageError("measure takes either a model or a --matrix", "brimful measure gpt2 --batch 4")
    if matrix is not None and out is None:
        raise UsageError("--matrix needs --out", "brimful measure --matrix rows.yaml --out measured.json")
    if run is None:
        _measure_matrix(matrix, out, forecasts, only, _parsed(cap), bisect, history, workers, limit, as_json)
    else:
        _measure_one(run, _parsed(cap), bisect, history, as_json)


def _parsed(cap: str | None) -> int | None:
    from brimful.core.units import parse_bytes

    return None if cap is None else parse_bytes(cap)


def _require_packages(run: "RunFile") -> None:
    """Say which package is missing before anything else happens."""
    from importlib.util import find_spec

    eight_bit = "8bit" in run.optimizer.name
    for package, needed_for, needed in (
        ("bitsandbytes", "measuring QLoRA", run.method == "qlora"),
        ("bitsandbytes", f"optimizer {run.optimizer.name}", eight_bit),
        ("liger-kernel", "the fused loss", run.pin.loss == "fused"),
    ):
        if needed and find_spec(package.replace("-", "_")) is None:
            raise MissingPackage(package, needed_for, extra="cuda")


def _measure_one(run: "RunFile", cap: int | None, bisect: bool, history: bool, as_json: bool) -> None:
    from rich.console import Console

    _require_packages(run)
    cap = cap or _line(run)
    side = Console(stderr=True)
    with side.status(f"tracing {run.model} …") as status:
        # here and not above: these import torch and transformers, which takes seconds
        from brimful.core.measurement import errors
        from brimful.forecast import forecast as make_forecast
        from brimful.forecast.difference import partings
        from brimful.forecast.measure import measure_run, measure_survival, require_gpu

        require_gpu()
        here, alike = _here(run)
        forecast, tape = make_forecast(alike)
        forecast = _under(forecast, tape, run, cap)
        status.update(f"running on {here} …")
        measured = measure_run(run, cap, history=history)
        off = max(map(abs, errors(forecast, measured).values()), default=0.0)
        if not history and off > WORTH_TELLING and not measured.died:
            status.update("running again, with PyTorch's memory history …")
            # recording takes some memory of its own: the figures stay those of the run without it
            measured = replace(measured, history=measure_run(run, cap, history=True).history)
        told = partings(tape, measured.history) if measured.history is not None and not measured.died else None
        survival = None
        if bisect:
            status.update("looking for the smallest capacity …")
            survival = measure_survival(run, forecast.smallest_capacity)
    if as_json:
        from brimful.report.as_json import to_json

        shown = measured if history else replace(measured, history=None)
        result = {"gpu": here, "cap": cap, "forecast": forecast, "measured": shown}
        result |= {"errors": errors(forecast, measured), "partings": told, "survival": survival}
        typer.echo(to_json(result))
    else:
        from brimful.report.comparison import Place, show_comparison, show_survival

        show_comparison(forecast, measured, Place(here, cap), told, console := Console())
        if survival is not None:
            show_survival(survival, forecast.smallest_capacity, console)
    if measured.died:
        raise typer.Exit(ExitCode.NOTHING_FITS)


def _line(run: "RunFile") -> int | None:
    """What this machine's GPU may reserve to stand in for the card that the run names."""
    from brimful.catalog.gpus import get_gpu

    return get_gpu(run.hardware.gpu).reservable - run.hardware.headroom if run.hardware.gpu else None


def _here(run: "RunFile") -> "tuple[str, RunFile]":
    """This machine's GPU, and the run as it is forecast for it."""
    import torch

    from brimful.catalog.gpus import find_gpu

    name = torch.cuda.get_device_name(0)
    card = find_gpu(name)
    return name, replace(run, hardware=replace(run.hardware, gpu=card.name if card else None))


def _under(forecast: "Forecast", tape: "Tape", run: "RunFile", cap: int | None) -> "Forecast":
    """A forecast with the reserved memory as it is when no more than `cap` may be reserved."""
    if cap is None:
        return forecast
    from brimful.forecast.allocator import Settings, replay

    replayed = replay(tape, Settings.parse(run.pin.allocator or ""), cap)
    if replayed.died_at is not None:
        return forecast
    context = forecast.device_used - forecast.reserved
    reserved = replayed.peak_reserved
    return replace(forecast, reserved=reserved, device_used=reserved + context, phases=replayed.phases)


def _measure_matrix(
    matrix: "Path | None",
    out: "Path | None",
    forecasts: "Path | None",
    only: str | None,
    cap: int | None,
    bisect: bool,
    history: bool,
    workers: int,
    limit: float | None,
    as_json: bool,
) -> None:
    import json

    from brimful.forecast.matrix import compare, forecast_rows, measure_rows, read_matrix
    from brimful.forecast.measure import require_gpu

    def say(line: str) -> None:
        typer.echo(line, err=True)

    rows = read_matrix(matrix, only)
    require_gpu()
    expected: dict[str, Any] = json.loads(forecasts.read_text()) if forecasts else forecast_rows(rows, say=say)
    found = measure_rows(
        rows, expected, workers=workers, history=history, cap=cap, bisect=bisect, limit_s=limit, out=out, say=say
    )
    if as_json:
        typer.echo(json.dumps({"forecasts": expected, "measured": _without_histories(found)}, indent=1))
    else:
        for line in compare(expected, found):
            typer.echo(line)


def _without_histories(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: value for key, value in row.items() if key != "history"} for name, row in found.items()}
