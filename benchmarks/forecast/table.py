"""Writes docs/accuracy.md from the committed results: `python benchmarks/forecast/table.py`."""

import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
GIB = 1 << 30
TOOLS = ("accelerate", "deepspeed", "memtracker", "fitcheck")
PACKAGES = {"memtracker": "torch", "fitcheck": "fitcheck-llm"}


def load(name: str) -> dict[str, Any]:
    """A committed result, or nothing where it was not measured yet."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else {}


def errors(forecast: dict[str, Any], measured: dict[str, Any], key: str, *, weights: bool) -> list[float]:
    """Relative errors of a peak, sorted; without `weights`, of the part that is not weights."""
    found = []
    for name, m in measured.items():
        f = forecast[name]
        if usable(f, m):
            whole = m[key] - (0 if weights else f["weights"])
            found.append(abs(f[key] - m[key]) / whole)
    return sorted(found)


def usable(f: dict[str, Any], m: dict[str, Any]) -> bool:
    """Whether a row has both figures."""
    return "error" not in f and "error" not in m and not m.get("died")


def share(values: list[float], part: float) -> float:
    """The value below which `part` of the values lie."""
    return values[min(len(values) - 1, int(part * len(values)))]


def summary(title: str, forecast: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Median, 95th percentile and worst of each error."""
    lines = [f"### {title}", "", "| | rows | median | 95th percentile | worst | bar |", "|---|---|---|---|---|---|"]
    for weights, what, bar in (
        (True, "whole peak", "0.5 % · 2 % · 3 %"),
        (False, "peak without weights", "2 % · 6 % · –"),
    ):
        for key in ("allocated", "reserved"):
            e = errors(forecast, measured, key, weights=weights)
            cells = (f"{x:.3%}" for x in (statistics.median(e), share(e, 0.95), e[-1]))
            lines.append(f"| {what}, {key} | {len(e)} | {' | '.join(cells)} | {bar} |")
    exact = sum(
        f["allocated"] == measured[n]["allocated"]
        for n, f in forecast.items()
        if n in measured and usable(f, measured[n])
    )
    both = sum(
        f["allocated"] == measured[n]["allocated"] and f["reserved"] == measured[n]["reserved"]
        for n, f in forecast.items()
        if n in measured and usable(f, measured[n])
    )
    light = sum(
        f["weights"] < measured[n]["allocated"] / 2
        for n, f in forecast.items()
        if n in measured and usable(f, measured[n])
    )
    lines += ["", f"Equal to the byte: allocated in {exact} rows, allocated and reserved in {both}.",
              f"Weights are under half of the peak in {light} rows.", ""]  # fmt: skip
    return lines


def rows(forecast: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """One line for each configuration."""
    lines = [
        "| configuration | allocated: forecast | measured | error | reserved: forecast | measured | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in forecast:
        f, m = forecast[name], measured.get(name, {"error": "not measured"})
        if not usable(f, m):
            why = f.get("error") or m.get("error") or m.get("died")
            lines.append(f"| {name} | {str(why).splitlines()[0][:100]} | | | | | |")
            continue
        cells = []
        for key in ("allocated", "reserved"):
            cells += [f"{f[key] / GIB:.3f}", f"{m[key] / GIB:.3f}", f"{f[key] / m[key] - 1:+.2%}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def capacities(found: dict[str, Any]) -> list[str]:
    """Smallest surviving capacities, found on the GPU."""
    lines = [
        "| configuration | forecast | survives at | dies at | survives at × 1.02 | dies at × 0.96 |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        if not row.get("smallest"):
            continue
        forecast, survived, died = row["smallest"], row["survives_at"], row["dies_at"]
        high, low = (f"{size / GIB:.3f}" if size else "–" for size in (survived, died))
        survives = survived is not None and survived <= 1.02 * forecast
        dies = died is not None and died >= 0.96 * forecast
        lines.append(
            f"| {name} | {forecast / GIB:.3f} | {high} | {low} | {'yes' if survives else '**no**'} "
            f"| {'yes' if dies else '**no**'} |"
        )
    return [*lines, ""]


def peers(found: dict[str, Any], known: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """What other tools say of the same runs, each against the figure that it means to give."""
    lines = [
        "| tool | against | can say | of them, ignores something | median error | worst | says less than it takes |",
        "|---|---|---|---|---|---|---|",
    ]
    answers = {tool: {n: r.get(tool, {}) for n, r in found["rows"].items()} for tool in TOOLS}
    answers["brimful"] = {n: {"bytes": f["reserved"]} if "reserved" in f else {} for n, f in known.items()}
    for tool, rows_of_tool in answers.items():
        against = "allocated" if tool == "memtracker" else "reserved"
        said = {n: a for n, a in rows_of_tool.items() if "bytes" in a and against in measured.get(n, {})}
        notes = sum("note" in a for a in said.values())
        e = [a["bytes"] / measured[n][against] - 1 for n, a in said.items()]
        size, low = sorted(abs(x) for x in e), sum(x < -0.03 for x in e)
        version = found["versions"].get(PACKAGES.get(tool, tool), "")
        lines.append(
            f"| {tool} {version} | {against} | {len(e)} of {len(measured)} | {notes} "
            f"| {statistics.median(size):.1%} | {size[-1]:.0%} | {low} |"
        )
    return [*lines, ""]


def main() -> None:
    """Put the page together from whatever has been measured."""
    known, measured = load("forecast.json"), load("measured.json")
    lines = [
        "# How exact the forecast is",
        "",
        "Written by `python benchmarks/forecast/table.py` from `benchmarks/forecast/results/`.",
        "Sizes in GiB.",
        "",
    ]
    if measured:
        lines += [f"Measured: {', '.join(f'{k} {v}' for k, v in measured['machine'].items())}.", ""]
        lines += summary("The known set", known, measured["rows"])
    held, held_measured = load("heldout-forecast.json"), load("heldout-measured.json")
    if held_measured:
        lines += summary("The held-out set", held, held_measured["rows"])
        lines += [
            "Drawn by `sample.py`; forecasts made before measuring, both as they first came.",
            "The forecast has changed since they were drawn, so these rows are no longer held out: a new draw is due.",
            "",
        ]
    if capacity := load("capacity.json"):
        lines += [
            "## Smallest surviving capacity",
            "",
            "Found on the GPU by bisection under `set_per_process_memory_fraction`.",
            "",
        ]
        lines += capacities(capacity["rows"])
    if other := load("peers.json"):
        lines += [
            "## Other tools on the known set",
            "",
            "Each as its own documentation says, against the figure that it means to give.",
            "",
        ]
        lines += peers(other, known, measured["rows"])
    lines += ["## The known set, row by row", "", *rows(known, measured["rows"])]
    if held_measured:
        lines += ["## The held-out set, row by row", "", *rows(held, held_measured["rows"])]
    (HERE.parents[1] / "docs" / "accuracy.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
