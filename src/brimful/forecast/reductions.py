"""The memory that CUDA's reduction kernels take for themselves: sums over many rows meet in a buffer in global memory.

PyTorch chooses how to cut a reduction over threads and blocks from its shape and from the card (Reduce.cuh); only a
reduction that is split over several blocks needs the buffer. The choice is retraced here in its own terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

WARP = 32
MOST_THREADS = 512
LEAST_VALUES, MOST_VALUES = 16, 256


@dataclass(frozen=True)
class Multiprocessors:
    """What of a card decides how a reduction is cut."""

    count: int
    threads: int


def reduction_buffers(source: torch.Tensor, dims: Sequence[int] | None, card: Multiprocessors) -> tuple[int, ...]:
    """The buffer and the semaphores of a reduction of `source` over `dims` (all when none), in bytes; often none."""
    inner, outer = _split(source, dims)
    outputs, inputs = prod(s for s, _ in outer), prod(s for s, _ in inner)
    if outputs == 0 or inputs <= 1:
        return ()
    element = 8 if source.dtype == torch.float64 else 4
    along_input = not outer or min((t for _, t in inner), default=0) < min((t for _, t in outer), default=1)
    return _buffers(source, inner, outer, outputs, inputs, element, along_input, card)


def _buffers(source, inner, outer, outputs, inputs, element, along_input, card):  # type: ignore[no-untyped-def]
    vector = 1
    dim0, dim1 = (inputs, outputs) if along_input else (outputs, inputs)
    fastest = min(t for _, t in (inner if along_input else outer))
    if fastest == 1:
        if along_input and dim0 > 128 and not outer and len(inner) == 1:
            dim0 //= 4
        elif not along_input:
            vector = _output_vector(source, inner, outer)
            dim0 //= vector
    threads = MOST_THREADS // vector
    width0, height0 = min(_last_power(dim0), threads), min(_last_power(dim1), threads)
    width = min(width0, WARP)
    height = min(height0, threads // width)
    width = min(width0, threads // height)
    step_input, step_output = (width, 1) if along_input else (1, width)
    if -(-inputs // step_input) < min(height * 16, MOST_VALUES):
        return ()
    step_input *= height
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    wanted = card.count * (card.threads // (width * height))
    if values < MOST_VALUES or grid > wanted:
        return ()
    blocks = max(min(-(-wanted // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    if blocks <= 1:
        return ()
    size = element * outputs * blocks * (1 if along_input else width * vector)
    return (size, 4 * grid)


def _split(source: torch.Tensor, dims: Sequence[int] | None) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(size, stride) of the reduced and the kept dimensions, neighbours that lie contiguously joined to one."""
    reduced = set(range(source.dim())) if not dims else {d % source.dim() for d in dims}
    parts: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    order = sorted(range(source.dim()), key=lambda d: source.stride(d))
    previous: bool | None = None
    for d in order:
        size, stride, kind = source.shape[d], source.stride(d), d in reduced
        if size == 1:
            continue
        last = parts[kind][-1] if parts[kind] else None
        if previous is kind and last is not None and last[0] * last[1] == stride:
            parts[kind][-1] = (last[0] * size, last[1])
        else:
            parts[kind].append((size, stride))
        previous = kind
    return parts[True], parts[False]


def _output_vector(source: torch.Tensor, inner: list[tuple[int, int]], outer: list[tuple[int, int]]) -> int:
    """Outputs that one thread reads at once: four, where sizes and strides allow."""
    vector = 4
    fastest = min(outer, key=lambda part: part[1])
    aligned = [
        source.storage_offset(),
        fastest[0],
        *(t for _, t in inner),
        *(t for p in outer if p != fastest for t in p[1:]),
    ]
    while vector > 1 and any(value % vector for value in aligned):
        vector //= 2
    return vector


def _last_power(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 1
