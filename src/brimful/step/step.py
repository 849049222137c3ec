"""The step: forward and backward of every micro-batch, then one update.

    for each micro-batch:
        hidden = model(rows)                    layers in `recompute` keep nothing
        total  = loss(hidden, head, labels)     a sum over target tokens, never a mean
        (total / targets of the whole step).backward()
    clip, update, forget the gradients

The division by the step's own count of targets is the only normalisation, so slicing cannot change the gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import nn

from brimful.core.errors import UsageError
from brimful.core.precision import Precision
from brimful.step import context
from brimful.step.batch import MicroBatch
from brimful.step.dropout import RowKeys
from brimful.step.gradients import LossScale, WideGradients
from brimful.step.loss import default_chunk, linear_cross_entropy, plain
from brimful.step.model import TrainModel
from brimful.step.recompute import Recomputation
from brimful.step.target import Target, dtype


class Section(StrEnum):
    """The parts of a step, told to an observer as they begin."""

    HOST = "host"
    INPUTS = "inputs"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"


class Observer:
    """Learns which section of a step is under way. This one does nothing with it."""

    @contextmanager
    def section(self, section: Section) -> Iterator[None]:
        """Called around each section."""
        yield

    def loss_made(self, hidden: torch.Tensor, total: torch.Tensor) -> None:
        """Called between loss and backward."""

    def decide(self, flag: torch.Tensor) -> bool:
        """Whether a tensor on the device is true: the one place where a step waits for the device."""
        return bool(flag)


@dataclass(frozen=True)
class LossChoice:
    """How the loss is computed: plain logits, or in chunks by torch's operations or Liger's kernel."""

    name: str
    chunk: int | None = None

    def check(self, model: TrainModel) -> None:
        """Refuse a loss that multiplies by the head's weight itself, where the head is more than that weight."""
        if self.name == "plain" or type(model.head) is nn.Linear:
            return
        if model.head is None:
            raise UsageError(
                f"{model.source.name} returns logits, which a {self.name} loss never makes",
                hint="use loss: plain, or return hidden states and give the model an attribute `head`",
            )
        raise UsageError(
            f"a {self.name} loss would bypass what {type(model.head).__name__} adds to the head of {model.source.name}",
            hint="use loss: plain, or leave the head out of lora.targets",
        )


class TrainStep:
    """One optimizer update, in slices. What may change between two micro-batches is `recompute` and `loss`."""

    def __init__(
        self,
        model: TrainModel,
        optimizer_of: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer],
        *,
        precision: Precision,
        target: Target,
        recompute: Recomputation,
        loss: LossChoice,
        clip: float = 0.0,
        attention: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self.precision = precision
        self.target = target
        self.recompute = recompute
        self.loss = loss
        self.clip = clip
        self.attention = attention
        self.observer = observer or Observer()
        self.parameters = model.trainable()
        learning = list(self.parameters.values())
        self.masters = self._masters(learning)
        wide = dtype(precision.gradients)
        narrow = [p for p in learning if _bits(p.dtype) < _bits(wide)]
        self.wide = WideGradients(narrow, wide) if narrow else None
        self.scale = LossScale(target.tensor_device) if precision.loss_scaling else None
        updated = {n: self.masters[p] if self.masters else p for n, p in self.parameters.items()}
        self.optimizer = optimizer_of(updated)

    def _masters(self, learning: list[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter] | None:
        """Wide copies that the optimizer updates, where its precision is wider than the weights'."""
        wide = dtype(self.precision.optimizer)
        if all(_bits(p.dtype) >= _bits(wide) for p in learning):
            return None
        return {p: nn.Parameter(p.detach().to(wide)) for p in learning}

    def _autocast(self) -> AbstractContextManager[object]:
        if not self.precision.autocast:
            return nullcontext()
        return torch.autocast(self.target.tensor_device.type, dtype(self.precision.compute))

    def run(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """All slices of one step and the update; returns the sum of the token losses, on the device."""
        targets = max(1, sum(batch.target_count for batch in batches))  # a step without targets changes no weight
        losses = [self.accumulate(batch, targets) for batch in batches]
        self.update()
        return torch.stack(losses).sum()

    def accumulate(self, batch: MicroBatch, targets: int) -> torch.Tensor:
        """Forward and backward of one slice of a step that has `targets` target tokens in all."""
        with self._passing(batch):
            with self._autocast():
                total = self._loss_of(batch)
            share = total / targets
            if self.scale is not None:
                share = share * self.scale.scale
            with self.observer.section(Section.BACKWARD):
                share.backward()
        return total.detach()

    @contextmanager
    def _passing(self, batch: MicroBatch) -> Iterator[None]:
        compute = dtype(self.precision.compute) if self.precision.autocast else None
        now = context.Now(batch, self.target, self.attention, compute)
        with context.passing(now), RowKeys(batch.keys, decoder=batch.decoder_keys):
            yield

    def _loss_of(self, batch: MicroBatch) -> torch.Tensor:
        with self.observer.section(Section.FORWARD):
            hidden = self.model.hidden(batch)
        with self.observer.section(Section.LOSS):
            total = self._sum_of_losses(hidden, batch.labels)
        self.observer.loss_made(hidden, total)
        return total

    def _sum_of_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.loss.check(self.model)
        head, model = self.model.head, self.model
        if self.loss.name == "plain" or head is None:
            make_logits = _already_logits if head is None else head
            return plain(hidden, make_logits, labels, softcap=model.softcap, scale=model.scale)
        if self.precision.autocast:
            hidden = hidden.to(dtype(self.precision.compute))
        chunk = self.loss.chunk or default_chunk(hidden.shape[0], hidden.shape[1], head.weight.shape[0])
        kernel = "liger" if self.loss.name == "fused" else "torch"
        return linear_cross_entropy(
            hidden, head.weight, head.bias, labels, chunk=chunk, kernel=kernel, softcap=model.softcap, scale=model.scale
        )

    def update(self) -> None:
        """Clip, let the optimizer update once, and forget the gradients."""
        if self.wide is not None:
            self.wide.hand_over(self.masters)
        if self.masters is not None:
            for parameter, master in self.masters.items():
                if parameter.grad is not None:
                    master.grad = parameter.grad.to(master.dtype)
                    parameter.grad = None
        updated = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        overflow = None
        with self.observer.section(Section.CLIP):
            if self.scale is not None:
                overflow = self.scale.unscale([p.grad for p in updated])
            if self.clip:
                torch.nn.utils.clip_grad_norm_(updated, self.clip, foreach=True)
        if overflow is None or not self.observer.decide(overflow):
            with self.observer.section(Section.OPTIMIZER):
                self.optimizer.step()
        if overflow is not None:
            self.scale.update(overflow)
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters is not None:
            self._copy_back()

    @torch.no_grad()
    def _copy_back(self) -> None:
        for parameter, master in self.masters.items():
            parameter.copy_(master)

    @torch.no_grad()
    def evaluate(self, batch: MicroBatch) -> torch.Tensor:
        """The sum of the token losses of a batch, with dropout off and nothing kept for backward."""
        self.model.module.eval()
        try:
            with self._passing(batch), self._autocast():
                return self._loss_of(batch)
        finally:
            self.model.module.train()


def _already_logits(hidden: torch.Tensor) -> torch.Tensor:
    """The head of a custom model that returns logits itself."""
    return hidden


def _bits(kind: torch.dtype) -> int:
    return torch.finfo(kind).bits
