"""Forecasts and measures the matrix: `forecast` needs no GPU, `measure` needs one, `compare` reads both results.

python benchmarks/forecast/run.py forecast matrix.yaml --out results/forecast.json
python benchmarks/forecast/run.py measure  matrix.yaml --forecast results/forecast.json --out measured.json
python benchmarks/forecast/run.py compare  results/forecast.json results/measured.json
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import yaml

from brimful.core.errors import BrimfulError
from brimful.core.runfile import from_mapping

GIB = 1 << 30
CARD_GIB = 132


def rows_of(path: str, only: str | None) -> dict[str, dict]:
    rows = yaml.safe_load(Path(path).read_text())
    return {n: r for n, r in rows.items() if only is None or any(part in n for part in only.split(","))}


def phases(result) -> dict[str, list[int]]:
    return {str(p.phase): [p.allocated, p.reserved] for p in result.phases}


def forecast_one(item: tuple[str, dict]) -> tuple[str, dict]:
    name, row = item
    try:
        from brimful.forecast import forecast

        started = time.perf_counter()
        result, _ = forecast(from_mapping(row))
    except Exception as error:
        return name, {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1500:]}
    return name, {
        "allocated": result.allocated,
        "reserved": result.reserved,
        "smallest": result.smallest_capacity,
        "weights": result.items["weights"],
        "phases": phases(result),
        "versions": dict(result.versions),
        "seconds": round(time.perf_counter() - started, 1),
    }


def measure_one(item: tuple[str, dict, bool]) -> tuple[str, dict]:
    name, row, history = item
    try:
        from brimful.forecast.measure import measure_run

        result = measure_run(from_mapping(row), history=history)
    except Exception as error:
        return name, {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2500:]}
    found = {
        "allocated": result.allocated,
        "reserved": result.reserved,
        "device_used": result.device_used,
        "phases": phases(result),
        "retries": result.retries,
        "seconds": round(result.seconds, 2),
        "died": result.died,
    }
    if history:
        found["history"] = result.history
    return name, found


def run_forecast(args: argparse.Namespace) -> None:
    rows, out = rows_of(args.matrix, args.only), Path(args.out)
    found = json.loads(out.read_text()) if out.exists() and args.only else {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        for name, result in pool.map(forecast_one, rows.items()):
            found[name] = result
            print(
                name,
                result.get("error") or f"{result['allocated'] / GIB:.3f} / {result['reserved'] / GIB:.3f}",
                flush=True,
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1))


def run_measure(args: argparse.Namespace) -> None:
    """Several rows at a time, as long as their forecasts together fit the card."""
    rows = rows_of(args.matrix, args.only)
    expected = json.loads(Path(args.forecast).read_text())
    need = {n: expected.get(n, {}).get("reserved", 60 * GIB) * 1.1 / GIB + 2 for n in rows}
    waiting = sorted(rows, key=lambda n: -need[n])
    found, running, context, started = {}, {}, multiprocessing.get_context("spawn"), time.time()
    with ProcessPoolExecutor(args.workers, mp_context=context, max_tasks_per_child=1) as pool:
        while waiting or running:
            for name in list(waiting):
                room = CARD_GIB - sum(need[n] for n in running)
                if len(running) < args.workers and (need[name] <= room or not running):
                    waiting.remove(name)
                    running[name] = pool.submit(measure_one, (name, rows[name], args.history))
            for name, future in list(running.items()):
                if future.done():
                    del running[name]
                    found[name] = future.result()[1]
                    print(
                        f"{time.time() - started:5.0f}s",
                        name,
                        found[name].get("trace") or summary(found[name]),
                        flush=True,
                    )
            time.sleep(0.05)
            if time.time() - started > args.limit:
                print("time is up; left:", waiting, list(running), flush=True)
                break
        save(args.out, found)
        if waiting or running:
            os._exit(0)


def save(path: str, found: dict) -> None:
    histories = {n: r.pop("history") for n, r in found.items() if r.get("history")}
    Path(path).write_text(json.dumps({"rows": found, "machine": machine()}, indent=1))
    if histories:
        import gzip

        with gzip.open(Path(path).with_suffix(".history.json.gz"), "wt") as file:
            json.dump(histories, file)


def machine() -> dict[str, str]:
    import peft
    import torch
    import transformers

    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def summary(result: dict) -> str:
    return (
        f"{result['allocated'] / GIB:.3f} / {result['reserved'] / GIB:.3f} {result['seconds']}s {result['died'] or ''}"
    )


def run_compare(args: argparse.Namespace) -> None:
    forecasts = json.loads(Path(args.forecasts).read_text())
    measured = json.loads(Path(args.measured).read_text())["rows"]
    print(f"{'':32} {'allocated':>22}  {'error':>7} {'reserved':>20} {'error':>7}")
    for name, m in measured.items():
        f = forecasts.get(name, {})
        if "error" in f or "error" in m or not f:
            print(f"{name:32} {f.get('error', '')[:60]} | {m.get('error', '')[:60]}")
            continue
        cells = []
        for key in ("allocated", "reserved"):
            error = f[key] / m[key] - 1
            cells.append(f"{f[key] / GIB:9.3f} {m[key] / GIB:9.3f} {error:+8.2%}")
        print(f"{name:32}", " ".join(cells))
        if args.phases:
            for phase, pair in f["phases"].items():
                real = m["phases"].get(phase, [0, 0])
                peaks = [f"{ours / GIB:9.3f} {theirs / GIB:9.3f}" for ours, theirs in zip(pair, real, strict=True)]
                print(f"    {phase:14}", "   ".join(peaks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
