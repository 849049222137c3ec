"""The line of a card, and whether a run stays under it."""

from brimful.catalog.gpus import Gpu
from brimful.core.forecast import Card, Verdict

MARGIN = 1.02


def card_of(gpu: Gpu, headroom: int) -> Card:
    """What PyTorch may reserve on this GPU: the driver's total less context, libraries and headroom."""
    return Card(gpu.title, gpu.memory, gpu.context, gpu.reservable - headroom, gpu.measured)


def judge(smallest_capacity: int, line: int) -> Verdict:
    """`fits` with a margin of 2 %, `tight` without it, or `no`."""
    if smallest_capacity * MARGIN <= line:
        return Verdict.FITS
    return Verdict.TIGHT if smallest_capacity <= line else Verdict.NO
