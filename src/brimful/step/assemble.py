"""From a run file to a step on a target: the one place where a run's words become objects."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from brimful.core.errors import ModelError, UsageError
from brimful.core.runfile import RunFile
from brimful.step import dropout
from brimful.step.adapters import adapt
from brimful.step.batch import MicroBatch, Row, make_batch
from brimful.step.model import TrainModel, build, materialise
from brimful.step.optimizer import build_optimizer
from brimful.step.recompute import Recomputation, which_layers
from brimful.step.source import ModelSource, find_source
from brimful.step.step import LossChoice, Observer, TrainStep
from brimful.step.target import Target


@dataclass(frozen=True)
class Slicing:
    """How a step's rows are cut: rows in one micro-batch, and how many micro-batches make a step."""

    rows: int
    count: int


def slicing(run: RunFile) -> Slicing:
    """The micro-batch that the run file pins, or the whole batch at once."""
    sequences = run.batch.sequences or max(1, run.batch.tokens // run.data.max_length)
    rows = run.pin.micro_batch or sequences
    return Slicing(rows, -(-sequences // rows))


def shape_model(run: RunFile) -> TrainModel:
    """The model with its adapters, on the meta device."""
    source = find_source(run.model, trust_remote_code=run.trust_remote_code)
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
    materialise(model, target.tensor_device)
    if fill is not None:
        fill(model)
    model.module.train()
    dropout.install(model.module)
    kernel_dropout = not target.traced and attention_dropout(model.source) > 0
    layers = which_layers(run.pin.recompute, len(model.layers))
    return TrainStep(
        model,
        partial(build_optimizer, spec=run.optimizer, groups=run.groups, impl=run.pin.optimizer_impl, target=target),
        precision=run.precision,
        target=target,
        recompute=Recomputation(model.layers, layers, kernel_dropout=kernel_dropout),
        loss=LossChoice(run.pin.loss or "plain", run.pin.loss_chunk),
        clip=run.optimizer.clip,
        attention=run.pin.attention,
        observer=observer,
    )


def attention_dropout(source: ModelSource) -> float:
    """Dropout on attention probabilities, which a fused kernel draws from the device's generator."""
    names = ("attention_dropout", "attn_pdrop", "dropout_rate")
    return max((getattr(source.config, name, 0.0) or 0.0 for name in names), default=0.0)


def padded(run: RunFile) -> bool:
    """Whether the run's layout is the padded one; the default, because every model can do it."""
    return run.pin.layout != "unpadded"


def full_rows(run: RunFile, source: ModelSource, count: int, first: int = 0) -> list[Row]:
    """Rows as long as the run allows: the worst that can occur."""
    length = run.data.max_length
    target_length = (run.data.max_target_length or length) if source.encoder_decoder else length
    vocabulary = 1000
    return [
        Row(first + i, [t % vocabulary for t in range(length)], [t % vocabulary for t in range(target_length)])
        for i in range(count)
    ]


def batch_of(run: RunFile, source: ModelSource, rows: list[Row], step: int = 0) -> MicroBatch:
    """Rows as tensors on the host, in the layout of the run."""
    if source.encoder_decoder and not padded(run):
        raise UsageError("an encoder-decoder with relative positions has no unpadded kernel", hint="use layout: padded")
    start = getattr(source.config, "decoder_start_token_id", 0) or 0
    return make_batch(
        rows,
        padded=padded(run),
        seed=run.seed,
        step=step,
        encoder_decoder=source.encoder_decoder,
        decoder_start=start,
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
        for name, p in model.module.named_parameters():
            if not p.is_floating_point():
                p.random_(0, 256, generator=generator)
            elif p.dim() < 2:
                p.fill_(1.0 if "norm" in name.lower() or "ln" in name else 0.0)
            else:
                p.normal_(0.0, 0.02, generator=generator)
        for part in model.module.modules():
            _fill_buffers(part, model)


def _fill_buffers(part: torch.nn.Module, model: TrainModel) -> None:
    initialise = getattr(model.base, "_init_weights", None)
    if "RotaryEmbedding" in type(part).__name__ and initialise is not None:
        initialise(part)
    elif hasattr(part, "fill_description"):
        part.fill_description()
