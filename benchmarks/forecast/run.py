"""Forecasts and measures the matrix: `forecast` needs no GPU, `measure` needs one, `compare` reads both results.

python benchmarks/forecast/run.py forecast matrix.yaml --out results/forecast.json
python benchmarks/forecast/run.py measure  matrix.yaml --forecast results/forecast.json --out measured.json
python benchmarks/forecast/run.py compare  results/forecast.json results/measured.json
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from brimful.core.errors import BrimfulError
from brimful.forecast import matrix

say = partial(print, flush=True)


def run_forecast(args: argparse.Namespace) -> None:
    rows, out = matrix.read_matrix(args.matrix, args.only), Path(args.out)
    found = json.loads(out.read_text()) if out.exists() and args.only else {}
    found |= matrix.forecast_rows(rows, workers=args.workers, say=say)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1))


def run_measure(args: argparse.Namespace) -> None:
    matrix.measure_rows(
        matrix.read_matrix(args.matrix, args.only),
        json.loads(Path(args.forecast).read_text()),
        workers=args.workers,
        history=args.history,
        bisect=args.bisect,
        limit_s=args.limit,
        out=args.out,
        say=say,
    )


def run_compare(args: argparse.Namespace) -> None:
    measured = json.loads(Path(args.measured).read_text())["rows"]
    for line in matrix.compare(json.loads(Path(args.forecasts).read_text()), measured, phases=args.phases):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, action in (("forecast", run_forecast), ("measure", run_measure)):
        command = commands.add_parser(name)
        command.add_argument("matrix")
        command.add_argument("--out", required=True)
        command.add_argument("--only")
        command.add_argument("--workers", type=int, default=2)
        if name == "measure":
            command.add_argument("--forecast", required=True)
            command.add_argument("--history", action="store_true")
            command.add_argument("--bisect", action="store_true")
            command.add_argument("--limit", type=float, default=500)
        command.set_defaults(action=action)
    command = commands.add_parser("compare")
    command.add_argument("forecasts")
    command.add_argument("measured")
    command.add_argument("--phases", action="store_true")
    command.set_defaults(action=run_compare)
    args = parser.parse_args()
    try:
        args.action(args)
    except BrimfulError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
