"""The phases of a run, played on a step: by the trace on fake tensors, by the measurement on a GPU."""

from contextlib import AbstractContextManager
from typing import Protocol

from brimful.core.runfile import RunFile
from brimful.core.tape import Category, Phase
from brimful.step import state
from brimful.step.assemble import batch_of, full_rows, slicing
from brimful.step.batch import MicroBatch
from brimful.step.step import Section, TrainStep

MOST_SLICES = 2  # a third micro-batch of a step does what the second did


class Stage(Protocol):
    """Who watches the phases; also the step's observer."""

    def phase(self, phase: Phase, default: Category | None = None) -> AbstractContextManager[None]:
        """Called around each phase."""

    def section(self, section: Section) -> AbstractContextManager[None]:
        """Called around each section of a step."""

    def gradients_made(self, step: TrainStep) -> None:
        """Called after each backward."""

    def state_made(self, step: TrainStep) -> None:
        """Called after each update."""


def play(run: RunFile, step: TrainStep, stage: Stage, *, saving: bool = True) -> None:
    """Two steps, of which the first makes the optimizer's state, then an evaluation and the copies of a save."""
    with stage.phase(Phase.FIRST_STEP):
        _accumulate(run, step, 0, stage)
        _update(step, stage)
    with stage.phase(Phase.STEADY):
        _accumulate(run, step, 1, stage)
    with stage.phase(Phase.UPDATE):
        _update(step, stage)
    with stage.phase(Phase.EVALUATE):
        step.evaluate(_batch(run, step, 0, stage))
    if not saving:
        return
    with stage.phase(Phase.SAVE), stage.section(Section.HOST):
        for tensor in state.tensors(step):
            tensor.to("cpu")


def _accumulate(run: RunFile, step: TrainStep, number: int, stage: Stage) -> None:
    for _ in range(min(slicing(run).count, MOST_SLICES)):
        step.accumulate(_batch(run, step, number, stage), targets=1000)
        stage.gradients_made(step)


def _update(step: TrainStep, stage: Stage) -> None:
    step.update()
    stage.state_made(step)


def _batch(run: RunFile, step: TrainStep, number: int, stage: Stage) -> MicroBatch:
    source = step.model.source
    with stage.section(Section.HOST):
        batch = batch_of(run, source, full_rows(run, source, slicing(run).rows), number)
    with stage.section(Section.INPUTS):
        return batch.on(step.target)
