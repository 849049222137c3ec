"""Where a model comes from: a catalogue name, a local folder, a hub id, or a class of the user's own."""

import importlib
import json
import sys
import sysconfig
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brimful.catalog.models import find_model, model_names
from brimful.core.errors import ModelError, UnknownName
from brimful.core.nearest import nearest


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
        config = _read_folder(folder, trust_remote_code)
        return ModelSource(model, config=config, folder=folder, trust_remote_code=trust_remote_code)
    if folder.is_file():
        raise ModelError(f"{model} is a file", hint=f"give the folder that holds config.json, or run file: {folder}")
    if ":" in model:
        return ModelSource(model, custom=_import_class(model), options=options or {})
    entry = find_model(model)
    if entry is not None:
        return ModelSource(entry.name, config=_config_from(dict(entry.config)), untied=tuple(entry.untied))
    return ModelSource(model, config=_ask_hub(model, trust_remote_code), trust_remote_code=trust_remote_code)


def _config_from(values: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = values.pop("model_type")
    if kind not in CONFIG_MAPPING:
        likely = nearest(str(kind), CONFIG_MAPPING.keys(), 3)
        raise ModelError(
            f"transformers does not know the model type {kind!r}",
            hint=f"did you mean {', '.join(likely)}?" if likely else "a newer version of transformers may",
        )
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # each family checks its values in its own way
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(
            f"the {kind} configuration cannot be used: {' '.join(lines[:2])}", hint="correct it in config.json"
        ) from error


def _read_folder(folder: Path, trust_remote_code: bool, hub_id: str | None = None) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", hint="give a folder as save_pretrained writes it")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not JSON: {error}", hint="give a folder as save_pretrained writes it") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ModelError(
            f"{path} is not a model configuration: it has no model_type", hint="give a Hugging Face config.json"
        )
    if "auto_map" in values:
        return _with_remote_code(hub_id or str(folder), trust_remote_code)
    return _config_from(values)


def _with_remote_code(name: str, trusted: bool) -> Any:
    if not trusted:
        raise ModelError(f"{name} comes with its own Python code", hint="read it, then pass --trust-remote-code")
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, trust_remote_code=True)


_OFFLINE = "it is not in the catalogue, and the hub could not be reached"


def _ask_hub(model: str, trust_remote_code: bool) -> Any:
    if "/" not in model:
        raise UnknownName("model", model, model_names(), hint="or give a hub id, a folder, or module:Class")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        path = Path(hf_hub_download(model, "config.json", local_files_only=not _hub_answers()))
    except GatedRepoError as error:
        raise ModelError(f"{model} is gated", hint="accept its licence on the hub and set HF_TOKEN") from error
    except HFValidationError as error:
        raise UnknownName("model", model, model_names(), hint="it is no folder here and no hub id either") from error
    except LocalEntryNotFoundError as error:  # an EntryNotFoundError, although it means that nobody could be asked
        raise UnknownName("model", model, model_names(), hint=_OFFLINE) from error
    except RepositoryNotFoundError as error:
        raise UnknownName("model", model, model_names(), hint="the hub does not know it, or it is private") from error
    except EntryNotFoundError as error:
        raise ModelError(
            f"{model} on the hub has no config.json", hint="give a model in Hugging Face's format"
        ) from error
    except Exception as error:  # the client raises many kinds for an unreachable network
        raise UnknownName("model", model, model_names(), hint=f"{_OFFLINE} ({type(error).__name__})") from error
    return _read_folder(path.parent, trust_remote_code, hub_id=model)


def _hub_answers() -> bool:
    """One quick question: the hub's client would try for half a minute before it says that nobody is there."""
    import httpx
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except httpx.HTTPError:
        return False
    return True


def _import_class(model: str) -> type:
    module_name, _, class_name = model.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ModelError(
            f"cannot import {module_name!r}{users_line(error)}: {error}", hint="run from the folder that holds it"
        ) from error
    except Exception as error:  # the user's code may raise anything
        what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise ModelError(f"{module_name!r} cannot be imported{users_line(error)}: {what}") from error
    finally:
        sys.path.pop(0)
    try:
        return getattr(module, class_name)
    except AttributeError:
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        raise UnknownName("class", class_name, classes, hint=f"{module_name} defines {', '.join(classes)}") from None


def users_line(error: BaseException) -> str:
    """Where in the user's own files an error arose, as ` at file:line`; empty where none of them was involved."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


_NOT_THE_USERS = (
    "<",
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
