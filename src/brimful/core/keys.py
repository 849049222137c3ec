"""Reading nested mappings into frozen dataclasses, and back: every key documented, an unknown one refused.

A dataclass declares each field with `key(help, reader, default)`. A reader takes the raw value and its place
(`optimizer.name`) and returns the value, or raises an error that names the place.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from brimful.core.errors import RunFileError, UsageError
from brimful.core.nearest import nearest
from brimful.core.precision import KEYS as PRECISION_KEYS
from brimful.core.precision import Precision
from brimful.core.units import Batch, Duration

T = TypeVar("T")
Reader = Callable[[object, str], Any]


@dataclass(frozen=True)
class Key:
    """One documented key of the run file, for the reference."""

    name: str
    default: object
    help: str
    required: bool = False


def key(help: str, reader: Reader, default: Any = MISSING, name: str | None = None, write: Any = None) -> Any:
    """A dataclass field that knows its line of documentation, how it is read and, where not plainly, how written."""
    return field(default=default, metadata={"help": help, "read": reader, "name": name, "write": write})


def read(kind: type[T], raw: object, place: str = "") -> T:
    """`raw` as a `kind`; null means "not given"."""
    if not isinstance(raw, Mapping):
        raise RunFileError(f"{place or 'the run file'}: expected keys and values, got {raw!r}", _known(kind))
    known = {_name(item): item for item in fields(kind)}  # type: ignore[arg-type]
    inside = f"{place}." if place else ""
    for given in raw:
        if given not in known:
            likely = nearest(str(given), known, 1)
            offer = f"did you mean {inside}{likely[0]}? " if likely else ""
            raise RunFileError(f"unknown key {inside}{given}", offer + _known(kind))
    for name, item in known.items():
        if item.default is MISSING and raw.get(name) is None:
            raise RunFileError(f"{inside}{name} is missing", f"{inside}{name}: {item.metadata['help']}")
    values = {
        item.name: item.metadata["read"](raw[name], inside + name)
        for name, item in known.items()
        if raw.get(name) is not None
    }
    return kind(**values)


def write(value: object) -> Any:
    """What `read` turns back into `value`: plain mappings, lists, numbers and strings, absent where None."""
    if isinstance(value, Precision):
        return value.to_mapping()
    if isinstance(value, Batch | Duration):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        out = {}
        for item in fields(value):
            inner = getattr(value, item.name)
            if inner is not None:
                out[_name(item)] = (item.metadata["write"] or write)(inner)
        return out
    if isinstance(value, tuple):
        return [write(inner) for inner in value]
    return dict(value) if isinstance(value, Mapping) else value


def describe(kind: type, place: str = "") -> Iterator[Key]:
    """Every key under `kind`, in order, with its default and its line of help."""
    for item in fields(kind):
        name = place + _name(item)
        missing = item.default is MISSING
        yield Key(name, None if missing else write(item.default), item.metadata["help"], required=missing)
        inner = getattr(item.metadata["read"], "kind", None)
        if inner is not None:
            yield from describe(inner, f"{name}.")
        if isinstance(item.default, Precision):
            yield from (Key(f"{name}.{inner}", None, line) for inner, line in PRECISION_KEYS.items())


def text(raw: object, place: str) -> str:
    """A string; numbers are taken as they are written (a folder may be called 2024)."""
    if isinstance(raw, bool | Mapping | list):
        raise RunFileError(f"{place}: expected text, got {raw!r}", "put it in quotes if you meant the word itself")
    return str(raw)


def whole(raw: object, place: str) -> int:
    """An integer; `1_000` and `"1000"` are too."""
    try:
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError
        return int(raw)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        raise RunFileError(f"{place}: expected a whole number, got {raw!r}", f"write {place}: 1") from None


def number(raw: object, place: str) -> float:
    """A number; YAML reads `2e-4` as text, so text that is a number counts."""
    try:
        if isinstance(raw, bool):
            raise ValueError
        return float(raw)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise RunFileError(f"{place}: expected a number, got {raw!r}", f"write {place}: 1.0") from None


def flag(raw: object, place: str) -> bool:
    """true or false, nothing that merely looks like it."""
    if not isinstance(raw, bool):
        raise RunFileError(f"{place}: expected true or false, got {raw!r}", f"write {place}: true")
    return raw


def mapping(raw: object, place: str) -> Mapping[str, Any]:
    """Keys and values that mean something to somebody else, who is given them as they are."""
    if not isinstance(raw, Mapping) or not all(isinstance(name, str) for name in raw):
        raise RunFileError(f"{place}: expected keys and values, got {raw!r}", f"write {place}: {{name: value}}")
    return dict(raw)


def one_of(*choices: str) -> Reader:
    """One of a few words."""

    def reader(raw: object, place: str) -> str:
        if raw not in choices:
            likely = nearest(str(raw), choices, 1)
            offer = f"did you mean {likely[0]}? " if likely else ""
            raise RunFileError(f"{place}: {raw!r} is not known", f"{offer}use one of {', '.join(choices)}")
        return str(raw)

    return reader


def many(reader: Reader) -> Reader:
    """A list; a single value stands for a list of one, and `a, b` for two."""

    def read_all(raw: object, place: str) -> tuple[Any, ...]:
        if isinstance(raw, str):
            raw = [part.strip() for part in raw.split(",") if part.strip()]
        items = raw if isinstance(raw, list | tuple) else [raw]
        return tuple(reader(item, f"{place}[{index}]") for index, item in enumerate(items))

    read_all.kind = getattr(reader, "kind", None)  # type: ignore[attr-defined]
    return read_all


def unit(parse: Callable[[Any], Any]) -> Reader:
    """An amount with its unit, whose parser does not know the place."""

    def reader(raw: object, place: str) -> Any:
        if not isinstance(raw, str | int):
            raise RunFileError(f"{place}: {raw!r} is not an amount", "write a number with its unit")
        try:
            return parse(raw)
        except UsageError as error:
            raise RunFileError(f"{place}: {error.message}", error.hint) from None

    return reader


def nested(kind: type, shorthand: str | None = None) -> Reader:
    """A mapping of its own; with `shorthand`, a plain value stands for a mapping with just that key."""

    def reader(raw: object, place: str) -> Any:
        if isinstance(raw, kind):
            return raw
        if shorthand is not None and not isinstance(raw, Mapping):
            raw = {shorthand: raw}
        return read(kind, raw, place)

    reader.kind = kind  # type: ignore[attr-defined]
    return reader


def _name(item: "Field[Any]") -> str:
    return item.metadata["name"] or item.name


def _known(kind: type) -> str:
    return f"known here: {', '.join(_name(item) for item in fields(kind))}"
