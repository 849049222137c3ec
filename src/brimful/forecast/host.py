"""Host RAM while a model is loaded: the memory that runs out before the GPU's when a loader holds a model twice."""

from dataclasses import dataclass
from pathlib import Path

import psutil

from brimful.step.model import TrainModel
from brimful.step.nf4 import NF4Linear
from brimful.step.shards import Stored, holds_weights, read_folder
from brimful.step.target import Target
from brimful.step.weights import host_buffers

# What a CUDA build of torch, its libraries and the driver's context add to a process. Not yet measured: a placeholder.
CUDA_PROCESS = 600 << 20


@dataclass(frozen=True)
class Loading:
    """The peak of resident memory while loading, by what takes it. All sizes are bytes."""

    process: int
    buffers: int
    model: int
    driver: int

    @property
    def peak(self) -> int:
        """All of it: the parts are alive at the same time."""
        return self.process + self.buffers + self.model + self.driver


def loading(model: TrainModel, target: Target, process: int) -> Loading:
    """The host RAM that loading this model onto the target takes, from shapes and the files' headers alone.

    Counted: the process as it is before (interpreter, imported packages, the model without its tensors); the loader's
    buffers, which are those of one piece of a tensor for reading and, before a copy to a GPU, for converting, and for
    QLoRA the work on one piece and the scales of the largest layer; the whole model where the target is the CPU; what
    CUDA adds where it is a GPU. Not counted: the page cache, which the kernel gives back when asked. A model without
    files is taken to be published in bf16.
    """
    folder = model.source.folder
    stored = read_folder(folder) if folder is not None and holds_weights(folder) else _as_published(model)
    tensors = {id(t): t for t in (*model.module.parameters(), *model.module.buffers())}
    return Loading(
        process,
        host_buffers(stored, model, target.kind),
        0 if target.on_cuda else sum(t.numel() * t.element_size() for t in tensors.values()),
        CUDA_PROCESS if target.on_cuda else 0,
    )


def _as_published(model: TrainModel) -> dict[str, Stored]:
    """Stand-ins for the files of a model that is known by its configuration alone."""
    packed = {id(m.weight): m.in_features * m.out_features for m in model.module.modules() if isinstance(m, NF4Linear)}
    sizes = {name: packed.get(id(p), p.numel()) for name, p in model.base.named_parameters()}
    return {name: Stored(name, Path(), "BF16", (numbers,), 0) for name, numbers in sizes.items()}


_lowest: int | None = None


def this_process() -> int:
    """Resident bytes of this process: the least that was seen, because earlier forecasts leave memory behind.

    To be asked once the model's structure stands: the process that loads it has imported the same packages by then.
    """
    global _lowest
    now = psutil.Process().memory_info().rss
    _lowest = now if _lowest is None else min(_lowest, now)
    return _lowest
