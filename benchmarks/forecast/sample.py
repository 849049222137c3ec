"""Draws a set of configurations by seed: the held-out set that nobody looked at while the forecast was written.

    python benchmarks/forecast/sample.py --seed 7 --count 48 --out benchmarks/forecast/heldout.yaml

Every choice is drawn alike from what the run file offers; a draw is thrown away only where the run file, the model or a
128 GiB card cannot take it, never for its forecast's sake. The seed is chosen after the last change to the forecast.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import yaml

from brimful.catalog.models import get_model, model_names
from brimful.core.errors import BrimfulError
from brimful.core.runfile import from_mapping
from brimful.step.assemble import shape_model

LARGEST = {"full": 3.5e9, "scratch": 3.5e9, "lora": 33e9, "qlora": 33e9}
NO_UNPADDED = ("t5", "gemma2")  # a bias or a softcap that no unpadded kernel knows
MOST_TOKENS = {"full": 16384, "scratch": 16384, "lora": 16384, "qlora": 8192}


def draw(random: random.Random) -> dict[str, Any] | None:
    """One configuration, or none where the draw makes no run."""
    entry = get_model(random.choice(model_names()))
    method = random.choice(["full", "lora", "qlora", "scratch"])
    if entry.parameters > LARGEST[method]:
        return None
    length = random.choice([128, 200, 256, 384, 512, 777, 1024, 1536, 2048, 4096, 8192])
    rows = random.choice([1, 2, 3, 4, 6, 8, 16, 32])
    positions = entry.config.get("max_position_embeddings") or entry.config.get("n_positions") or length
    if rows * length > MOST_TOKENS[method] or length > positions:
        return None
    slices = random.choice([1, 1, 2])
    row: dict[str, Any] = {
        "model": entry.name,
        "method": method,
        "batch": rows * slices,
        "data": {"max_length": length},
    }
    if entry.is_encoder_decoder:
        row["data"]["max_target_length"] = random.choice([64, 128, 256, 512])
    row["precision"] = _precision(random, method)
    if method in ("lora", "qlora"):
        row["lora"] = _lora(random, method)
    name = random.choice(["adamw", "adamw", "adamw", "adamw-8bit", "sgd", "adafactor"])
    row["optimizer"] = {"name": name, "clip": random.choice([0.0, 1.0])}
    if name == "sgd":
        row["optimizer"]["momentum"] = random.choice([0.0, 0.9])
    pin: dict[str, Any] = {"micro_batch": rows, "loss": random.choice(["plain", "fused", "chunked"])}
    unpadded = entry.model_type not in NO_UNPADDED and random.random() < 0.4
    pin["layout"] = "unpadded" if unpadded else "padded"
    pin["recompute"] = random.choice(["none", "all", "half", "every-2nd", [0, 1, 3]])
    if name in ("adamw", "sgd"):
        pin["optimizer_impl"] = random.choice(["foreach", "fused"])
    if random.random() < 0.25:
        pin["allocator"] = "expandable_segments:True"
    row["pin"] = pin
    return row


def _precision(random: random.Random, method: str) -> Any:
    if method == "qlora":
        return "bf16"
    wide = {"weights": "bf16", "gradients": "fp32", "optimizer": "fp32"}
    return random.choice(["bf16", "bf16", "bf16", "fp32-autocast", "fp16-scaled", "fp32", wide])


def _lora(random: random.Random, method: str) -> dict[str, Any]:
    variants = ["lora", "lora", "rslora"] if method == "qlora" else ["lora", "lora", "rslora", "dora"]
    lora = {
        "rank": random.choice([4, 8, 16, 64]),
        "dropout": random.choice([0.0, 0.05]),
        "variant": random.choice(variants),
    }
    if random.random() < 0.5:
        lora["targets"] = "all-linear"
    return lora


def heldout(seed: int, count: int) -> dict[str, dict[str, Any]]:
    """`count` rows by name, the same for the same seed."""
    source, rows = random.Random(seed), {}
    while len(rows) < count:
        row = draw(source)
        if row is None:
            continue
        try:
            shape_model(from_mapping(row))
        except BrimfulError:
            continue
        rows[f"{len(rows):02d}-{row['model']}-{row['method']}"] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rows = heldout(args.seed, args.count)
    lines = [f"# Drawn by sample.py --seed {args.seed} --count {args.count}; not edited.\n"]
    lines += [
        f"{name}: {yaml.safe_dump(row, default_flow_style=True, width=10_000).strip()}\n" for name, row in rows.items()
    ]
    Path(args.out).write_text("".join(lines))


if __name__ == "__main__":
    main()
