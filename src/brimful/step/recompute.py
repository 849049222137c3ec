"""Recomputation of any subset of layers, changeable between two micro-batches."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brimful.core.errors import UsageError


def which_layers(choice: str | Iterable[int], count: int) -> frozenset[int]:
    """The layers that `none · all · half · every-2nd · [3, 7]` names, of `count`."""
    if not isinstance(choice, str):
        layers = frozenset(choice)
        if wrong := sorted(i for i in layers if not 0 <= i < count):
            raise UsageError(f"recompute names layer {wrong[0]}, the model has 0 to {count - 1}")
        return layers
    named = {"none": range(0), "all": range(count), "half": range(count // 2), "every-2nd": range(0, count, 2)}
    if choice not in named:
        raise UsageError(f"recompute: {choice!r} is not known", hint=f"use {', '.join(named)} or a list of layers")
    return frozenset(named[choice])


class Recomputation:
    """Decides at each call of a layer whether its activations are kept or computed again in backward."""

    def __init__(
        self, layers: Sequence[nn.Module], chosen: frozenset[int] = frozenset(), *, keep_generator: bool = False
    ) -> None:
        self.chosen = chosen
        # dropout modules are keyed by row; what draws from a generator is dropout inside an attention kernel, or a
        # model's call of functional.dropout
        self.keep_generator = keep_generator
        for index, layer in enumerate(layers):
            layer.forward = self._recomputing(index, layer.forward)

    def _recomputing(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if index not in self.chosen or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=self.keep_generator, **kwargs)

        return run
