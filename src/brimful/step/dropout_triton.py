"""The CUDA half of `dropout`: one Triton kernel, the same hash as on the CPU, one allocation (the output).

A file of its own because it imports Triton, which a machine that only forecasts does not have.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix32(h):
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    h ^= h >> 16
    return h


@triton.jit(do_not_specialize=["salt0", "salt1", "threshold"])
def _drop(
    x_ptr,
    out_ptr,
    keys_ptr,
    positions_ptr,
    rows,
    columns,
    heads,
    queries,
    x_batch,
    x_head,
    x_query,
    x_column,
    keys_batch,
    keys_query,
    positions_batch,
    positions_column,
    salt0,
    salt1,
    threshold,
    scale: tl.constexpr,
    scores: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    # A row is (batch, head, query); without heads it is a token. Rows and columns are tiled; the state of a token is
    # hashed once per row of a tile, so that an element costs two finalisers.
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    in_rows = row < rows
    inside = in_rows[:, None] & (column < columns)[None, :]
    query = row % queries
    head = (row // queries) % heads
    batch = row // queries // heads

    key = tl.load(keys_ptr + batch * keys_batch + query * keys_query, mask=in_rows, other=0)
    first = _mix32(key.to(tl.uint32) ^ salt0.to(tl.uint32, bitcast=True))
    second = _mix32((key >> 32).to(tl.uint32) ^ salt1.to(tl.uint32, bitcast=True))
    if scores:
        where = batch[:, None] * positions_batch + column[None, :] * positions_column
        position = tl.load(positions_ptr + where, mask=inside, other=0)
        feature = ((head << 20)[:, None] + position).to(tl.uint32)
    else:
        feature = column.to(tl.uint32)[None, :]
    h = _mix32(_mix32(first[:, None] + feature * 0x9E3779B9) ^ second[:, None])
    dropped = (h ^ 0x80000000).to(tl.int32, bitcast=True) < threshold

    source = batch * x_batch + head * x_head + query * x_query
    x = tl.load(x_ptr + source[:, None] + column.to(tl.int64)[None, :] * x_column, mask=inside)
    if x_ptr.dtype.element_ty == tl.float64:
        scaled = x * tl.full((1, 1), scale, tl.float64)
    else:
        scaled = x.to(tl.float32) * scale
    kept = tl.where(dropped, 0.0, scaled).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * columns + column[None, :], kept, mask=inside)


def _launch(
    x: Tensor,
    out: Tensor,
    keys: Tensor,
    positions: Tensor | None,
    salts: tuple[int, int],
    threshold: int,
    scale: float,
) -> None:
    """`x` and `out` are [batch, heads, queries, columns], `keys` [batch, queries], `positions` [batch, columns]."""
    batch, heads, queries, columns = x.shape
    rows = batch * heads * queries
    if rows == 0 or columns == 0:
        return
    block_columns = min(triton.next_power_of_2(columns), 1024)
    block_rows = 2048 // block_columns if block_columns >= 16 else 128
    with torch.cuda.device(x.device) if x.is_cuda else torch.no_grad():
        _drop[(triton.cdiv(rows, block_rows), triton.cdiv(columns, block_columns))](
            x,
            out,
            keys,
            keys if positions is None else positions,
            rows,
            columns,
            heads,
            queries,
            *x.stride(),
            *keys.stride(),
            *((0, 0) if positions is None else positions.stride()),
            *salts,
            threshold,
            scale=scale,
            scores=positions is not None,
            tile_rows=block_rows,
            tile_columns=block_columns,
        )


def row_dropout(x: Tensor, keys: Tensor, salts: tuple[int, int], threshold: int, scale: float) -> Tensor:
    """Dropout of [..., features]; up to two leading dimensions of any strides are read in place, more are copied."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    leading = x if x.dim() <= 3 else x.reshape(-1, *x.shape[-2:])
    while leading.dim() < 3:
        leading = leading.unsqueeze(0)
    shape = leading.shape[:2]
    _launch(
        leading.unsqueeze(1), out.view(leading.shape).unsqueeze(1), keys.reshape(shape), None, salts, threshold, scale
    )
    return out


def row_dropout_scores(
    probs: Tensor, query_keys: Tensor, key_positions: Tensor, salts: tuple[int, int], threshold: int, scale: float
) -> Tensor:
    """Dropout of attention probabilities [B, H, Q, K] of any strides."""
    out = torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)
    _launch(probs, out, query_keys, key_positions, salts, threshold, scale)
    return out
