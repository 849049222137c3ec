"""Every way in which Brimful refuses or stops, drawn in one place.

    BrimfulError
    ├── UsageError            2   the request itself is wrong
    │   ├── UnknownName           no such model, GPU, key …
    │   ├── RunFileError          a run file, or a flag that mirrors one of its keys
    │   └── ModelError            a model that cannot be built or does not suit the request
    ├── NothingFits           3   no permitted configuration fits the card
    └── MissingPackage        7   an optional package or a device is not here

An error says what and why in its message, and what to do next in its hint.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar

from brimful.core.nearest import nearest


class ExitCode(IntEnum):
    """What the `brimful` command's exit status means. The only table of them."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    NOTHING_FITS = 3
    LADDER_EXHAUSTED = 4
    DATA_REJECTED = 5
    CHECKPOINT_DAMAGED = 6
    MISSING = 7
    STOPPED = 75


EXIT_CODES: dict[ExitCode, str] = {
    ExitCode.DONE: "done",
    ExitCode.UNEXPECTED: "not foreseen",
    ExitCode.USAGE: "usage",
    ExitCode.NOTHING_FITS: "nothing fits",
    ExitCode.LADDER_EXHAUSTED: "ladder exhausted",
    ExitCode.DATA_REJECTED: "data rejected",
    ExitCode.CHECKPOINT_DAMAGED: "checkpoint damaged",
    ExitCode.MISSING: "package or hardware missing",
    ExitCode.STOPPED: "stopped with a checkpoint",
}


class BrimfulError(Exception):
    """What went wrong and why, with a hint that says what to do next."""

    exit_code: ClassVar[ExitCode] = ExitCode.UNEXPECTED

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(BrimfulError):
    """The request cannot be carried out as it was written."""

    exit_code = ExitCode.USAGE


class UnknownName(UsageError):  # noqa: N818 — reads as what it is
    """A name that is in no list; the hint offers the nearest ones that are."""

    def __init__(self, what: str, name: str, known: Iterable[str] = (), hint: str | None = None) -> None:
        self.name = name
        self.nearest = nearest(name, known)
        offers = f"did you mean {_either(self.nearest)}?" if self.nearest else None
        super().__init__(f"unknown {what} {name!r}", "; ".join(filter(None, (offers, hint))) or None)


class RunFileError(UsageError):
    """A run file's key or value is wrong; the message names the key with its place."""


class ModelError(UsageError):
    """A model cannot be found or built, or does not suit what is asked of it."""


class NothingFits(BrimfulError):  # noqa: N818 — reads as what it is
    """No configuration that the user permits fits the card."""

    exit_code = ExitCode.NOTHING_FITS


class MissingPackage(BrimfulError):  # noqa: N818 — reads as what it is
    """An optional package is not installed (or a device is not here); the hint is the line that installs it."""

    exit_code = ExitCode.MISSING

    def __init__(self, package: str, needed_for: str, extra: str | None = None, hint: str | None = None) -> None:
        install = f"pip install 'brimful[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{needed_for} needs {package}, which is not here", hint or install)


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
