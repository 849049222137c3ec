"""Amounts as people write them: bytes, batches and durations, each with its unit."""

import re
from dataclasses import dataclass
from fractions import Fraction

from brimful.core.errors import UsageError

KiB = 2**10
MiB = 2**20
GiB = 2**30

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_AMOUNT = re.compile(r"\s*([0-9]+(?:[_,][0-9]{3})*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True)
class Batch:
    """The effective batch: what one optimizer update sees over all GPUs, in sequences or in tokens."""

    sequences: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        given = [count for count in (self.sequences, self.tokens) if count is not None]
        if len(given) != 1 or given[0] < 1:
            raise UsageError(
                "a batch is at least one sequence or one token", 'write it as "16 sequences" or "16384 tokens"'
            )

    def __str__(self) -> str:
        return _counted(self.sequences, "sequence") if self.sequences is not None else _counted(self.tokens, "token")


@dataclass(frozen=True)
class Duration:
    """A stretch of training, in optimizer steps or in epochs."""

    steps: int | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        given = [count for count in (self.steps, self.epochs) if count is not None]
        if len(given) != 1 or given[0] < 0:
            raise UsageError("a duration is a number of steps or of epochs", 'write it as "500 steps" or "3 epochs"')

    def __str__(self) -> str:
        return _counted(self.steps, "step") if self.steps is not None else _counted(self.epochs, "epoch")


def parse_bytes(text: str | int) -> int:
    """`21.5GiB`, `512 MiB`, `24GB` (decimal, as the letters say) or a plain count of bytes."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise UsageError(f"{text} is not a size: it is negative", "give a size such as 21.5GiB")
        return text
    match = _AMOUNT.fullmatch(str(text))
    unit = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{text!r} is not a size", "give a number with B, KiB, MiB, GiB, MB or GB, such as 21.5GiB")
    return round(_number(match[1]) * unit)


def format_bytes(size: int) -> str:
    """`21.5 GiB`, `3.94 GiB`, `512 MiB`, `0.25 MiB`: three figures are enough to decide by."""
    sign, magnitude = ("-", -size) if size < 0 else ("", size)
    # rounded first, or 1023.6 MiB would print as 1024 MiB
    if round(magnitude / MiB) >= 1024:
        return f"{sign}{magnitude / GiB:.{2 if magnitude < 10 * GiB else 1}f} GiB"
    if magnitude >= 10 * MiB or not magnitude:
        return f"{sign}{magnitude / MiB:.0f} MiB"
    return f"{sign}{max(magnitude / MiB, 0.01):.2f} MiB"


def exact_bytes(size: int) -> str | int:
    """The shortest form that `parse_bytes` turns back into the same count, for files that are read again."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB")):
        if size and size % unit == 0:
            return f"{size // unit} {name}"
    return size


def parse_count(text: str | int) -> Batch:
    """`16 sequences`, `16384 tokens`, or a bare number, which means sequences."""
    if isinstance(text, int) and not isinstance(text, bool):
        return Batch(sequences=text)
    match = _AMOUNT.fullmatch(str(text))
    unit = match[2].lower().rstrip("s") if match else None
    if match is None or unit not in ("", "sequence", "row", "token") or "." in match[1]:
        raise UsageError(f"{text!r} is not a batch", 'write it as "16 sequences" or "16384 tokens"')
    count = int(_number(match[1]))
    return Batch(tokens=count) if unit == "token" else Batch(sequences=count)


def parse_duration(text: str) -> Duration:
    """`500 steps` or `3 epochs`. A bare number is refused: it could mean either."""
    match = _AMOUNT.fullmatch(str(text))
    unit = match[2].lower().rstrip("s") if match else None
    if match is not None and unit == "step" and "." not in match[1]:
        return Duration(steps=int(_number(match[1])))
    if match is not None and unit == "epoch":
        return Duration(epochs=float(_number(match[1])))
    raise UsageError(f"{text!r} is not a duration", 'write it with its unit: "500 steps" or "3 epochs"')


def _number(digits: str) -> Fraction:
    # exact: a count of bytes read as a float would lose its last digits
    return Fraction(digits.replace("_", "").replace(",", ""))


def _counted(count: float | None, noun: str) -> str:
    return f"{count if isinstance(count, int) else format(count or 0, 'g')} {noun}{'' if count == 1 else 's'}"
