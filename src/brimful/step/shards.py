"""Reads a folder's safetensors files with plain reads, piece by piece, so that no file is ever mapped or held whole.

A mapped file counts as resident memory as far as it has been touched; a read fills one small buffer that is used again.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from brimful.core.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Numbers that are read, converted and copied at a time: 16 MiB of a 16-bit file.
PIECE = 1 << 23
_LONGEST_HEADER = 100_000_000  # the format's own limit

STORED_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, by the file's header: nothing of it has been read."""

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        try:
            return STORED_TYPES[self.kind]
        except KeyError:
            raise ModelError(
                f"{self.file}: {self.name} is stored as {self.kind}, which is not read",
                hint="give the weights in bf16, fp16 or fp32",
            ) from None

    @property
    def numbers(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def holds_weights(folder: Path | None) -> bool:
    """Whether there are files in the folder that can be read here."""
    return folder is not None and ((folder / SINGLE).is_file() or (folder / INDEX).is_file())


def refuse_other_formats(folder: Path) -> None:
    """Weights that cannot be read must not be passed over as if there were none."""
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.safetensors") for p in folder.glob(pattern))
    if others:
        raise ModelError(
            f"{folder} holds {others[0]}, but neither {SINGLE} nor {INDEX}",
            hint="load it with transformers and save it again with save_pretrained",
        )


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's files, by its name; reads headers only."""
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    index = folder / INDEX
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        files = sorted(set(names.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of shards: {error!r}", hint="fetch the folder again") from error
    found: dict[str, Stored] = {}
    for file in files:
        found |= read_header(folder / file)
    absent = [name for name in names if name not in found]
    if absent:
        raise ModelError(f"{folder / names[absent[0]]} has no tensor {absent[0]}, which {INDEX} says it has")
    return found


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file; raises an error that names the file, and the tensor where one is to blame."""
    try:
        end = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(end - 8, _LONGEST_HEADER):
                raise ValueError(f"its header would be {length:,} bytes of {end:,}")
            entries = json.loads(file.read(length))
        if not isinstance(entries, dict):
            raise TypeError("its header is not an object")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is not there", hint="fetch the folder again") from error
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}", hint="fetch it again") from error
    entries.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, end) for name, entry in entries.items()}


def _entry(path: Path, name: str, entry: Any, start: int, end: int) -> Stored:
    try:
        first, last = entry["data_offsets"]
        stored = Stored(name, path, str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), start + first)
        if stored.kind in STORED_TYPES and (last - first, 0) != (stored.numbers * stored.dtype.itemsize, first >> 63):
            raise ValueError(f"{last - first:,} bytes for {stored.numbers:,} numbers")
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: the header's entry for {name} is damaged: {error}", hint="fetch it again") from error
    if start + last > end:
        raise ModelError(
            f"{path} is cut off: {name} ends at byte {start + last:,}, the file at {end:,}", hint="fetch it again"
        )
    return stored


class Reader:
    """Reads tensors in pieces into one buffer. A piece is valid until the next is asked for."""

    def __init__(self, tensors: Mapping[str, Stored], piece: int = PIECE) -> None:
        self._numbers = piece
        self._buffer = torch.empty(read_buffer(tensors, piece), dtype=torch.uint8)
        self._bytes = memoryview(self._buffer.numpy())
        self._file: BinaryIO | None = None
        self._path: Path | None = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def pieces(self, stored: Stored) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensor's numbers in order, flat, each piece with the place of its first number."""
        for start in range(0, stored.numbers, self._numbers):
            yield start, self._piece(stored, start, min(self._numbers, stored.numbers - start))

    def _piece(self, stored: Stored, start: int, count: int) -> torch.Tensor:
        width = stored.dtype.itemsize
        wanted, got = count * width, 0
        file = self._open(stored.file)
        file.seek(stored.offset + start * width)
        while got < wanted:
            read = file.readinto(self._bytes[got:wanted])  # type: ignore[attr-defined]
            if not read:
                raise ModelError(f"{stored.file} ended while {stored.name} was read", hint="fetch it again")
            got += read
        return self._buffer[:wanted].view(stored.dtype)

    def _open(self, path: Path) -> BinaryIO:
        if self._file is None or self._path != path:
            if self._file is not None:
                self._file.close()
            self._file, self._path = path.open("rb", buffering=0), path
        return self._file


def read_buffer(tensors: Mapping[str, Stored], piece: int = PIECE) -> int:
    """Bytes of the buffer that a reader of these tensors takes."""
    known = (t for t in tensors.values() if t.kind in STORED_TYPES)
    return max((min(piece, t.numbers) * t.dtype.itemsize for t in known), default=0)


def same_values(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors are equal; stops at the first piece that is not."""
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    small = PIECE // 128  # most that differ do so at once
    with Reader({one.name: one}, small) as left, Reader({other.name: other}, small) as right:
        pairs = zip(left.pieces(one), right.pieces(other), strict=True)
        return all(torch.equal(a, b) for (_, a), (_, b) in pairs)
