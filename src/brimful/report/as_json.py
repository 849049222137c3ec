"""A result as JSON, for programs: the dataclass's own field names, sizes in bytes, enums as their words."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath


def to_json(result: object, indent: int | None = 2) -> str:
    """`result` as JSON text."""
    return json.dumps(to_plain(result), indent=indent, ensure_ascii=False)


def to_plain(value: object) -> object:
    """Dataclasses and mappings as dicts, sequences as lists, enums as their values."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Sequence | Set):
        return [to_plain(inner) for inner in value]
    return str(value) if isinstance(value, PurePath) else repr(value)
