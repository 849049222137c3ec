"""Models that can be forecast without the hub: their published configuration and exact parameter count."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from brimful.core.errors import UnknownName


@dataclass(frozen=True)
class ModelEntry:
    """One model: its names, its size and the `config.json` that builds it."""

    name: str
    hub_id: str | None  # None: the project's own stand-in
    parameters: int  # unique tensors, with every head that the checkpoint holds on its own
    config: Mapping[str, Any] = field(repr=False)
    source: str = field(repr=False)
    aliases: tuple[str, ...] = ()
    # hub ids that share the weights' shapes; each with the few configuration values in which it differs
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    # parameters that the checkpoint holds on their own though transformers ties them when it builds from a config:
    # whoever builds this model for its published weights must untie them
    untied: tuple[str, ...] = ()

    @property
    def model_type(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.config["model_type"])

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model reads a source and writes a target (T5)."""
        return bool(self.config.get("is_encoder_decoder", False))

    def names(self) -> tuple[str, ...]:
        """Everything that finds this entry, its own name first; a hub id also without its organisation."""
        hub_ids = [self.hub_id, *self.variants] if self.hub_id else []
        spelled = [self.name, *self.aliases, *hub_ids]
        short = [name.rsplit("/", 1)[1] for name in spelled if name and "/" in name]
        unique = {name.casefold(): name for name in reversed([*spelled, *short]) if name}
        return tuple(reversed(unique.values()))


def model_names() -> tuple[str, ...]:
    """The catalogue's own names, sorted. Lists a folder and reads nothing."""
    return tuple(sorted(_files()))


def find_model(name: str) -> ModelEntry | None:
    """The entry called `name` (catalogue name, alias or hub id; case does not count), or None."""
    wanted = name.strip().casefold()
    if wanted in _files():
        return _read(wanted)
    found = _index().get(wanted)
    if found is None:
        return None
    entry_name, variant = found
    entry = _read(entry_name)
    return _as_variant(entry, variant) if variant else entry


def get_model(name: str) -> ModelEntry:
    """Like `find_model`, but refuses an unknown name and offers the nearest known ones."""
    entry = find_model(name)
    if entry is None:
        hub_ids = (entry.hub_id for entry in map(_read, model_names()) if entry.hub_id)
        raise UnknownName("model", name, (*model_names(), *hub_ids))
    return entry


@cache
def _files() -> dict[str, Traversable]:
    folder = files("brimful.catalog").joinpath("models")
    return {file.name.removesuffix(".json"): file for file in folder.iterdir() if file.name.endswith(".json")}


@cache
def _read(name: str) -> ModelEntry:
    data = json.loads(_files()[name].read_text(encoding="utf-8"))
    for listed in ("aliases", "untied"):
        data[listed] = tuple(data.get(listed, ()))
    return ModelEntry(**data)


@cache
def _index() -> dict[str, tuple[str, str | None]]:
    """Every spelling → the entry's name, and which variant of it is meant."""
    index: dict[str, tuple[str, str | None]] = {}
    for entry in map(_read, model_names()):
        variants = {spelling: hub_id for hub_id in entry.variants for spelling in (hub_id, hub_id.rsplit("/", 1)[1])}
        for spelling in entry.names():
            index.setdefault(spelling.casefold(), (entry.name, variants.get(spelling)))
    return index


def _as_variant(entry: ModelEntry, hub_id: str) -> ModelEntry:
    return ModelEntry(
        name=entry.name,
        hub_id=hub_id,
        parameters=entry.parameters,
        config={**entry.config, **entry.variants[hub_id]},
        source=f"{entry.source}; {hub_id} differs in {', '.join(entry.variants[hub_id])}",
        untied=entry.untied,
    )
