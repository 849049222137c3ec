"""Tensors from rows: the padded and the unpadded layout of a micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch

from brimful.core.errors import UsageError
from brimful.step.dropout import token_keys
from brimful.step.loss import IGNORE
from brimful.step.target import Target


@dataclass(frozen=True)
class Row:
    """One training sequence. `tokens` are the inputs and `labels` what is to be learned at the same positions.

    A decoder learns at each position the *next* label; an encoder-decoder reads `tokens` and learns `labels`.
    """

    id: int
    tokens: Sequence[int]
    labels: Sequence[int]


@dataclass(frozen=True)
class Layout:
    """How the rows of one side (tokens, or an encoder-decoder's targets) lie in a tensor."""

    lengths: tuple[int, ...]
    width: int
    padded: bool
    row_starts: torch.Tensor | None
    positions: torch.Tensor | None

    def on(self, target: Target) -> "Layout":
        """The same layout with its tensors on the target."""
        return replace(self, row_starts=target.put(self.row_starts), positions=target.put(self.positions))

    @property
    def has_padding(self) -> bool:
        """Whether some row is shorter than the tensor is wide."""
        return self.padded and any(length < self.width for length in self.lengths)


@dataclass(frozen=True)
class MicroBatch:
    """One forward-backward slice of a step: made on the host, then put `on` its target."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    layout: Layout
    keys: torch.Tensor
    target_count: int
    decoder_input_ids: torch.Tensor | None = None
    decoder_layout: Layout | None = None
    decoder_keys: torch.Tensor | None = None
    padding: torch.Tensor | None = None

    def on(self, target: Target) -> "MicroBatch":
        """The same micro-batch with its tensors on the target."""
        moved = {f.name: target.put(v) for f in fields(self) if isinstance(v := getattr(self, f.name), torch.Tensor)}
        layouts = {"layout": self.layout.on(target)}
        if self.decoder_layout is not None:
            layouts["decoder_layout"] = self.decoder_layout.on(target)
        return replace(self, **moved, **layouts)


def _flat(rows: Sequence[Sequence[int]], width: int | None, fill: int) -> list[int]:
    """Rows end to end, each filled up to `width` where one is given."""
    if width is None:
        return [token for row in rows for token in row]
    return [token for row in rows for token in (*row, *[fill] * (width - len(row)))]


def _layout(lengths: Sequence[int], padded: bool, multiple: int) -> Layout:
    if padded:
        width = -(-max(lengths) // multiple) * multiple
        return Layout(tuple(lengths), width, True, None, None)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.tensor([p for length in lengths for p in range(length)])
    return Layout(tuple(lengths), sum(lengths), False, starts, positions.unsqueeze(0))


def _shape(flat: list[int], layout: Layout) -> torch.Tensor:
    tensor = torch.tensor(flat)
    return tensor.view(len(layout.lengths), -1) if layout.padded else tensor.view(1, -1)


def _keys(rows: Sequence[Row], layout: Layout, seed: int, step: int) -> torch.Tensor:
    """Randomness belongs to the row: a key per position that knows nothing of slicing or layout."""
    spans = [layout.width] * len(rows) if layout.padded else layout.lengths
    ids = torch.tensor([row.id for row, span in zip(rows, spans, strict=True) for _ in range(span)])
    positions = torch.tensor([p for span in spans for p in range(span)])
    keys = token_keys(seed, step, ids, positions)
    return keys.view(len(rows), -1) if layout.padded else keys


def make_batch(
    rows: Sequence[Row],
    *,
    padded: bool,
    seed: int = 0,
    step: int = 0,
    encoder_decoder: bool = False,
    decoder_start: int = 0,
    pad: int = 0,
    multiple: int = 1,
) -> MicroBatch:
    """Put rows into tensors on the host. Padding goes to the right, where causal attention never looks from a token."""
    if empty := [row.id for row in rows if not row.tokens or not row.labels]:
        raise UsageError(f"row {empty[0]} is empty", hint="leave rows without tokens out")
    layout = _layout([len(row.tokens) for row in rows], padded, multiple)
    width = layout.width if padded else None
    ids = _shape(_flat([row.tokens for row in rows], width, pad), layout)
    keys = _keys(rows, layout, seed, step)
    if not encoder_decoder:
        if uneven := [row for row in rows if len(row.labels) != len(row.tokens)]:
            row = uneven[0]
            raise ValueError(f"row {row.id} has {len(row.tokens)} tokens and {len(row.labels)} labels")
        shifted = [(*row.labels[1:], IGNORE) for row in rows]
        count = sum(label != IGNORE for row in shifted for label in row)
        return MicroBatch(ids, torch.tensor(_flat(shifted, width, IGNORE)), layout, keys, count)
    targets = _layout([len(row.labels) for row in rows], padded, multiple)
    target_width = targets.width if padded else None
    starts = [(decoder_start, *(pad if label == IGNORE else label for label in row.labels[:-1])) for row in rows]
    padding = None
    if layout.has_padding:
        padding = torch.arange(layout.width)[None, :] >= torch.tensor(layout.lengths)[:, None]
    return MicroBatch(
        input_ids=ids,
        labels=torch.tensor(_flat([row.labels for row in rows], target_width, IGNORE)),
        layout=layout,
        keys=keys,
        target_count=sum(label != IGNORE for row in rows for label in row.labels),
        decoder_input_ids=_shape(_flat(starts, target_width, pad), targets),
        decoder_layout=targets,
        decoder_keys=_keys(rows, targets, seed, step),
        padding=padding,
    )
