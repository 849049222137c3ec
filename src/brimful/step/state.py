"""A step's state: what has to be kept for the next step to be the one that an uninterrupted run would have taken.

Tensors have names, so that a checkpoint can hold them in files that others read:

    weights/<parameter>                 what learns
    masters/<parameter>                 the optimizer's wider copies, where there are any
    optimizer/<parameter>/<key>         the optimizer's state
    loss_scale/scale, loss_scale/steady fp16 only

Row-keyed dropout has no state; dropout inside an attention kernel draws from the device's generator, which is not kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from brimful.core.errors import UsageError
from brimful.step.step import TrainStep

# How an update is computed is the plan's choice and may differ after a restore; what is computed may not.
_IMPLEMENTATION = ("params", "foreach", "fused", "capturable", "differentiable")
_CODE_BOOKS = ("qmap1", "qmap2")


@dataclass(frozen=True)
class State:
    """Named tensors on the host, and the rest as plain data that JSON can hold."""

    tensors: dict[str, Tensor]
    data: dict[str, Any] = field(default_factory=dict)


def save(step: TrainStep) -> State:
    """A copy on the host of everything that learning has changed. Between two steps: gradients are not kept."""
    tensors = {name: _copy(tensor) for name, tensor in _own_tensors(step)}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in _updated(step).items():
        for key, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = _copy(value)
            else:
                scalars.setdefault(name, {})[key] = value
    return State(tensors, {"optimizer": scalars, "groups": [_settings(group) for group in step.optimizer.param_groups]})


def tensors(step: TrainStep) -> Iterator[Tensor]:
    """Everything that `save` copies, one after the other, where it is."""
    for _, tensor in _own_tensors(step):
        yield tensor
    for values in step.optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


def restore(step: TrainStep, state: State) -> None:
    """Make `step` go on where the saved one was; it must have been made from the same run file."""
    given = {name for name in state.tensors if not name.startswith("optimizer/")}
    wanted = {name for name, _ in _own_tensors(step)}
    if wrong := sorted(given ^ wanted):
        which = "lacks" if wrong[0] in wanted else "has"
        raise UsageError(
            f"the saved state {which} {wrong[0]} (and {len(wrong) - 1} more differ)",
            hint="restore with the run file that it was saved with",
        )
    with torch.no_grad():
        for name, tensor in _own_tensors(step):
            saved = state.tensors[name]
            if saved.shape != tensor.shape:
                raise UsageError(
                    f"{name} was saved as {tuple(saved.shape)} and is {tuple(tensor.shape)} here",
                    hint="restore with the run file that it was saved with",
                )
            tensor.copy_(saved)
    _restore_optimizer(step, state)
    forget_gradients(step)


def _restore_optimizer(step: TrainStep, state: State) -> None:
    numbers = {name: number for number, name in enumerate(_updated(step))}
    entries: dict[int, dict[str, Any]] = {
        numbers[name]: dict(values) for name, values in state.data["optimizer"].items()
    }
    for full, tensor in state.tensors.items():
        if full.startswith("optimizer/"):
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            entries.setdefault(numbers[name], {})[key] = tensor.clone()  # PyTorch keeps what it need not move
    here = step.optimizer.state_dict()["param_groups"]
    groups = [there | {k: v for k, v in _settings(saved).items() if k in there}
              for there, saved in zip(here, state.data["groups"], strict=True)]  # fmt: skip
    step.optimizer.load_state_dict({"state": entries, "param_groups": groups})


def snapshot(step: TrainStep) -> State:
    """What a rehearsal must not change: the weights and the loss scale, on the host."""
    return State({name: _copy(tensor) for name, tensor in _own_tensors(step)})


@torch.no_grad()
def rollback(step: TrainStep, before: State) -> None:
    """Undo a rehearsal: weights as they were, optimizer state in place but zeroed, at step 0, no gradients."""
    for name, tensor in _own_tensors(step):
        tensor.copy_(before.tensors[name])
    for values in step.optimizer.state.values():
        for key, value in values.items():
            if isinstance(value, Tensor):
                if key not in _CODE_BOOKS:  # bitsandbytes' tables of numbers, which are no state
                    value.zero_()
            elif isinstance(value, int | float):
                values[key] = type(value)(0)
    forget_gradients(step)


def forget_gradients(step: TrainStep) -> None:
    """Let go of what an unfinished step has accumulated."""
    for parameter in step.parameters.values():
        parameter.grad = None
    step.optimizer.zero_grad(set_to_none=True)
    if step.wide is not None:
        step.wide.sums.clear()


def _own_tensors(step: TrainStep) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in step.parameters.items():
        yield f"weights/{name}", parameter
        if step.masters is not None:
            yield f"masters/{name}", step.masters[parameter]
    if step.scale is not None:
        yield "loss_scale/scale", step.scale.scale
        yield "loss_scale/steady", step.scale.steady


def _updated(step: TrainStep) -> dict[str, nn.Parameter]:
    """What the optimizer updates, by the name of the weight, in the optimizer's own order."""
    masters = step.masters
    names = {(masters[p] if masters is not None else p): name for name, p in step.parameters.items()}
    return {names[p]: p for group in step.optimizer.param_groups for p in group["params"]}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
