"""Host RAM of loading, forecast and measured, on folders written for it (4 GB in a temporary folder, a few minutes).

python benchmarks/forecast/host_ram.py --out benchmarks/forecast/results/host_ram.json

Each forecast and each load has a process of its own, so that none sees what another left. Two targets: the CPU,
whose memory the model itself takes, and a stand-in for a GPU, whose tensors take none (they stay on the meta device),
so that what is left is what loading needs on the host. The GPU's own share of host RAM (`driver`) is in neither column.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

MIB = 1 << 20
BAR = 0.05

FOLDERS = {
    "qwen2-0.5b-bf16": {
        "stored": "bf16",
        "shard": "50GB",
        "config": {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    },
    "llama-1b-fp16-sharded": {
        "stored": "fp16",
        "shard": "700MB",
        "config": {
            "model_type": "llama",
            "vocab_size": 256000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    },
    "t5-0.25b-fp32": {
        "stored": "fp32",
        "shard": "50GB",
        "config": {
            "model_type": "t5",
            "vocab_size": 32128,
            "d_model": 768,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 12,
            "num_heads": 12,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    },
}
# folder, method, precision of the weights, target
LOADS = [
    ("qwen2-0.5b-bf16", "full", "bf16", "cpu"),
    ("qwen2-0.5b-bf16", "lora", "bf16", "gpu"),
    ("qwen2-0.5b-bf16", "full", "fp32", "gpu"),
    ("llama-1b-fp16-sharded", "full", "bf16", "cpu"),
    ("llama-1b-fp16-sharded", "lora", "bf16", "gpu"),
    ("llama-1b-fp16-sharded", "qlora", "bf16", "gpu"),
    ("t5-0.25b-fp32", "full", "fp32", "cpu"),
    ("t5-0.25b-fp32", "full", "fp32", "gpu"),
    ("t5-0.25b-fp32", "full", "bf16", "gpu"),
]


def write(folder: Path, stored: str, shard: str, config: dict) -> None:
    """A folder as save_pretrained writes it, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from brimful.step.target import dtype

    values = dict(config)
    kind = values.pop("model_type")
    family = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    with torch.device("meta"):
        model = family.from_config(AutoConfig.for_model(kind, **values), dtype=dtype(stored))
    if kind == "t5":
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.to_empty(device="cpu")
    if kind != "t5":
        model.tie_weights()
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.05, 0.05)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "config.json").write_text(json.dumps(config))


def run_of(folder: str, method: str, weights: str) -> "object":
    from brimful.core.runfile import from_mapping

    precision = {"weights": weights, "compute": "bf16", "gradients": "fp32", "optimizer": "fp32", "adapter": "fp32"}
    return from_mapping({"model": folder, "method": method, "precision": precision, "data": {"max_length": 128}})


def forecast_one(folder: str, method: str, weights: str, target: str) -> dict:
    """What the forecast says, in the order in which `trace` does it."""
    import brimful.forecast.summary
    import brimful.forecast.trace  # noqa: F401  — a forecast has imported them by the time it asks
    from brimful.forecast.host import loading, this_process
    from brimful.step.assemble import shape_model
    from brimful.step.target import Target

    model = shape_model(run_of(folder, method, weights))
    found = loading(model, Target("cuda" if target == "gpu" else "cpu", traced=target == "gpu"), this_process())
    return {"process": found.process, "buffers": found.buffers, "model": found.model, "peak": found.peak - found.driver}


def load_one(folder: str, method: str, weights: str, target: str) -> dict:
    """Load for real, and read the highest resident memory that the kernel saw."""
    import torch

    from brimful.step.assemble import shape_model
    from brimful.step.model import materialise
    from brimful.step.weights import weights_for

    model = shape_model(run_of(folder, method, weights))
    if target == "cpu":
        materialise(model, torch.device("cpu"))
    started = time.perf_counter()
    report = weights_for(model)(model)
    return {"peak": high_water(), "seconds": round(time.perf_counter() - started, 2), "read": report.bytes}


def high_water() -> int:
    """Peak resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def apart(action: str, *arguments: str) -> dict:
    """The result of one of the two above, in a process of its own."""
    command = [sys.executable, __file__, action, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def compare(out: Path | None) -> int:
    """Write the folders, forecast and load each, print the table; 1 where the bar is missed."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, spec in FOLDERS.items():
            write(Path(temporary, name), **spec)
        for name, method, weights, target in LOADS:
            arguments = (str(Path(temporary, name)), method, weights, target)
            said, real = apart("forecast", *arguments), apart("load", *arguments)
            error = said["peak"] / real["peak"] - 1
            job = {"folder": name, "method": method, "weights": weights, "target": target}
            rows.append({**job, "forecast": said, "measured": real, "error": round(error, 4)})
            print(
                f"{name:22} {method:6} {weights:5} {target:4} forecast {said['peak'] / MIB:7.0f}"
                f"  measured {real['peak'] / MIB:7.0f} MiB  {error:+.1%}  ({real['read'] / MIB:,.0f} MiB read,"
                f" {real['seconds']} s)"
            )
    worst = max(abs(row["error"]) for row in rows)
    print(f"worst {worst:.1%} of a bar of {BAR:.0%}")
    if out:
        versions = {n: version(n) for n in ("torch", "transformers", "peft")} | {"python": platform.python_version()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"versions": versions, "worst": worst, "rows": rows}, indent=1) + "\n")
    return int(worst > BAR)


def main() -> int:
    """One of the two actions of a child process, or all of it."""
    if len(sys.argv) > 1 and sys.argv[1] in ("forecast", "load"):
        print(json.dumps({"forecast": forecast_one, "load": load_one}[sys.argv[1]](*sys.argv[2:])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return compare(parser.parse_args().out)


if __name__ == "__main__":
    sys.exit(main())
