"""`brimful forecast`: the memory of a training step, judged against a card."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brimful.cli.flags import takes_run
from brimful.core.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from brimful.core.runfile import RunFile


@takes_run()
def forecast(
    run: "RunFile",
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write memory over the step as a page that opens offline.")
    ] = None,
) -> None:
    """Forecast the GPU memory of a training step, without a GPU.

    Flags mirror the keys of the run file and win over it. Exit code 3: it does not fit the card.
    """
    from rich.console import Console

    if timeline is not None and not timeline.absolute().parent.is_dir():
        raise UsageError(f"{timeline.parent} is no folder", hint="give a --timeline file in a folder that exists")
    side = Console(stderr=True)
    with side.status(f"tracing {run.model} …"):
        # here and not above: these import torch and transformers, which takes seconds
        from brimful.core.forecast import Verdict
        from brimful.forecast import forecast as make_forecast

        result, tape = make_forecast(run)
    if timeline is not None:
        from brimful.report import timeline as page

        page.write(timeline, result, tape)
        side.print(f"wrote {timeline}", highlight=False, soft_wrap=True)
    if as_json:
        from brimful.report.as_json import to_json

        typer.echo(to_json(result))
    else:
        from brimful.report.terminal import show_forecast

        show_forecast(result, Console())
    if result.verdict is Verdict.NO:
        raise typer.Exit(ExitCode.NOTHING_FITS)
