"""Holds the simulated caching allocator against the real one, on a machine with a CUDA device.

Draws random tapes, runs each for real under every configuration in a process of its own, without a limit and under
several, and compares peaks, retries and the event that ran out of memory:

    python benchmarks/forecast/allocator_check.py --json allocator_check.json

Prints a table and exits with 1 where the two differ. Needs torch with CUDA and this repository, nothing else.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from brimful.core.tape import Allocation, Category, Tape
from brimful.forecast.allocator import Settings, replay, smallest_capacity

MIB = 1 << 20
CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "roundup_power2_divisions:[64:8,256:4,>:2]",
    "garbage_collection_threshold:0.7",
    "max_split_size_mb:64,garbage_collection_threshold:0.6",
    "expandable_segments:True,max_split_size_mb:512,roundup_power2_divisions:8",
)
OFF_GRID = MIB // 4
"""Reserved memory moves in whole MiB; a limit between two of them means the same however the fraction is rounded."""


@dataclass(frozen=True)
class Outcome:
    """What both allocators report of one run."""

    peak_allocated: int
    peak_reserved: int
    retries: int
    died_at: int | None


@dataclass(frozen=True)
class Comparison:
    """One tape under one configuration and one limit."""

    configuration: str
    tape: str
    limit: int | None
    simulated: Outcome
    real: Outcome

    @property
    def same(self) -> bool:
        return self.simulated == self.real


def draw_tape(seed: int, events: int, last_in_first_out: float, live: int = 80) -> Tape:
    """Sizes from 512 B to 600 MiB, log-uniform; a free takes the newest with the given probability, else any."""
    draw = random.Random(seed)
    allocations: list[Allocation] = []
    tape: list[int] = []
    alive: list[int] = []
    while len(tape) < events:
        if alive and draw.random() < len(alive) / (2 * live):
            newest = draw.random() < last_in_first_out
            tape.append(-alive.pop(-1 if newest else draw.randrange(len(alive))))
        else:
            size = int(512 * (600 * MIB / 512) ** draw.random())
            allocations.append(Allocation(size, Category.TEMPORARIES, "drawn"))
            alive.append(len(allocations))
            tape.append(len(allocations))
    return Tape(allocations, tape)


def limits(tape: Tape, settings: Settings) -> tuple[int | None, ...]:
    """None, one where cached memory must be released, the smallest that survives, and two that do not."""
    smallest = smallest_capacity(tape, settings)
    halfway = (smallest + replay(tape, settings).peak_reserved) // 2
    below = (smallest - 2 * MIB, smallest * 9 // 10)
    return (None, *(limit // (2 * MIB) * 2 * MIB + OFF_GRID for limit in (halfway, smallest, *below)))


def simulate(tape: Tape, settings: Settings, limit: int | None) -> Outcome:
    result = replay(tape, settings, limit)
    return Outcome(result.peak_allocated, result.peak_reserved, result.retries, result.died_at)


def run_for_real(configuration: str, tape: Tape, caps: Sequence[int | None]) -> list[Outcome]:
    """In a process of its own: the allocator reads its configuration once, and an address is best drawn fresh."""
    job = {"sizes": [allocation.size for allocation in tape.allocations], "events": tape.events, "limits": caps}
    done = subprocess.run(
        [sys.executable, __file__, "--worker"],
        input=json.dumps(job),
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": configuration},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"the run under {configuration!r} failed:\n{done.stderr}")
    return [Outcome(**outcome) for outcome in json.loads(done.stdout.splitlines()[-1])]


def device() -> str:
    """Which torch and which GPU this is, asked in a process of its own: here CUDA must not be touched."""
    ask = "import torch; print(torch.__version__, torch.cuda.get_device_name())"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout.strip()


def work() -> None:
    """The worker: reads a job from stdin, runs it under each limit and prints what torch reports."""
    import torch

    job = json.load(sys.stdin)
    total = torch.cuda.mem_get_info()[1]
    outcomes = []
    for limit in job["limits"]:
        if limit is not None:
            torch.cuda.set_per_process_memory_fraction(limit / total)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        if torch.cuda.memory_reserved():
            sys.exit("memory of the run before is still reserved")
        died_at = play(torch, job["sizes"], job["events"])
        stats = torch.cuda.memory_stats()
        outcome = Outcome(
            stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"], stats["num_alloc_retries"], died_at
        )
        outcomes.append(asdict(outcome))
    print(json.dumps(outcomes))


def play(torch, sizes: Sequence[int], events: Sequence[int]) -> int | None:  # type: ignore[no-untyped-def]
    """Allocate and free as the tape says; the index of the event that ran out of memory, if one did."""
    live: dict[int, object] = {}
    for index, event in enumerate(events):
        if event < 0:
            del live[-event]
            continue
        try:
            live[event] = torch.empty(sizes[event - 1], dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return index
    return None


def compare(arguments: argparse.Namespace) -> Iterator[Comparison]:
    kinds = (("mixed", 0.5), ("nested", 0.95), ("random", 0.0))
    tapes = {
        f"{kinds[n % 3][0]} {n}": draw_tape(arguments.seed + n, arguments.events, kinds[n % 3][1])
        for n in range(arguments.tapes)
    }
    jobs = [
        (configuration, name, tape, limits(tape, Settings.parse(configuration)))
        for configuration in CONFIGURATIONS
        for name, tape in tapes.items()
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        real = (
            ([simulate(tape, Settings.parse(text), limit) for limit in caps] for text, _, tape, caps in jobs)
            if arguments.simulate_only
            else pool.map(lambda job: run_for_real(job[0], job[2], job[3]), jobs)
        )
        for (configuration, name, tape, caps), outcomes in zip(jobs, real, strict=True):
            print(f"{configuration or 'default'}: {name}", file=sys.stderr)
            for limit, outcome in zip(caps, outcomes, strict=True):
                simulated = simulate(tape, Settings.parse(configuration), limit)
                yield Comparison(configuration, name, limit, simulated, outcome)


def table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield "MiB; simulated|real"
    yield f"{'tape':<10} {'limit':>9} {'allocated':>19} {'reserved':>15} {'retries':>9} {'died at':>11}"
    heading = None
    for line in comparisons:
        if line.configuration != heading:
            heading = line.configuration
            yield f"-- {heading or 'default'}"
        ours, theirs = line.simulated, line.real
        limit = "none" if line.limit is None else f"{line.limit / MIB:.2f}"
        allocated = f"{ours.peak_allocated / MIB:>9.2f}|{theirs.peak_allocated / MIB:<9.2f}"
        reserved = f"{ours.peak_reserved / MIB:>7.0f}|{theirs.peak_reserved / MIB:<7.0f}"
        died = (
            f"{'-' if ours.died_at is None else ours.died_at:>5}|{'-' if theirs.died_at is None else theirs.died_at:<5}"
        )
        verdict = "same" if line.same else "DIFFERENT"
        retries = f"{ours.retries:>4}|{theirs.retries:<4}"
        yield f"{line.tape:<10} {limit:>9} {allocated} {reserved} {retries} {died} {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=3000, help="length of a tape")
    parser.add_argument("--tapes", type=int, default=3, help="number of tapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=5, help="processes at a time; one takes 6 to 38 GiB")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--simulate-only", action="store_true", help="needs no GPU and compares nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return 0
    start = time.monotonic()
    comparisons = list(compare(arguments))
    print("\n".join(table(comparisons)))
    different = sum(not line.same for line in comparisons)
    print(f"{len(comparisons)} runs, {different} different, {time.monotonic() - start:.0f} s")
    if arguments.json:
        lines = [asdict(line) | {"same": line.same} for line in comparisons]
        report = {"device": device(), "seed": arguments.seed, "events": arguments.events, "runs": lines}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
