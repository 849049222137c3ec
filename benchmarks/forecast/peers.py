"""What other tools predict for the rows of a matrix, each asked in the way its own documentation says.

python -m venv peers && peers/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
DS_BUILD_OPS=0 peers/bin/pip install transformers==5.17.0 peft==0.21.2 accelerate==1.15.0 deepspeed fitcheck-llm pyyaml
PYTHONPATH=src peers/bin/python benchmarks/forecast/peers.py benchmarks/forecast/matrix.yaml

Writes results/peers.json: rows → tool → {"bytes": …} or {"cannot": why} or {"not_run": why}, and what each was `given`.
`cannot`: the tool refuses, fails, or has no word for what the row trains, with which optimizer or in which precision.
`note`: it answers, and something in the row that moves memory is not among its inputs.
Every question runs in a process of its own, offline. Answers are kept between calls; `not_run` is tried again.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
PACKAGES = {
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "memtracker": ("torch", "peft"),
    "fitcheck": ("fitcheck-llm",),
}
SHARED_PACKAGES = ("transformers", "torch")
ASSUMES = {
    "accelerate": "the column 'Training using Adam' of `accelerate estimate-memory`: all weights train, batch size 1 "
    "(docstring of estimate_training_usage), no activations, AutoModel without the head",
    "deepspeed": "ZeRO-2 (`zero3`: ZeRO-3) on one GPU, no offload: weights, gradients and Adam's states in mixed "
    "precision; its page 'Memory Requirements' says that activations and temporary memory come on top",
    "memtracker": "peak of MemTracker over two steps of the plain Hugging Face model on fake CPU tensors (a CPU-only "
    "torch cannot run fake CUDA tensors); allocated bytes, no allocator, library workspace or context",
    "fitcheck": "memory_mib.total of `fitcheck MODEL --gpu h200 --json`: what the process takes, with 500 MiB of "
    "context and 5 % for fragmentation; `tensors` leaves these two out",
}
Given = dict[str, Any]


class Cannot(Exception):  # noqa: N818 - an answer, not a mistake
    """Why a tool has no answer to a row."""


# What each tool is given --------------------------------------------------------------------------------------------


def facts_of(row: dict) -> tuple[Any, Given]:
    """The run and its model: only what a tool could be told."""
    from brimful.catalog.models import find_model
    from brimful.core.runfile import from_mapping

    run = from_mapping(row)
    entry = find_model(run.model)
    if entry is not None:
        name = entry.hub_id or f"brimful/{entry.name}"
        model = {"name": name, "config": dict(entry.config), "parameters": entry.parameters, "untied": entry.untied}
    elif (Path(run.model) / "config.json").is_file():
        config = json.loads((Path(run.model) / "config.json").read_text())
        model = {"name": f"local/{Path(run.model).name}", "config": config, "parameters": None, "untied": ()}
    else:
        raise Cannot("the model has no Hugging Face configuration")
    return run, {**model, "untied": list(model["untied"])}


def for_state_estimators(run: Any) -> None:
    """accelerate and DeepSpeed know one kind of training: all weights, with Adam."""
    if run.method in ("lora", "qlora"):
        raise Cannot("counts every weight as trained: no adapters")
    if run.optimizer.name != "adamw":
        raise Cannot(f"knows Adam only, not {run.optimizer.name}")


def for_accelerate(run: Any, model: Given) -> Given:
    # docs, usage_guides/model_size_estimator: "the data types you want the model to be loaded in with", --dtypes of
    # float32, float16, int8, int4; bf16 weights are as large as float16's
    for_state_estimators(run)
    dtypes = {"fp32": "float32", "bf16": "float16", "fp16": "float16"}
    if run.precision.weights not in dtypes:
        raise Cannot(f"has no {run.precision.weights}")
    return {"model": model["name"], "config": model["config"], "dtype": dtypes[run.precision.weights]}


def for_deepspeed(run: Any, model: Given) -> Given:
    # docs, code-docs/source/memory.rst: parameters in fp16 beside fp32 copies, gradients and Adam's two states
    for_state_estimators(run)
    if run.precision.compute not in ("bf16", "fp16"):
        raise Cannot(f"counts mixed precision only, not {run.precision.compute}")
    return {"model": model["name"], "config": model["config"], "untied": model["untied"]}


def cut(run: Any) -> tuple[int, int]:
    """Rows of a micro-batch and micro-batches of a step, as brimful.step.assemble.slicing has them."""
    sequences = run.batch.sequences or max(1, run.batch.tokens // run.data.max_length)
    rows = run.pin.micro_batch or sequences
    return rows, -(-sequences // rows)


def eager(run: Any, config: Given) -> bool:
    """Whether attention keeps its scores: capped ones have no fused kernel."""
    return run.pin.attention == "eager" or config.get("attn_logit_softcapping") is not None


def for_fitcheck(run: Any, model: Given) -> Given:
    # README and `fitcheck --help`, which define every flag used here
    precision, lora, config = run.precision, run.lora, model["config"]
    if config.get("is_encoder_decoder"):
        raise Cannot("decoder-only models (its README, Honest limits)")
    if precision.compute == "fp64":
        raise Cannot("has no fp64")
    rows, slices = cut(run)
    flags = ["--gpu", "h200", "--batch-size", rows, "--grad-accum", slices, "--seq-len", run.data.max_length]
    flags += ["--precision", precision.compute]
    flags += [] if eager(run, config) else ["--flash-attn"]
    if run.pin.recompute == "all":
        flags += ["--grad-checkpoint"]
    elif run.pin.recompute != "none":
        raise Cannot("recomputes all layers or none")
    adapted = run.method in ("lora", "qlora")
    if adapted:
        if lora.variant == "dora" or lora.save_modules:
            raise Cannot("has no DoRA and no modules saved whole")
        if precision.adapter != "fp32":
            raise Cannot("adapters are always fp32")
        if run.method == "lora" and precision.autocast:
            raise Cannot("keeps frozen weights in the precision it computes in")
        targets = "full" if lora.targets == "all-linear" else ",".join(lora.targets) if lora.targets else None
        flags += ["--lora-r", lora.rank]
    else:
        targets = ""
        flags += ["--no-lora"]
    if run.method == "qlora":
        flags += ["--quant", "nf4", "--double-quant"]
    state = "fp32" if adapted or precision.optimizer != "bf16" else "bf16"
    optimizers = {
        "adamw": ["--optimizer", "adamw", "--optimizer-dtype", state],
        "adamw-8bit": ["--optimizer", "adam8bit"],
        "sgd": ["--optimizer", "sgd-momentum" if run.optimizer.momentum else "sgd"],
    }
    if run.optimizer.name not in optimizers:
        raise Cannot(f"has no {run.optimizer.name}")
    return {**model, "flags": [str(f) for f in flags + optimizers[run.optimizer.name]], "targets": targets}


def for_memtracker(run: Any, model: Given) -> Given:
    precision = run.precision
    if run.method == "qlora":
        raise Cannot("bitsandbytes' Params4bit cannot be made of fake tensors (0.50.2: RuntimeError)")
    if run.optimizer.name in ("adamw-8bit", "adamw-paged-8bit"):
        raise Cannot("bitsandbytes' optimizer reads values, fake tensors have none (0.50.2: DataDependentOutput)")
    if run.pin.loss == "fused":
        raise Cannot("Liger's loss is a Triton kernel, which takes no fake tensors")
    if run.pin.layout == "unpadded":
        raise Cannot("transformers has no attention over unpadded rows without CUDA")
    wide = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
    adapted = run.method == "lora"
    if not adapted and any(wide[p] > wide[precision.weights] for p in (precision.gradients, precision.optimizer)):
        raise Cannot("the plain Hugging Face step has no gradients or states wider than the weights")
    rows, slices = cut(run)
    lora, optimizer = run.lora, run.optimizer
    return {
        **model,
        "weights": precision.weights,
        "compute": precision.compute,
        "lora": adapted
        and {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "dropout": lora.dropout,
            "targets": lora.targets if isinstance(lora.targets, str | None) else list(lora.targets),
            "save": list(lora.save_modules),
            "variant": lora.variant,
            "wide": precision.adapter == "fp32",
        },
        "optimizer": {"name": optimizer.name, "momentum": optimizer.momentum, "clip": optimizer.clip},
        "impl": run.pin.optimizer_impl or "fused",
        "rows": rows,
        "slices": slices,
        "length": run.data.max_length,
        "target_length": run.data.max_target_length or run.data.max_length,
        "recompute": run.pin.recompute if isinstance(run.pin.recompute, str) else list(run.pin.recompute),
        # transformers advises eager attention where scores are capped: its fused kernels leave the cap out
        "attention": run.pin.attention or ("eager" if eager(run, model["config"]) else None),
        "loss": run.pin.loss or "plain",
        "chunk": run.pin.loss_chunk,
    }


GIVES = {
    "accelerate": for_accelerate,
    "deepspeed": for_deepspeed,
    "fitcheck": for_fitcheck,
    "memtracker": for_memtracker,
}


def note_on(tool: str, run: Any, config: Given) -> str | None:
    """What the tool leaves out of this row though it answers."""
    if tool == "fitcheck" and run.pin.loss in ("fused", "chunked"):
        return f"no {run.pin.loss} loss: all logits are counted"
    dropout = any(config.get(name) for name in ("attention_dropout", "attn_pdrop", "dropout_rate"))
    if tool == "memtracker" and (dropout or config.get("is_encoder_decoder")):
        return "traced on a CPU, where attention with dropout or a learned bias keeps its scores"
    return None


# The tools, each in its own process ---------------------------------------------------------------------------------


def ask_accelerate(given: Given) -> Given:
    """accelerate.commands.estimate.gather_data, the command without its table; its look at the hub is replaced."""
    from accelerate.commands import estimate

    folder = Path(tempfile.mkdtemp(dir=os.environ["PEERS_SCRATCH"]))
    (folder / "config.json").write_text(json.dumps(given["config"]))
    estimate.verify_on_hub = lambda *_: SimpleNamespace(library_name="transformers", config=given["config"])
    arguments = ["estimate-memory", str(folder), "--library_name", "transformers", "--dtypes", given["dtype"]]
    args = estimate.estimate_command_parser().parse_args(arguments[1:])
    training = estimate.gather_data(args)[0][3]
    return {"bytes": int(max(training.values()))}  # what estimate_command prints


def ask_deepspeed(given: Given) -> Given:
    """What estimate_zero2_model_states_mem_needs_all_cold and its ZeRO-3 twin print for no offload at all, in bytes.

    The `live` variants do the same on a model in memory: they tell parameters apart by their address, which a model on
    the meta device does not have, so the two counts are made here as memory.rst makes them.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model = meta_model(given)
    total = sum({id(p): p.numel() for p in model.parameters()}.values())
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    one_gpu = {"num_gpus_per_node": 1, "num_nodes": 1, "cpu_offload": False}
    zero2 = estimate_zero2_model_states_mem_needs(total, **one_gpu)[1]
    zero3 = estimate_zero3_model_states_mem_needs(total, largest, cpu_offload_params=False, **one_gpu)[1]
    return {"bytes": zero2, "zero3": zero3}


def ask_fitcheck(given: Given) -> Given:
    """`fitcheck MODEL … --json` on a hub cache that holds the config.json (its README: enough to estimate offline)."""
    import click
    from fitcheck import cli, config_parser

    repository = Path(os.environ["HF_HOME"]) / "hub" / f"models--{given['name'].replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_text(json.dumps(given["config"]))
    # online it asks the hub for the number of parameters, and refuses where its own formula disagrees by 2 %
    config_parser._reported_param_count = lambda *_: given["parameters"]
    flags = [*given["flags"], "--json"]
    if given["targets"] is None:
        from brimful.step.adapters import default_targets

        flags += ["--lora-targets", ",".join(default_targets(meta_model(given)))]
    elif given["targets"]:
        flags += ["--lora-targets", given["targets"]]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            cli.main([given["name"], *flags], standalone_mode=False)
    except click.ClickException as error:
        raise Cannot(error.format_message().split(". ")[0].replace("\n", " ")[:200]) from error
    found = json.loads(printed.getvalue())["memory_mib"]
    mib = 1 << 20
    return {"bytes": round(found["total"] * mib), "tensors": round((found["total"] - found["overhead"]) * mib)}


def ask_memtracker(given: Given) -> Given:
    """As in its docstring and in PyTorch's test_mem_tracker.py: track_external, two steps, reset_mod_stats between.

    Fake tensors as in torchtitan's scripts/estimate, which PyTorch's authors wrote around it. Loss scaling is left out:
    it asks for values, and holds nothing larger than a number.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from brimful.step.model import materialise

    class Tracker(MemTracker):
        """Without the table of peaks by module, which is not asked for and takes four fifths of the time."""

        def _update_peak_stats(self, peak_state: Any) -> None:
            kept, self.memory_tracking = self.memory_tracking, {}
            super()._update_peak_stats(peak_state)
            self.memory_tracking = kept

    # peft cannot cast fake parameters ("Couldn't swap"), so it is made on the meta device first
    with torch.device("meta"):
        model = trained_model(given)
    with FakeTensorMode():
        materialise(SimpleNamespace(module=model), torch.device("cpu"))
        learning = [p for p in model.parameters() if p.requires_grad]
        optimizer = build_optimizer(learning, given)
        length = given["target_length"] if given["config"].get("is_encoder_decoder") else given["length"]
        ids = torch.zeros(given["rows"], given["length"], dtype=torch.long)
        labels = torch.zeros(given["rows"], length, dtype=torch.long)
        tracker = Tracker()
        tracker.track_external(model, optimizer, ids, labels)
        with tracker:
            for _ in range(2):
                for _ in range(given["slices"]):
                    (loss_of(model, ids, labels, given) / given["slices"]).backward()
                    tracker.reset_mod_stats()
                if given["optimizer"]["clip"]:
                    torch.nn.utils.clip_grad_norm_(learning, given["optimizer"]["clip"])
                optimizer.step()
                optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {"bytes": peak.pop("Total"), "parts": {kind.value: size for kind, size in peak.items() if size}}


def meta_model(given: Given) -> Any:
    import torch

    with torch.device("meta"):
        return plain_model(given, torch.bfloat16)


def plain_model(given: Given, dtype: Any, **options: Any) -> Any:
    """The Hugging Face model; heads that the published weights hold on their own untied, as from_pretrained does."""
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    values = dict(given["config"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    family = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    model = family.from_config(config, dtype=dtype, **options)
    for name in given["untied"]:
        owner, _, last = name.rpartition(".")
        part = model.get_submodule(owner)
        setattr(part, last, nn.Parameter(getattr(part, last).detach().clone()))
    return model


def trained_model(given: Given) -> Any:
    """The model as its user would train it: adapters by peft, recomputation by transformers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from brimful.step.adapters import default_targets
    from brimful.step.recompute import which_layers
    from brimful.step.target import dtype

    options = {"attn_implementation": given["attention"]} if given["attention"] else {}
    model = plain_model(given, dtype(given["weights"]), **options)
    if given["recompute"] != "none":
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        chosen = which_layers(given["recompute"], len(layers))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = index in chosen
    lora = given["lora"]
    if lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=lora["rank"],
            lora_alpha=lora["alpha"],
            lora_dropout=lora["dropout"],
            target_modules=lora["targets"] or default_targets(model),
            modules_to_save=lora["save"] or None,
            use_rslora=lora["variant"] == "rslora",
            use_dora=lora["variant"] == "dora",
        )
        model = get_peft_model(model, config, autocast_adapter_dtype=lora["wide"])
    return model.train()


def build_optimizer(learning: list, given: Given) -> Any:
    import torch

    spec, fast = given["optimizer"], {given["impl"]: True}
    if spec["name"] == "adamw":
        return torch.optim.AdamW(learning, **fast)
    if spec["name"] == "sgd":
        return torch.optim.SGD(learning, momentum=spec["momentum"], **fast)
    return torch.optim.Adafactor(learning, foreach=False)


def loss_of(model: Any, ids: Any, labels: Any, given: Given) -> Any:
    """The model's own loss; a chunked one is brimful's, because transformers has none."""
    import torch

    from brimful.step.target import dtype

    compute = dtype(given["compute"])
    with torch.autocast("cpu", compute, enabled=given["compute"] != given["weights"]):
        if given["loss"] == "plain":
            return model(input_ids=ids, labels=labels, use_cache=False).loss
        from brimful.step.loss import LinearLoss

        base = model.get_base_model() if given["lora"] else model
        inputs = {"decoder_input_ids": labels} if given["config"].get("is_encoder_decoder") else {}
        inner = base.base_model(input_ids=ids, use_cache=False, **inputs)[0]
        loss = LinearLoss(chunk=given["chunk"], softcap=getattr(base.config, "final_logit_softcapping", None))
        return loss(inner.to(compute), base.get_output_embeddings(), labels).total / labels.numel()


ASKS = {
    "accelerate": ask_accelerate,
    "deepspeed": ask_deepspeed,
    "fitcheck": ask_fitcheck,
    "memtracker": ask_memtracker,
}


def answer(tool: str) -> None:
    """The process of one question: reads what is given, prints one line of JSON."""
    given = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = ASKS[tool](given)
    except Cannot as why:
        found = {"cannot": str(why)}
    except Exception as error:
        print(f"{tool}: {error!r}", file=sys.stderr)
        found = {"cannot": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    print(json.dumps(found))


# The rows -----------------------------------------------------------------------------------------------------------


def ask(tool: str, given: Given, limit_s: float, scratch: str) -> Given:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": f"{scratch}/hf", "PEERS_SCRATCH": scratch}
    quiet = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    source = f"{HERE.parents[1] / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--answer", tool],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=os.environ | offline | quiet | {"PYTHONPATH": source},
            cwd=scratch,
        )
    except subprocess.TimeoutExpired:
        return {"not_run": f"over {limit_s:.0f} s"}
    if done.returncode != 0:
        return {"cannot": f"died: {done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else 'silently'}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def question(tool: str, row: dict) -> tuple[Given | None, Given]:
    """What the tool is given, and the beginning of its answer."""
    try:
        run, model = facts_of(row)
        given = GIVES[tool](run, model)
    except Cannot as why:
        return None, {"cannot": str(why)}
    note = note_on(tool, run, model["config"])
    return given, {"note": note} if note else {}


def shown(given: Given) -> Given:
    """What was given, without the configuration that the model's name stands for."""
    return {k: v for k, v in given.items() if k not in ("config", "untied", "parameters")}


def cost(given: Given) -> float:
    """Operations of a trace, roughly; cheap rows first, so that a budget answers as many as it can."""
    config = given["config"]
    layers = next((config[k] for k in ("num_hidden_layers", "n_layer", "num_layers") if k in config), 32)
    return layers * given["slices"] * (2 if config.get("is_encoder_decoder") else 1)


def run(args: argparse.Namespace) -> None:
    import yaml

    rows = yaml.safe_load(Path(args.matrix).read_text())
    out = Path(args.out)
    before = json.loads(out.read_text()) if out.exists() else {"rows": {}, "versions": {}}
    versions = {p: version(p) for p in sorted({*SHARED_PACKAGES, *(p for ps in PACKAGES.values() for p in ps)})}
    same = {t for t, ps in PACKAGES.items() if all(before["versions"].get(p) == versions[p] for p in ps)}
    found: dict[str, Given] = {**before["rows"]} if args.only else {n: before["rows"].get(n, {}) for n in rows}
    limits = {"row_s": args.row_s, "memtracker_row_s": args.memtracker_row_s, "memtracker_s": args.memtracker_s}
    known: dict[str, Given] = {}
    scratch = tempfile.TemporaryDirectory()

    def keep(name: str, tool: str, result: Given) -> None:
        found.setdefault(name, {})[tool] = result
        report = {"versions": versions, "limits": limits, "assumes": ASSUMES, "rows": found}
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = out.with_suffix(".part")
        fresh.write_text(json.dumps(report, indent=1, ensure_ascii=False))
        fresh.replace(out)
        print(f"{name:32} {tool:16} {summary(result)}", file=sys.stderr, flush=True)

    wanted = [n for n in rows if not args.only or any(part in n for part in args.only.split(","))]
    for tool in args.tools.split(","):
        open_questions = []
        for name in wanted:
            given, beginning = question(tool, rows[name])
            old = found.get(name, {}).get(tool, {})
            if given is None:
                keep(name, tool, beginning)
                continue
            if tool in same and old.get("given") == shown(given) and "not_run" not in old:
                known[tool + json.dumps(given)] = {k: v for k, v in old.items() if k not in ("given", "note")}
            open_questions.append((name, given, beginning))
        heavy = tool == "memtracker"
        if heavy:
            open_questions.sort(key=lambda asked: cost(asked[1]))
        started, limit_s = time.monotonic(), args.memtracker_row_s if heavy else args.row_s
        for name, given, beginning in open_questions:
            key = tool + json.dumps(given)
            left_s = args.memtracker_s - (time.monotonic() - started) if heavy else limit_s
            if key not in known:
                if left_s < 1:
                    keep(name, tool, {"not_run": f"{args.memtracker_s:.0f} s for all rows were spent"})
                    continue
                known[key] = ask(tool, given, min(limit_s, left_s), scratch.name)
            keep(name, tool, known[key] | beginning | {"given": shown(given)})
    table(found)


def summary(result: Given) -> str:
    if "bytes" in result:
        return f"{result['bytes'] / (1 << 30):.2f} GiB" + (f" ({result['note']})" if "note" in result else "")
    return f"cannot say: {result['cannot']}" if "cannot" in result else f"not run: {result['not_run']}"


def table(found: dict[str, Given]) -> None:
    print(f"{'GiB':32}" + "".join(f"{tool:>17}" for tool in PACKAGES))
    for name, answers in found.items():
        cells = []
        for tool in PACKAGES:
            result = answers.get(tool, {"not_run": ""})
            size = f"{result['bytes'] / (1 << 30):.2f}{'*' if 'note' in result else ''}" if "bytes" in result else None
            cells.append(size or ("cannot say" if "cannot" in result else "not run"))
        print(f"{name:32}" + "".join(f"{cell:>17}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("matrix", nargs="?", default=str(HERE / "matrix.yaml"))
    parser.add_argument("--out", default=str(HERE / "results" / "peers.json"))
    parser.add_argument("--only", help="rows whose names contain one of these, with commas between")
    parser.add_argument("--tools", default=",".join(PACKAGES))
    parser.add_argument("--row-s", type=float, default=120, help="time limit of one question")
    parser.add_argument("--memtracker-row-s", type=float, default=600, help="the same for MemTracker")
    parser.add_argument("--memtracker-s", type=float, default=900, help="time for all rows of MemTracker in this call")
    parser.add_argument("--answer", choices=ASKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        answer(args.answer)
    else:
        run(args)


if __name__ == "__main__":
    main()
