"""From a run file to a step on a target: the one place where a run's words become objects."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from brimful.core.errors import ModelError, UsageError
from brimful.core.runfile import RunFile
from brimful.step import dropout
from brimful.step.adapters import adapt
from brimful.step.attention import KERNELS, Demand, can_express, can_run_unpadded
from brimful.step.batch import MicroBatch, Row, make_batch
from brimful.step.model import TrainModel, build, materialise
from brimful.step.optimizer import build_optimizer
from brimful.step.positions import settle_positions
from brimful.step.recompute import Recomputation, which_layers
from brimful.step.source import ModelSource, find_source
from brimful.step.step import LossChoice, Observer, TrainStep
from brimful.step.target import Target, dtype


@dataclass(frozen=True)
class Slicing:
    """How a step's rows are cut: rows in one micro-batch, and how many micro-batches make a step."""

    rows: int
    count: int


def slicing(run: RunFile) -> Slicing:
    """The micro-batch that the run file pins, or the whole batch at once."""
    sequences = run.batch.sequences or max(1, run.batch.tokens // run.data.max_length)
    rows = min(run.pin.micro_batch or sequences, sequences)
    return Slicing(rows, -(-sequences // rows))


def shape_model(run: RunFile) -> TrainModel:
    """The model with its adapters, on the meta device."""
    source = find_source(run.model, options=dict(run.model_config or {}), trust_remote_code=run.trust_remote_code)
    if run.model_config and source.custom is None:
        raise UsageError(
            f"model_config is for a module:Class of your own, {source.name} has its configuration already",
            hint="leave model_config out, or give a folder with a config.json of your own",
        )
    if getattr(source.config, "output_router_logits", False):
        raise ModelError(
            f"{source.name} asks for an auxiliary loss over its experts, which couples rows and is no part of a step",
            hint="set output_router_logits: false in its config.json",
        )
    limit = source.max_positions
    if limit is not None and run.data.max_length > limit:
        raise ModelError(
            f"data.max_length is {run.data.max_length:,}, {source.name} has positions for {limit:,}",
            hint=f"lower data.max_length to {limit}, or extend the model's positions in its config.json",
        )
    return adapt(build(source, run.precision), run.method, run.lora, run.precision)


def assemble(
    run: RunFile,
    model: TrainModel,
    target: Target,
    observer: Observer | None = None,
    *,
    fill: Callable[[TrainModel], None] | None = None,
) -> TrainStep:
    """The step that the run file describes, with its model's memory on the target; `fill` gives the weights values."""
    check(run, model, target)
    materialise(model, target.tensor_device)
    if fill is not None:
        fill(model)
    settle_positions(model.module, run.data.max_length, fill=not target.traced)
    model.module.train()
    dropout.install(model.module)
    layers = which_layers(run.pin.recompute, len(model.layers))
    return TrainStep(
        model,
        partial(build_optimizer, spec=run.optimizer, groups=run.groups, impl=run.pin.optimizer_impl, target=target),
        precision=run.precision,
        target=target,
        recompute=Recomputation(model.layers, layers, keep_generator=not target.traced),
        loss=LossChoice(run.pin.loss or "plain", run.pin.loss_chunk),
        clip=run.optimizer.clip,
        attention=run.pin.attention,
        observer=observer,
    )


def check(run: RunFile, model: TrainModel, target: Target) -> None:
    """Refuse what the run file pins and this model on this target cannot do, before any memory is taken."""
    source, kernel = model.source, run.pin.attention
    LossChoice(run.pin.loss or "plain").check(model)
    demand = attention_demand(run, model)
    if kernel is not None and kernel not in KERNELS:
        raise UsageError(f"pin.attention: {kernel!r} is not known", hint=f"use one of {', '.join(KERNELS)}")
    if kernel is not None and source.custom is None and not can_express(kernel, demand, target):
        raise UsageError(
            f"the {kernel} kernel cannot do the attention of {source.name} in {run.precision.compute} on this device",
            hint="leave pin.attention out",
        )
    if padded(run):
        return
    recurrent = set(getattr(source.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if recurrent:
        raise UsageError(
            f"{source.name} has layers ({', '.join(sorted(recurrent))}) that would carry one row into the next",
            hint="use layout: padded",
        )
    if source.custom is not None:
        if not getattr(model.base, "supports_unpadded", False):
            raise UsageError(
                f"{source.name} does not say that it keeps rows apart that lie end to end",
                hint="use layout: padded, or make its attention heed row_starts and set supports_unpadded = True",
            )
    elif source.encoder_decoder:
        raise UsageError("an encoder-decoder with relative positions has no unpadded kernel", hint="use layout: padded")
    elif kernel != "exact" and not can_run_unpadded(demand, target):
        what = "soft-capped attention" if demand.softcap else "attention with sinks" if demand.sinks else "attention"
        raise UsageError(
            f"no kernel with row boundaries does the {what} of {source.name} in {run.precision.compute} on this device",
            hint="use layout: padded",
        )


def attention_demand(run: RunFile, model: TrainModel) -> Demand:
    """What the model's attention asks of a kernel, seen from its configuration."""
    config = model.source.config
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    return Demand(
        head_size=size or (getattr(config, "hidden_size", None) or 64) // heads,
        dtype=dtype(run.precision.compute),
        bias=model.source.encoder_decoder,
        softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        sinks=any(name.endswith(".sinks") for name, _ in model.module.named_parameters()),
    )


def padded(run: RunFile) -> bool:
    """Whether the run's layout is the padded one; the default, because every model can do it."""
    return run.pin.layout != "unpadded"


def full_rows(run: RunFile, source: ModelSource, count: int, first: int = 0) -> list[Row]:
    """Rows as long as the run allows: the worst that can occur."""
    length = run.data.max_length
    target_length = (run.data.max_target_length or length) if source.encoder_decoder else length
    known = source.options.get("vocab_size") or getattr(source.config, "vocab_size", None)
    vocabulary = min(1000, known or 1000)
    return [
        Row(first + i, [t % vocabulary for t in range(length)], [t % vocabulary for t in range(target_length)])
        for i in range(count)
    ]


def batch_of(run: RunFile, source: ModelSource, rows: list[Row], step: int = 0) -> MicroBatch:
    """Rows as tensors on the host, in the layout of the run."""
    if source.encoder_decoder and not padded(run):
        raise UsageError("an encoder-decoder with relative positions has no unpadded kernel", hint="use layout: padded")
    start = getattr(source.config, "decoder_start_token_id", 0) or 0
    pad = (getattr(source.config, "pad_token_id", 0) or 0) if source.encoder_decoder else 0
    return make_batch(
        rows,
        padded=padded(run),
        seed=run.seed,
        step=step,
        encoder_decoder=source.encoder_decoder,
        decoder_start=start,
        pad=pad,
        multiple=8 if source.encoder_decoder else 1,
    )


def trainable_count(model: TrainModel) -> tuple[int, int]:
    """Numbers that learn, and numbers in all, quantised ones counted as what they stand for."""
    from brimful.step.nf4 import NF4Linear

    packed = {id(m.weight): m.in_features * m.out_features for m in model.module.modules() if isinstance(m, NF4Linear)}
    trainable = sum(p.numel() for p in model.trainable().values())
    return trainable, sum(packed.get(id(p), p.numel()) for p in model.module.parameters())


def random_weights(model: TrainModel, seed: int = 0) -> None:
    """Values that train without overflowing, for measurements where the real ones do not matter."""
    device = next(model.module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        _fill_buffers(model)  # first: a family fills the weights beside its buffers too
        for name, p in model.module.named_parameters():
            if not p.is_floating_point():
                p.random_(0, 256, generator=generator)
            elif p.dim() < 2:
                p.fill_(1.0 if "norm" in name.lower() or "ln" in name else 0.0)
            else:
                p.normal_(0.0, 0.02, generator=generator)


def _fill_buffers(model: TrainModel) -> None:
    """Buffers are computed when a model is built, and so were lost on the meta device."""
    initialise = getattr(model.base, "_init_weights", None)
    for part in model.module.modules():
        if hasattr(part, "fill_description"):
            part.fill_description()
        elif initialise is not None and any(buffer is not None for buffer in part._buffers.values()):
            initialise(part)
    if model.source.custom is not None and any(True for _ in model.base.buffers()):
        there = dict(model.base.named_buffers())
        for name, buffer in model.source.custom(**model.source.options).named_buffers():
            if name in there:
                there[name].copy_(buffer)
