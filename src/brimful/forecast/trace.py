"""Traces a run: load, first step, steady state, evaluation and saving, with fake tensors on the CPU."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from brimful.core.errors import BrimfulError, ModelError
from brimful.core.runfile import RunFile
from brimful.core.tape import Category, Phase, Tape
from brimful.forecast.autocast import like_cuda
from brimful.forecast.host import Loading, loading, this_process
from brimful.forecast.persona import Persona
from brimful.forecast.phases import play
from brimful.forecast.recorder import Recorder
from brimful.forecast.reductions import Multiprocessors
from brimful.step.assemble import assemble, shape_model, trainable_count
from brimful.step.model import TrainModel
from brimful.step.source import users_line
from brimful.step.target import Target

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@dataclass(frozen=True)
class Trace:
    """The tape of a run and what was learned of the model on the way."""

    tape: Tape
    trainable_parameters: int
    total_parameters: int
    loading: Loading
    unquantised: int


def trace(run: RunFile, capability: tuple[int, int], multiprocessors: Multiprocessors) -> Trace:
    """Run the step as the target would, and record what it allocates."""
    target = Target("cuda", capability, traced=True)
    recorder = Recorder(Persona(capability, multiprocessors))
    model = shape_model(run)
    host = loading(model, target, this_process())
    with _no_garbage(), like_cuda(run.precision.autocast), FakeTensorMode(allow_non_fake_inputs=True), recorder:
        with recorder.phase(Phase.LOAD, Category.WEIGHTS):
            step = assemble(run, model, target, recorder, fill=lambda model: _own(recorder, model))
        counts = trainable_count(step.model)
        handles = recorder.name_modules(step.model.module)
        try:
            play(run, step, recorder)
        except _DATA_DEPENDENT as error:
            operation = f" ({error.func})" if hasattr(error, "func") else ""
            raise ModelError(
                f"{run.model} looks at its data{users_line(error)}{operation}, which no forecast can know",
                hint="use operations whose output shapes and branches depend on input shapes alone",
            ) from error
        except BrimfulError:
            raise
        except Exception as error:
            line = users_line(error)
            if not line and model.source.custom is None:
                raise  # not the user's code but ours: a traceback is what helps
            what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise ModelError(
                f"{run.model} fails{line}: {what}",
                hint="it is called as forward(input_ids, position_ids, row_starts), with tensors that have no values",
            ) from error
        finally:
            for handle in handles:
                handle.remove()
    stacked = [p.numel() for p in step.model.module.parameters() if p.dim() == 3 and p.is_floating_point()]
    return Trace(recorder.tape(), *counts, host, sum(stacked) if run.method == "qlora" else 0)


def _own(recorder: Recorder, model: TrainModel) -> None:
    """Name the weights, and tell adapters from frozen ones."""
    trainable = {id(parameter) for parameter in model.trainable().values()}
    named = dict(model.module.named_parameters())
    for name, parameter in named.items():
        adapter = len(trainable) < len(named) and id(parameter) in trainable
        recorder.belongs(parameter, Category.ADAPTERS if adapter else Category.WEIGHTS, name)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Reference counts decide when memory is let go, as in a real run; the collector would only blur it."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
