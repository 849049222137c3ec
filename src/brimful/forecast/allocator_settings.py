"""What PYTORCH_CUDA_ALLOC_CONF says, as far as it decides how much GPU memory is allocated and reserved."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brimful.core.errors import UnknownName, UsageError

MIB = 1 << 20
BLOCK = 512
"""Every block's size is a multiple of this."""
SMALL_REQUEST = MIB
"""The largest request that the small pool serves."""
SMALL_SEGMENT = 2 * MIB
LARGE_REQUEST = 10 * MIB
"""Requests of the large pool below this share a segment; from here on they get their own."""
SEGMENT_ROUNDING = 2 * MIB
INTERVALS = 16
"""`roundup_power2_divisions` has one entry for each power of two from 1 MiB; smaller sizes use the first."""

NO_EFFECT = frozenset(
    {
        "backend",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)
"""Options that PyTorch knows and that leave the device's allocations as they are."""


@dataclass(frozen=True)
class Settings:
    """The allocator's options, in bytes; the defaults are PyTorch's.

    `roundup_power2_divisions` is one number for all sizes, or one for each interval [2^k MiB, 2^(k+1) MiB) from k = 0.
    `garbage_collection_threshold` is a fraction of the capacity and does nothing without one.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    roundup_power2_divisions: int | tuple[int, ...] | None = None
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = 20 * MIB
    max_non_split_rounding: int | None = None

    def __post_init__(self) -> None:
        if self.large_segment_size <= LARGE_REQUEST or self.large_segment_size % MIB:
            raise UsageError("allocator option large_segment_size_mb must be more than 10")
        for option, value in (
            ("max_split_size_mb", self.max_split_size),
            ("max_non_split_rounding_mb", self.max_non_split_rounding),
        ):
            if value is not None and value < self.large_segment_size:
                least = self.large_segment_size // MIB
                raise UsageError(f"allocator option {option}:{value // MIB} is too small", f"give at least {least}")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise UsageError("allocator option garbage_collection_threshold must lie between 0 and 1")
        divisions = self.roundup_power2_divisions
        for count in divisions if isinstance(divisions, tuple) else (divisions or 0,):
            if count < 0 or count & (count - 1):
                raise UsageError(f"allocator option roundup_power2_divisions: {count} is not a power of two")

    @classmethod
    def parse(cls, text: str) -> "Settings":
        """Read PyTorch's own notation, e.g. `expandable_segments:True,roundup_power2_divisions:[256:1,>:8]`."""
        given = dict(_pairs(text))
        for option, value in given.items():
            if option not in _READERS and option not in NO_EFFECT:
                raise _refused(option)
            if option == "backend" and value != "native":
                raise UsageError(f"allocator backend {value!r} is not simulated", "forecast with backend:native")
        fields: dict[str, Any] = {
            option.removesuffix("_mb"): read(option, given[option])
            for option, read in _READERS.items()
            if option in given
        }
        return cls(**fields)

    def rounded(self, size: int) -> int:
        """The size of the block that a request asks for."""
        divisions = self._divisions(size) if self.roundup_power2_divisions is not None else 0
        if divisions > 1 and size > BLOCK * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return max(BLOCK, -(-size // BLOCK) * BLOCK)

    def segment(self, size: int) -> int:
        """How much a request of this (rounded) size asks of the device when no cached block will do."""
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if size < LARGE_REQUEST:
            return self.large_segment_size
        return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING

    def _divisions(self, size: int) -> int:
        divisions = self.roundup_power2_divisions
        if not isinstance(divisions, tuple):
            return divisions or 0
        interval = max(0, size.bit_length() - MIB.bit_length())
        return divisions[min(interval, len(divisions) - 1)]


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", re.sub(r"\s", "", text)):
        option, colon, value = item.partition(":")
        if not colon or not value:
            raise UsageError(f"allocator option {item!r} has no value", "write option:value,option:value")
        pairs.append((option, value))
    return pairs


def _refused(option: str) -> UsageError:
    if option in {"per_process_memory_fraction", "throw_on_cudamalloc_oom"}:
        return UsageError(f"allocator option {option} depends on the card", "give the capacity instead")
    return UnknownName("allocator option", option, sorted(_READERS))


def _flag(option: str, value: str) -> bool:
    if value not in {"True", "False"}:
        raise UsageError(f"allocator option {option}:{value} must be True or False")
    return value == "True"


def _number(option: str, value: str) -> int:
    if not value.isdecimal():
        raise UsageError(f"allocator option {option}:{value} must be a whole number")
    return int(value)


def _mebibytes(option: str, value: str) -> int:
    return _number(option, value) * MIB


def _fraction(option: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction < 1:
        raise UsageError(f"allocator option {option}:{value} must lie between 0 and 1")
    return fraction


def _divisions(option: str, value: str) -> int | tuple[int, ...]:
    """A single number, or `[256:1,512:2,>:8]`: sizes in MiB below which the first number holds, `>` for all above."""
    if not value.startswith("["):
        return _number(option, value)
    entries = [item.partition(":") for item in value.removeprefix("[").removesuffix("]").split(",")]
    if not value.endswith("]") or not all(colon for _, colon, _ in entries):
        raise UsageError(f"allocator option {option}:{value} cannot be read", "write it like [256:1,512:2,>:8]")
    divisions = [0] * INTERVALS
    last: int | None = None
    for boundary, _, text in entries:
        count = _number(option, text)
        if boundary == ">":
            _fill(divisions, (0 if last is None else last) + 1, INTERVALS, count)
            continue
        size = _number(option, boundary)
        if size == 0 or size & (size - 1):
            raise UsageError(f"allocator option {option}: {boundary} is not a power of two")
        index = min(size.bit_length() - 1, INTERVALS - 1)
        _fill(divisions, index if last is not None else 0, index + 1, count)
        last = index
    return tuple(divisions)


def _fill(divisions: list[int], start: int, end: int, count: int) -> None:
    divisions[start:end] = [count] * (end - start)


_READERS: dict[str, Callable[[str, str], object]] = {
    "expandable_segments": _flag,
    "max_split_size_mb": _mebibytes,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _fraction,
    "large_segment_size_mb": _mebibytes,
    "max_non_split_rounding_mb": _mebibytes,
}
