"""The entry point: subcommands, `--version`, and the one place where errors become a line and an exit code."""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from brimful import __version__
from brimful.cli.forecast import forecast
from brimful.cli.measure import measure
from brimful.core.errors import EXIT_CODES, BrimfulError, ExitCode

app = typer.Typer(
    help="Forecasts and plans the GPU memory of training a language model, without a GPU.",
    epilog="Exit codes: " + ", ".join(f"{code.value} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(forecast)
app.command()(measure)


_RETRY = "not foreseen; run again with --debug for the traceback"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"brimful {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="BRIMFUL_DEBUG", help="Show the traceback of an error. Works anywhere.")
    ] = False,
) -> None:
    """Options that every command has; `main` acts on --debug before they are parsed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; errors end as one line and a hint on stderr, with their documented exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    # taken out here: whoever retries a failed command appends --debug at its end
    words = [word for word in given if word != "--debug"]
    debug = len(words) < len(given) or os.environ.get("BRIMFUL_DEBUG", "").lower() not in ("", "0", "false")
    if not debug:
        # torch logs a traceback of its own before it raises, and sets its loggers' levels anew when it is imported
        logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    try:
        app(words, prog_name="brimful")
    except BrimfulError as error:
        if debug:
            traceback.print_exc()
        _complain(error.message, error.hint)
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            traceback.print_exc()
        first_line = next(iter(str(error).splitlines()), "")
        _complain(f"{type(error).__name__}: {first_line}", None if debug else _RETRY)
        sys.exit(ExitCode.UNEXPECTED)


def _complain(message: str, hint: str | None) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint:  {hint}", file=sys.stderr)


if __name__ == "__main__":
    main()
