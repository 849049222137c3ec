"""Gives a model its weights: from a folder's files, in host RAM that does not grow with the model, or random ones.

Every tensor passes through a buffer of at most `PIECE` numbers: read, converted on the host where the types differ, and
copied to where it belongs. So the GPU holds nothing but the weights themselves, and a GPU run's host needs the same few
MiB for every model. QLoRA's layers are packed on the host as their numbers arrive.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from brimful.step.assemble import random_weights
from brimful.step.model import TrainModel
from brimful.step.nf4 import NF4Linear, fill_from, working_set
from brimful.step.placement import Place, place
from brimful.step.shards import (
    PIECE,
    STORED_TYPES,
    Reader,
    Stored,
    holds_weights,
    read_buffer,
    read_folder,
    refuse_other_formats,
)


@dataclass(frozen=True)
class LoadReport:
    """What a load did: tensors read and their bytes, and the names in the files that the model has no use for."""

    tensors: int
    bytes: int
    unexpected: tuple[str, ...]


def weights_for(model: TrainModel, *, seed: int = 0, scratch: bool = False) -> Callable[[TrainModel], object]:
    """What `assemble` fills the model with: its folder's weights where there are any, otherwise random ones."""
    folder = model.source.folder
    if folder is None or scratch:
        return partial(random_weights, seed=seed)
    if holds_weights(folder):
        return partial(load_weights, folder=folder, seed=seed)
    refuse_other_formats(folder)
    return partial(random_weights, seed=seed)


def load_weights(model: TrainModel, folder: Path, seed: int = 0) -> LoadReport:
    """Fill a materialised model from a folder. Its adapters, which no base model's file holds, begin as peft's do."""
    stored = read_folder(folder)
    placement = place(stored, model.base)
    staging = _Staging()
    with torch.no_grad(), Reader(stored) as reader:
        for entry in placement.places:
            if entry.layer is not None:
                fill_from(entry.layer, (piece for _, piece in reader.pieces(entry.stored)))
            else:
                _copy(entry, reader, staging)
        _fill_buffers(model, {id(t) for entry in placement.places for t in entry.targets})
        _fill_adapters(model, seed)
    total = sum(p.stored.numbers * p.stored.dtype.itemsize for p in placement.places)
    return LoadReport(len(placement.places), total, placement.unexpected)


def host_buffers(stored: Mapping[str, Stored], model: TrainModel, device: str) -> int:
    """Host bytes that loading takes besides the process and the model: for reading, converting and packing."""
    kinds = {t.dtype for t in stored.values() if t.kind in STORED_TYPES and t.dtype.is_floating_point}
    staged = [
        min(PIECE, p.numel()) * p.element_size()
        for p in model.base.parameters()
        if device != "cpu" and p.is_floating_point() and kinds - {p.dtype}
    ]
    packed = [m.in_features * m.out_features for m in model.module.modules() if isinstance(m, NF4Linear)]
    packing = max((working_set(numbers, PIECE) for numbers in packed), default=0)
    return read_buffer(stored) + max(staged, default=0) + packing


class _Staging:
    """Where numbers change their type on the host, so that the device makes no temporary for it."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def convert(self, piece: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        """The piece in another type; valid until the next call."""
        wanted = piece.numel() * kind.itemsize
        if self.buffer.numel() < wanted:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # let go of the smaller one first
            self.buffer = torch.empty(wanted, dtype=torch.uint8)
        return self.buffer[:wanted].view(kind).copy_(piece)


def _copy(entry: Place, reader: Reader, staging: _Staging) -> None:
    targets = [target.detach().view(-1) for target in entry.targets]
    for start, piece in reader.pieces(entry.stored):
        for target in targets:
            part = target[start : start + piece.numel()]
            # a CPU's copy converts number by number; for another device PyTorch would make a whole copy first
            direct = part.dtype == piece.dtype or part.device.type == "cpu"
            part.copy_(piece if direct else staging.convert(piece, part.dtype))


def _fill_buffers(model: TrainModel, loaded: set[int]) -> None:
    """Tables that no file holds, such as rotary frequencies, as transformers makes them for a model that it loads."""
    initialise = getattr(model.base, "_init_weights", None)
    if initialise is None:
        return
    for part in _parts_with_buffers(model.base):
        done = [*part._parameters.values(), *(b for b in part._buffers.values() if id(b) in loaded)]
        marked = [tensor for tensor in done if tensor is not None]
        for tensor in marked:
            tensor._is_hf_initialized = True
        initialise(part)
        for tensor in marked:
            del tensor._is_hf_initialized


def _parts_with_buffers(base: nn.Module) -> Iterator[nn.Module]:
    for part in base.modules():
        if not isinstance(part, NF4Linear) and any(buffer is not None for buffer in part._buffers.values()):
            yield part


def _fill_adapters(model: TrainModel, seed: int) -> None:
    """A new adapter changes nothing: A is random (drawn on the host, the same for every device), B is zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.module.named_parameters():
        parts = name.split(".")
        if "lora_A" in parts:
            bound = 1 / math.sqrt(p[0].numel())  # nn.Linear's own start
            p.copy_(torch.empty(p.shape).uniform_(-bound, bound, generator=generator).to(p.dtype))
        elif "lora_embedding_B" in parts:
            p.copy_(torch.empty(p.shape).normal_(generator=generator).to(p.dtype))
        elif "lora_B" in parts or "lora_embedding_A" in parts:
            p.zero_()
    for part in model.module.modules():
        magnitudes = getattr(part, "lora_magnitude_vector", None)
        for magnitude in magnitudes.values() if magnitudes else ():
            # DoRA begins with the length of each of the weight's rows (columns where the layer stores them so)
            weight = part.get_base_layer().weight
            rows = not (magnitude.fan_in_fan_out or isinstance(part.get_base_layer(), nn.Embedding))
            magnitude.weight.copy_(torch.linalg.vector_norm(weight, dim=1 if rows else 0))
