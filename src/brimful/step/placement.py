"""Which stored tensor goes where: the names of files, matched to a model as transformers and peft have built it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brimful.core.errors import ModelError
from brimful.step.nf4 import NF4Linear
from brimful.step.shards import Stored, same_values

ADAPTER_PARTS = frozenset(("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"))


@dataclass(frozen=True)
class Place:
    """A stored tensor and those of the model that take its numbers (each contiguous), or the layer that packs them."""

    stored: Stored
    targets: tuple[torch.Tensor, ...] = ()
    layer: NF4Linear | None = None


@dataclass(frozen=True)
class Placement:
    """Where everything goes, in the order of the files, and the names that the model has no use for."""

    places: tuple[Place, ...]
    unexpected: tuple[str, ...]


def place(stored: Mapping[str, Stored], base: nn.Module) -> Placement:
    """Find a place for every tensor and a tensor for every parameter; raises before anything is read if it cannot."""
    wanted = _wanted(base)
    names = _Names(base, wanted)
    places, unexpected = [], []
    filled: dict[int, int] = {}
    for key in sorted(stored):  # transformers' renamings rely on this order
        found = names.find(key)
        if found is None:
            unexpected.append(key)
            continue
        made = _make_place(stored[key], wanted[found.name], found)
        places.append(made)
        for target in wanted[found.name].tensors:
            filled[id(target)] = filled.get(id(target), 0) + stored[key].numbers
    short = [n for n, w in wanted.items() if w.needed and any(filled.get(id(t), 0) < w.numbers for t in w.tensors)]
    if short:
        more = f" and {len(short) - 3} more" if len(short) > 3 else ""
        raise ModelError(
            f"the files lack {', '.join(short[:3])}{more}",
            hint="the folder's config.json is another model's, or a file is missing",
        )
    places.sort(key=lambda p: (p.stored.file, p.stored.offset))
    return Placement(tuple(places), tuple(unexpected))


def untied_names(stored: Mapping[str, Stored], base: nn.Module) -> tuple[str, ...]:
    """Names that the model ties to an earlier one while the files hold other values for them: they must be untied."""
    wanted = _wanted(base)
    names = _Names(base, wanted)
    held = {found.name: stored[key] for key in sorted(stored) if (found := names.find(key)) and found.index is None}
    groups: dict[int, list[str]] = {}
    for name, want in wanted.items():
        for tensor in want.tensors:
            groups.setdefault(id(tensor), []).append(name)
    apart = []
    for group in groups.values():
        first, *rest = [name for name in group if name in held] or [""]
        apart += [name for name in rest if not same_values(held[first], held[name])]
    return tuple(apart)


@dataclass
class _Wanted:
    """The model's own tensors under one of the names that files use; several where peft keeps a trained copy."""

    tensors: list[torch.Tensor]
    shape: tuple[int, ...]
    needed: bool
    layer: NF4Linear | None = None

    @property
    def numbers(self) -> int:
        return torch.Size(self.shape).numel()


def _wanted(base: nn.Module) -> dict[str, _Wanted]:
    wanted: dict[str, _Wanted] = {}
    for path, part in base.named_modules(remove_duplicate=False):
        if ADAPTER_PARTS.intersection(path.split(".")):
            continue
        packed = isinstance(part, NF4Linear)
        own = [(name, p, True) for name, p in part._parameters.items()]
        if not packed:
            kept = [(n, b) for n, b in part._buffers.items() if n not in part._non_persistent_buffers_set]
            own += [(name, b, False) for name, b in kept]
        for name, tensor, needed in own:
            if tensor is None:
                continue
            full = _plain_name(f"{path}.{name}" if path else name)
            layer = part if packed and name == "weight" else None
            shape = (part.out_features, part.in_features) if layer is not None else tuple(tensor.shape)
            entry = wanted.setdefault(full, _Wanted([], shape, needed, layer))
            if not any(t is tensor for t in entry.tensors):
                entry.tensors.append(tensor)
    return {name: want for name, want in wanted.items() if not ADAPTER_PARTS.intersection(name.split("."))}


def _plain_name(name: str) -> str:
    """A parameter's name without what peft puts around a layer."""
    return re.sub(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)", "", name)


@dataclass(frozen=True)
class _Found:
    """The model's name for a key; an expert stored alone is the `index`-th of a fused tensor, one of `parts` there."""

    name: str
    index: int | None = None
    part: int = 0
    parts: int = 1


class _Names:
    """From a file's names to the model's: transformers' own renamings, and the base model's prefix present or not."""

    def __init__(self, base: nn.Module, wanted: Mapping[str, _Wanted]) -> None:
        self.wanted = wanted
        self.prefix = getattr(base, "base_model_prefix", "")
        self.renamings: list[Any] = []
        self.converters: list[Any] = []
        if hasattr(base, "base_model_prefix"):
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter

            for transform in get_model_conversion_mapping(base):
                (self.converters if isinstance(transform, WeightConverter) else self.renamings).append(transform)

    def find(self, key: str) -> _Found | None:
        """The place that a stored name means, or none."""
        name = key
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        for converter in self.converters:
            fused, pattern = converter.rename_source_key(name)
            if pattern is None:
                continue
            target = self._with_prefix(fused)
            if target is None:
                break
            return _expert(key, name, target, converter, pattern)
        plain = self._with_prefix(name)
        return None if plain is None else _Found(plain)

    def _with_prefix(self, name: str) -> str | None:
        shorter, longer = name.removeprefix(f"{self.prefix}."), f"{self.prefix}.{name}"
        return next((n for n in (name, shorter, longer) if n in self.wanted), None)


def _expert(key: str, name: str, target: str, converter: Any, pattern: str) -> _Found:
    steps = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    stacked, joined = [("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]
    number = re.search(pattern.replace("*.", r"(\d+)\."), name)
    if steps not in (stacked, joined) or number is None:
        raise ModelError(
            f"{key} is stored in a form that is not read ({', '.join(op for op, _ in steps)})",
            hint="load it with transformers and save it again with save_original_format=False",
        )
    return _Found(target, int(number[1]), converter.source_patterns.index(pattern), len(converter.source_patterns))


def _make_place(stored: Stored, want: _Wanted, found: _Found) -> Place:
    targets = want.tensors
    shape = want.shape
    if found.index is not None:
        if found.index >= shape[0]:
            raise ModelError(f"{stored.file}: {stored.name} is expert {found.index}, the model has {shape[0]}")
        targets = [t[found.index].chunk(found.parts)[found.part] for t in targets]
        shape = tuple(targets[0].shape)
    if stored.shape != shape:
        raise ModelError(
            f"{stored.file}: {stored.name} has shape {list(stored.shape)}, the model expects {list(shape)}",
            hint="the folder's config.json does not describe these weights",
        )
    floating = want.layer is not None or targets[0].is_floating_point()
    if floating != stored.dtype.is_floating_point:
        raise ModelError(
            f"{stored.file}: {stored.name} is stored as {stored.kind}, the model expects other numbers",
            hint="give the original weights: quantised ones are not read",
        )
    return Place(stored, tuple(targets), want.layer)
