"""What the layers of a model may ask about the micro-batch that is passing through them.

Backward recomputes layers on autograd's own threads, so this is plain module state and not thread-local.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from brimful.step.target import Target

if TYPE_CHECKING:
    from brimful.step.batch import MicroBatch


@dataclass(frozen=True)
class Now:
    """The micro-batch under way, the device it is meant for, and the attention kernel that the plan pinned, if any.

    `attended` lists the modules whose attention came by: a model that does it by itself would ignore rows and masks.
    `compute` is set under autocast: rotary embeddings make queries fp32 there, and attention brings them back.
    """

    batch: "MicroBatch"
    target: Target
    attention: str | None = None
    compute: torch.dtype | None = None
    attended: "list[torch.nn.Module]" = field(default_factory=list, repr=False)


_stack: list[Now] = []


def current() -> Now:
    """The innermost micro-batch under way."""
    return _stack[-1]


@contextmanager
def passing(now: Now) -> Iterator[None]:
    """Make `now` the current one until the end of the block."""
    _stack.append(now)
    try:
        yield
    finally:
        _stack.pop()
