"""Where a model comes from: a catalogue name, a local folder, a hub id, or a class of the user's own."""

import importlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brimful.catalog.models import find_model, model_names
from brimful.core.errors import ModelError, UnknownName


@dataclass(frozen=True)
class ModelSource:
    """What is known of a model before it is built. Exactly one of `config` and `custom` is set."""

    name: str
    config: Any = None
    custom: type | None = None
    options: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    untied: tuple[str, ...] = ()
    trust_remote_code: bool = False

    @property
    def encoder_decoder(self) -> bool:
        """Whether the model reads one sequence and writes another."""
        return bool(getattr(self.config, "is_encoder_decoder", False))

    @property
    def max_positions(self) -> int | None:
        """The longest row that the model has positions for; none for relative positions."""
        if self.custom is not None or self.encoder_decoder:
            return None
        return getattr(self.config, "max_position_embeddings", None) or getattr(self.config, "n_positions", None)


def find_source(model: str, *, options: dict[str, Any] | None = None, trust_remote_code: bool = False) -> ModelSource:
    """Resolve the run file's `model:`; raises an error that says what to do when there is no such model."""
    folder = Path(model)
    if folder.is_dir():
        return ModelSource(model, config=_read_folder(folder, trust_remote_code), folder=folder)
    if ":" in model:
        return ModelSource(model, custom=_import_class(model), options=options or {})
    entry = find_model(model)
    if entry is not None:
        return ModelSource(entry.name, config=_config_from(dict(entry.config)), untied=tuple(entry.untied))
    return ModelSource(model, config=_ask_hub(model, trust_remote_code), trust_remote_code=trust_remote_code)


def _config_from(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = values.pop("model_type", None)
    if kind is None:
        raise ModelError("the configuration has no model_type", hint="give a Hugging Face config.json")
    try:
        return AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise ModelError(
            f"transformers does not know the model type {kind!r}", hint=str(error).split("\n")[0]
        ) from error


def _read_folder(folder: Path, trust_remote_code: bool) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", hint="give a folder as save_pretrained writes it")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ModelError(f"{path} is not a model configuration: it has no model_type")
    if "auto_map" in values:
        return _with_remote_code(str(folder), trust_remote_code)
    return _config_from(values)


def _with_remote_code(name: str, trusted: bool) -> Any:
    if not trusted:
        raise ModelError(f"{name} comes with its own Python code", hint="read it, then pass --trust-remote-code")
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, trust_remote_code=True)


def _ask_hub(model: str, trust_remote_code: bool) -> Any:
    if "/" not in model:
        raise UnknownName("model", model, model_names(), hint="or give a hub id, a folder, or module:Class")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    try:
        path = Path(hf_hub_download(model, "config.json"))
    except GatedRepoError as error:
        raise ModelError(f"{model} is gated", hint="accept its licence on the hub and set HF_TOKEN") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise UnknownName("model", model, model_names()) from error
    except Exception as error:  # the client raises many kinds for an unreachable network
        offline = f"it is not in the catalogue, and the hub could not be reached ({type(error).__name__})"
        raise UnknownName("model", model, model_names(), hint=offline) from error
    return _read_folder(path.parent, trust_remote_code)


def _import_class(model: str) -> type:
    module_name, _, class_name = model.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelError(f"cannot import {module_name!r}: {error}", hint="run from the folder that holds it") from error
    finally:
        sys.path.pop(0)
    try:
        return getattr(module, class_name)
    except AttributeError:
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        raise UnknownName("class", class_name, classes, hint=f"{module_name} defines {', '.join(classes)}") from None
