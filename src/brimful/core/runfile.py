"""The run file: what the user wants, as frozen data. Flags mirror its keys and win over it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from brimful.core.errors import RunFileError
from brimful.core.keys import describe, flag, key, many, mapping, nested, number, one_of, read, text, unit, whole, write
from brimful.core.precision import PRESETS, Precision
from brimful.core.units import Batch, Duration, exact_bytes, parse_bytes, parse_count, parse_duration

METHODS = ("full", "lora", "qlora", "scratch")
OPTIMIZERS = ("adamw", "adamw-8bit", "adamw-paged-8bit", "sgd", "adafactor")
RECOMPUTE = ("none", "all", "half", "every-2nd")


def _targets(raw: object, place: str) -> str | tuple[str, ...]:
    return "all-linear" if raw == "all-linear" else cast(tuple[str, ...], many(text)(raw, place))


def _recompute(raw: object, place: str) -> str | tuple[int, ...]:
    if isinstance(raw, str) and not raw[:1].isdigit():
        return cast(str, one_of(*RECOMPUTE)(raw, f"{place} (or a list of layers)"))
    return tuple(sorted(set(many(whole)(raw, place))))


def _rate(raw: object, place: str) -> float | str:
    """A group's learning rate: a number, or a multiple of the run's such as `×10`."""
    if isinstance(raw, str) and raw[:1] in "×x*":
        return f"×{number(raw[1:], place):g}"
    return number(raw, place)


def _precision(raw: object, place: str) -> Precision:
    return Precision.parse(cast("str | Mapping[str, object]", raw))


def _sources(raw: object, place: str) -> "tuple[Source, ...]":
    items = raw if isinstance(raw, list | tuple) else [raw]
    return tuple(nested(Source, "path")(item, f"{place}[{index}]") for index, item in enumerate(items))


def _write_sources(sources: "tuple[Source, ...]") -> list[Any]:
    return [source.path if source.weight == 1.0 else write(source) for source in sources]


def _require(holds: bool, message: str, hint: str) -> None:
    if not holds:
        raise RunFileError(message, hint)


@dataclass(frozen=True)
class Lora:
    """The adapter of `method: lora` and `qlora`."""

    rank: int = key("width of the adapter", whole, 16)
    alpha: float = key(
        "scale: the adapter's output is multiplied by alpha / rank (rslora: alpha / √rank)", number, 32.0
    )
    dropout: float = key("share of the adapter's inputs dropped in training", number, 0.05)
    targets: str | tuple[str, ...] | None = key(
        "names of the linear layers that get an adapter, or all-linear; absent: what suits the model's family",
        _targets,
        None,
    )
    save_modules: tuple[str, ...] = key("modules trained and saved whole, beside the adapter", many(text), ())
    variant: str = key("lora, rslora or dora", one_of("lora", "rslora", "dora"), "lora")
    source: str | None = key("folder of an adapter to continue from", text, None, name="from")

    def __post_init__(self) -> None:
        _require(self.rank >= 1, f"lora.rank: {self.rank} leaves no adapter", "give a rank of 1 or more, such as 16")
        _require(
            0 <= self.dropout < 1, f"lora.dropout: {self.dropout} is not a share", "give a number from 0 to below 1"
        )
        _require(self.alpha > 0, f"lora.alpha: {self.alpha} would silence the adapter", "give a positive number")
        _require(self.targets != (), "lora.targets: an empty list adapts nothing", "leave it out, or name layers")


@dataclass(frozen=True)
class Source:
    """One file or folder of training data and how often its rows are drawn."""

    path: str = key("file, folder or s3:// address", text)
    weight: float = key("how often its rows are drawn, relative to the others", number, 1.0)

    def __post_init__(self) -> None:
        _require(
            self.weight > 0, f"data.train: weight {self.weight} of {self.path} draws nothing", "give a positive one"
        )


@dataclass(frozen=True)
class Data:
    """What is trained on and how long its rows may be."""

    train: tuple[Source, ...] | None = key(
        "training data: a path, or a list of paths and {path, weight}", _sources, None, write=_write_sources
    )
    validation: str | None = key("a file, or a share of the training data such as 1%", text, None)
    max_length: int = key("longest row in tokens (encoder-decoder: longest source)", whole, 1024)
    max_target_length: int | None = key("longest target in tokens; encoder-decoder models only", whole, None)
    too_long: str = key(
        "what to do with a longer row: error, drop, truncate, split",
        one_of("error", "drop", "truncate", "split"),
        "error",
    )
    layout: str = key("rows as they are, or concat: documents joined and cut", one_of("rows", "concat"), "rows")

    def __post_init__(self) -> None:
        for name in ("max_length", "max_target_length"):
            length = getattr(self, name)
            _require(
                length is None or length >= 1,
                f"data.{name}: {length} leaves no token",
                "give a number of tokens, such as 1024",
            )


@dataclass(frozen=True)
class Optimizer:
    """How gradients become updates."""

    name: str = key(", ".join(OPTIMIZERS), one_of(*OPTIMIZERS), "adamw")
    learning_rate: float = key("highest learning rate", number, 2.0e-4)
    schedule: str = key("cosine, linear or constant", one_of("cosine", "linear", "constant"), "cosine")
    warmup: Duration = key("rise to the learning rate over this long", unit(parse_duration), Duration(steps=0))
    clip: float = key("largest norm of the gradient; 0: no clipping", number, 1.0)
    weight_decay: float = key("decoupled weight decay", number, 0.0)
    betas: tuple[float, float] = key("AdamW's two decay rates", many(number), (0.9, 0.999))
    momentum: float = key("SGD's momentum; above 0 it keeps one state per weight", number, 0.0)

    def __post_init__(self) -> None:
        for name in ("learning_rate", "clip", "weight_decay", "momentum"):
            value = getattr(self, name)
            _require(
                0 <= value < float("inf"), f"optimizer.{name}: {value} is not usable", "give a number of 0 or more"
            )
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas: {self.betas} are not two decay rates",
            "give two numbers from 0 to below 1, such as [0.9, 0.999]",
        )


@dataclass(frozen=True)
class Group:
    """Weights that are trained differently from the rest."""

    match: str = key('pattern of parameter names, such as "*indexer*"', text)
    learning_rate: float | str | None = key("a number, or a multiple of the run's such as ×10", _rate, None)
    warmup: Duration | None = key("a warm-up of its own", unit(parse_duration), None)


@dataclass(frozen=True)
class Evaluate:
    """When the validation data is looked at."""

    every: Duration | None = key("how often; absent: at the end of each epoch", unit(parse_duration), None)
    samples: int = key("how many generations to show", whole, 0)


@dataclass(frozen=True)
class Hardware:
    """The GPUs that the run is meant for."""

    gpu: str | None = key("a GPU or instance of the catalogue; absent: what is in this machine", text, None)
    count: int = key("how many of them", whole, 1)
    headroom: int = key("memory to leave alone on each, such as 1GiB", unit(parse_bytes), 0, write=exact_bytes)

    def __post_init__(self) -> None:
        _require(self.count >= 1, f"hardware.count: {self.count} GPUs cannot train", "give 1 or more")


@dataclass(frozen=True)
class Checkpoint:
    """When and where checkpoints are kept."""

    every: Duration | None = key("how often; absent: at the end of each epoch", unit(parse_duration), None)
    keep: str = key("all, or how many of the latest", text, "all")
    mirror: str | None = key("s3:// address or folder to copy each one to", text, None)

    def __post_init__(self) -> None:
        _require(
            self.keep == "all" or (self.keep.isdigit() and int(self.keep) > 0),
            f"checkpoint.keep: {self.keep!r} is not a number of checkpoints",
            "write all, or a number of 1 or more",
        )


@dataclass(frozen=True)
class Pin:
    """Planner's choices that the user has fixed. None of them changes the result."""

    micro_batch: int | None = key("rows in one forward-backward slice; absent: the whole batch", whole, None)
    layout: str | None = key("padded or unpadded", one_of("padded", "unpadded"), None)
    recompute: str | tuple[int, ...] = key(
        "layers recomputed in backward: none, all, half, every-2nd, or a list such as [3, 7]", _recompute, "none"
    )
    loss: str | None = key("plain, fused or chunked", one_of("plain", "fused", "chunked"), None)
    loss_chunk: int | None = key("tokens in one chunk of the chunked loss", whole, None)
    attention: str | None = key(
        "attention kernel: flash, efficient or exact; absent: the fastest that can express the model's", text, None
    )
    optimizer_impl: str | None = key("foreach or fused", one_of("foreach", "fused"), None)
    allocator: str | None = key("settings of PyTorch's allocator, such as expandable_segments:True", text, None)

    def __post_init__(self) -> None:
        for name in ("micro_batch", "loss_chunk"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"pin.{name}: {value} is not usable", "give 1 or more")
        _require(
            self.loss_chunk is None or self.loss == "chunked",
            f"pin.loss_chunk: {self.loss_chunk} only means something to the chunked loss",
            "set pin.loss: chunked as well",
        )
        if isinstance(self.recompute, tuple):
            _require(
                all(i >= 0 for i in self.recompute), "pin.recompute: layers count from 0", "leave out negative ones"
            )


@dataclass(frozen=True)
class RunFile:
    """What the user wants. `load`, `from_mapping` and `override` make one; nothing changes one."""

    model: str = key("hub id, local folder, catalogue name, or module:Class of your own", text)
    model_config: Mapping[str, Any] | None = key(
        "arguments of a module:Class of your own, which is built as Class(**model_config)", mapping, None
    )
    trust_remote_code: bool = key("let the model's own Python code from the hub run here", flag, False)
    method: str = key("full, lora, qlora or scratch", one_of(*METHODS), "full")
    lora: Lora = key("the adapter, for lora and qlora", nested(Lora), Lora())
    precision: Precision = key(f"{', '.join(PRESETS)}, or a mapping of the keys below", _precision, PRESETS["bf16"])
    data: Data = key("what is trained on", nested(Data), Data())
    batch: Batch = key("effective batch over all GPUs, in sequences or tokens", unit(parse_count), Batch(sequences=1))
    epochs: float | None = key("how often the data is gone through; or steps", number, None)
    steps: int | None = key("how many optimizer steps; or epochs", whole, None)
    optimizer: Optimizer = key("how gradients become updates", nested(Optimizer, "name"), Optimizer())
    groups: tuple[Group, ...] = key("weights that are trained differently", many(nested(Group)), ())
    evaluate: Evaluate = key("when the validation data is looked at", nested(Evaluate), Evaluate())
    hardware: Hardware = key("the GPUs that the run is meant for", nested(Hardware, "gpu"), Hardware())
    checkpoint: Checkpoint = key("when and where checkpoints are kept", nested(Checkpoint), Checkpoint())
    report_to: tuple[str, ...] = key("where events are shown: tensorboard, wandb …", many(text), ())
    notify: tuple[str, ...] = key("whom to tell at the end; addresses come from the environment", many(text), ())
    allow: tuple[str, ...] = key(
        "changes of the result that the planner may make: quantize, shorten, fewer-targets, 8bit-optimizer",
        many(one_of("quantize", "shorten", "fewer-targets", "8bit-optimizer")),
        (),
    )
    pin: Pin = key("planner's choices that are fixed", nested(Pin), Pin())
    seed: int = key("seed of everything random", whole, 0)

    def __post_init__(self) -> None:
        _require(bool(self.model.strip()), "model: an empty name", "give a hub id, a folder or a catalogue name")
        _require(
            self.epochs is None or self.steps is None,
            "epochs and steps are both given",
            "keep the one that should end the run",
        )
        for name in ("epochs", "steps"):
            length = getattr(self, name)
            _require(length is None or length > 0, f"{name}: {length} trains nothing", "give a positive number")
        _require(
            self.method in ("lora", "qlora") or self.precision.weights != "fp16",
            f"precision.weights: fp16 weights cannot be trained with method: {self.method}; small updates vanish",
            "use precision: fp16-scaled, which keeps fp32 weights",
        )
        rows, slice_rows = self.batch.sequences, self.pin.micro_batch
        _require(
            rows is None or slice_rows is None or slice_rows <= rows,
            f"pin.micro_batch: {slice_rows} rows are more than the batch of {self.batch}",
            f"set pin.micro_batch to {rows} or less, or raise batch",
        )
        _require(
            self.batch.tokens is None or self.batch.tokens >= self.data.max_length,
            f"batch: {self.batch} cannot hold one row of data.max_length {self.data.max_length}",
            "raise batch, or lower data.max_length",
        )


KEYS = tuple(describe(RunFile))


def load(path: str | Path) -> RunFile:
    """The run file at `path`, or an error that says which key is wrong and what was probably meant."""
    try:
        raw = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise RunFileError(f"cannot read {path}: {error.strerror}", "give the path of a run file") from error
    except UnicodeDecodeError as error:
        raise RunFileError(f"{path} is not a text file", "a run file is YAML") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise RunFileError(f"{path}{place}: {error.problem}", "a run file is YAML: key: value") from error
    except yaml.YAMLError as error:
        raise RunFileError(
            f"{path} is not YAML: {str(error).splitlines()[0]}", "a run file is YAML: key: value"
        ) from error
    try:
        return from_mapping(raw)
    except RunFileError as error:
        raise RunFileError(f"{path}: {error.message}", error.hint) from None


def from_mapping(raw: object) -> RunFile:
    """A run file from plain data, as YAML or JSON gives it."""
    return read(RunFile, raw)


def to_mapping(run: RunFile) -> dict[str, Any]:
    """Plain data from which `from_mapping` makes the same run file."""
    return cast(dict[str, Any], write(run))


def override(run: RunFile, changes: Mapping[str, object]) -> RunFile:
    """`run` with dotted keys set, as flags do: `{"optimizer.name": "sgd", "batch": 16}`. None leaves a key alone."""
    raw = to_mapping(run)
    given = {name: value for name, value in changes.items() if value is not None}
    # whole keys before their parts, so that `precision` does not undo `precision.adapter`
    for name, value in sorted(given.items(), key=lambda item: item[0].count(".")):
        *parents, last = name.split(".")
        inside = raw
        for parent in parents:
            inner = inside.get(parent)
            if parent == "precision" and isinstance(inner, str):
                inner = asdict(Precision.parse(inner))
            elif parent in _SHORTHANDS and isinstance(inner, str):
                inner = {_SHORTHANDS[parent]: inner}
            elif not isinstance(inner, dict):
                inner = {}
            inside[parent] = inner
            inside = inner
        inside[last] = value
    for name, rival in (("epochs", "steps"), ("steps", "epochs")):
        if name in given and rival not in given:
            raw.pop(rival, None)
    return from_mapping(raw)


_SHORTHANDS = {"optimizer": "name", "hardware": "gpu"}


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice: YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key_node.value} is given twice", problem_mark=key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


__all__ = [
    "KEYS",
    "METHODS",
    "OPTIMIZERS",
    "RECOMPUTE",
    "Checkpoint",
    "Data",
    "Evaluate",
    "Group",
    "Hardware",
    "Lora",
    "Optimizer",
    "Pin",
    "RunFile",
    "Source",
    "from_mapping",
    "load",
    "override",
    "to_mapping",
]
