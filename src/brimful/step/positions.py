"""Rotary frequencies that depend on the length of what is read, settled once for a run.

Some models (Phi-3.5's longrope, dynamic NTK) choose their frequencies by the longest row of a micro-batch. That couples
rows: a row's result would depend on which others it is sliced with. It also makes the host wait for the device in every
forward. Here the run's `data.max_length` decides, for all rows alike.
"""

import inspect
from types import MethodType

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def settle_positions(module: nn.Module, max_length: int, *, fill: bool) -> None:
    """Take the choice away from every rotary module that would make it anew; `fill` writes the frequencies chosen."""
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        if not isinstance(kind, str) or not (kind == "longrope" or "dynamic" in kind):
            continue
        part.forward = MethodType(torch.no_grad()(inspect.unwrap(type(part).forward)), part)
        if fill:
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](part.config, torch.device("cpu"), seq_len=max_length)
            with torch.no_grad():
                part.inv_freq.copy_(frequencies)
