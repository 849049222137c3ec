"""Dropout whose randomness belongs to the row.

A mask is a pure function of (seed, step, row, position in the row, module, feature). No generator state is read or
advanced, so masks do not depend on how a step is sliced, on padding, on retries, on resuming or on the number of GPUs,
and recomputed layers see the mask they saw before. Backward computes the mask again: nothing is stored, and each
direction allocates its output and nothing else.

Two hashes make a mask. `token_keys` mixes what is known once per token into 64 bits, once per micro-batch. Each element
then costs two rounds of murmur3's 32-bit finaliser over those 64 bits, the module and the feature: 32-bit arithmetic is
what GPUs and CPU vector units are fast at, and wrapping 32-bit products are the same everywhere, so that CPU and CUDA
agree bit for bit.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn

Stream = Literal["tokens", "decoder"]

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_GOLDEN32 = 0x9E3779B9
_GOLDEN64 = 0x9E3779B97F4A7C15
_HEAD_BITS = 20
# Elements hashed at a time on a CPU: two int32 buffers of 1 MiB stay in a core's cache.
_CPU_ELEMENTS = 1 << 18


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned number: what an int32 or int64 tensor can hold."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _mix64_int(value: int) -> int:
    """splitmix64's finaliser on a Python integer; `_mix64` is the same on tensors."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _mix64(value: Tensor) -> Tensor:
    """`_mix64_int` for int64 tensors, whose products wrap and whose shifts drag the sign along (hence the masks)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ ((value >> shift) & (_MASK64 >> shift))) * _signed(factor, 64)
    return value ^ ((value >> 31) & (_MASK64 >> 31))


def token_keys(seed: int, step: int, row_ids: Tensor, positions: Tensor) -> Tensor:
    """One 64-bit key per token, from the token's row and its position within that row.

    `row_ids` and `positions` are integer tensors that broadcast: [B, 1] with [B, S] for a padded micro-batch, [T] with
    [T] for an unpadded one. The key does not depend on where in the micro-batch the token lies.
    """
    base = _mix64_int(_mix64_int((seed * _GOLDEN64 + 1) & _MASK64) ^ (step & _MASK64))
    rows = _mix64(row_ids.long() ^ _signed(base, 64))
    return _mix64(rows + positions.long() * _signed(_GOLDEN64, 64))


class RowKeys:
    """The token keys of the micro-batch being worked on: `with RowKeys(keys): forward; backward`.

    Active keys lie on one stack per process, not per thread: autograd recomputes checkpointed layers on threads of its
    own, and those must see the same keys. The context therefore has to stay open until backward has ended.

    `decoder` holds the keys of the decoder's tokens in an encoder-decoder, `tokens` being the encoder's. The positions
    ([B, S] like padded keys) are needed only by models whose dropout module is applied to attention probabilities.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        decoder: Tensor | None = None,
        positions: Tensor | None = None,
        decoder_positions: Tensor | None = None,
    ) -> None:
        self._keys: dict[Stream, Tensor | None] = {"tokens": tokens, "decoder": decoder}
        self._positions: dict[Stream, Tensor | None] = {"tokens": positions, "decoder": decoder_positions}

    def __enter__(self) -> "RowKeys":
        _ACTIVE.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.remove(self)

    @staticmethod
    def current() -> "RowKeys":
        """The innermost open keys; it is an error to drop anything without."""
        if not _ACTIVE:
            raise RuntimeError("row-keyed dropout ran outside `with RowKeys(...)`: forward and backward belong inside")
        return _ACTIVE[-1]

    def drop(self, x: Tensor, module_id: int, p: float, stream: Stream) -> Tensor:
        """Apply dropout to `x`, whose tokens are those of `stream` or, if only those fit, of the other stream."""
        tokens = x.shape[:-1].numel()
        other: Stream = "decoder" if stream == "tokens" else "tokens"
        for name in (stream, other):
            keys = self._keys[name]
            if keys is not None and keys.numel() == tokens:
                return keyed_dropout(x, keys, module_id, p)
        if x.dim() == 4:
            for name in (stream, other):
                queries = self._keys[name]
                for key_positions in (self._positions[name], self._positions["tokens"]):
                    if queries is None or queries.dim() != 2 or key_positions is None:
                        continue
                    if (x.shape[0], x.shape[2]) == queries.shape and (x.shape[0], x.shape[3]) == key_positions.shape:
                        return keyed_dropout_scores(x, queries, key_positions, module_id, p)
        known = {name: tuple(keys.shape) for name, keys in self._keys.items() if keys is not None}
        raise RuntimeError(f"dropout on a tensor of shape {tuple(x.shape)}, whose tokens are none of {known}")


_ACTIVE: list[RowKeys] = []


class RowDropout(nn.Dropout):
    """`nn.Dropout` that draws from the current `RowKeys`.

    A subclass, because attention modules read `.p` of their dropout and pass it to their kernel. A module that is
    called twice in one forward uses the same mask twice: which call it is could not be told apart in recomputation.
    """

    def __init__(self, p: float, module_id: int, stream: Stream = "tokens") -> None:
        super().__init__(p)
        self.module_id = module_id
        self.stream: Stream = stream

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return RowKeys.current().drop(x, self.module_id, self.p, self.stream)

    def extra_repr(self) -> str:
        return f"p={self.p}, stream={self.stream}"


def module_id(qualified_name: str) -> int:
    """A stable 64-bit name of a module: not Python's `hash`, which differs from process to process."""
    name = re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module)(?=\.|$)", "", qualified_name).lstrip(".")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


_CROSS_KEYS_AND_VALUES = re.compile(
    r"(encdecattention|encoder_attn|cross_?attn|crossattention).*\.(k|v|key|value)(_proj)?\."
)


def _stream(name: str) -> Stream:
    """Whose tokens pass through a module: the decoder's, except the keys and values of cross-attention."""
    if "decoder" not in name.split(".") or _CROSS_KEYS_AND_VALUES.search(name.lower() + "."):
        return "tokens"
    return "decoder"


def install(model: nn.Module, named_modules: Iterable[tuple[str, nn.Module]] | None = None) -> int:
    """Replace every `nn.Dropout` with p > 0 by a `RowDropout` named after its place; returns how many places.

    `named_modules` restricts the replacement to some of the model's (name, module) pairs. A module that appears at
    several places stays one module. Dropout through `torch.nn.functional` is no module and is not reached.
    """
    config = getattr(model, "config", None)
    two_streams = bool(getattr(config, "is_encoder_decoder", False))
    places = list(model.named_modules(remove_duplicate=False) if named_modules is None else named_modules)
    replaced: dict[nn.Module, RowDropout] = {}
    count = 0
    for name, module in places:
        if not isinstance(module, nn.Dropout) or isinstance(module, RowDropout) or module.p == 0.0:
            continue
        if module not in replaced:
            replaced[module] = RowDropout(module.p, module_id(name), _stream(name) if two_streams else "tokens")
            replaced[module].train(module.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced[module])
        count += 1
    return count


def keyed_dropout(x: Tensor, keys: Tensor, module_id: int, p: float) -> Tensor:
    """Drop element (token, feature) of `x` iff hash(key of the token, module, feature) < p·2³²; scale by 1/(1-p).

    `x` is [..., features] and its leading dimensions, flattened, are the tokens of `keys`, flattened.
    """
    if keys.numel() != x.shape[:-1].numel():
        raise ValueError(f"{keys.numel()} token keys for a tensor of shape {tuple(x.shape)}")
    return x if p == 0.0 else _row_dropout(x, keys, module_id, p)


def keyed_dropout_scores(probs: Tensor, query_keys: Tensor, key_positions: Tensor, module_id: int, p: float) -> Tensor:
    """Dropout of attention probabilities [B, H, Q, K]; the feature is head·2²⁰ + the key's position within its row."""
    batch, heads, queries, keys = probs.shape
    if query_keys.shape != (batch, queries) or key_positions.shape != (batch, keys) or heads > 1 << 12:
        raise ValueError(
            f"attention probabilities {tuple(probs.shape)} with query keys {tuple(query_keys.shape)} "
            f"and key positions {tuple(key_positions.shape)}"
        )
    return probs if p == 0.0 else _row_dropout_scores(probs, query_keys, key_positions, module_id, p)


@cache
def threshold_and_scale(p: float) -> tuple[int, float]:
    """The bound below which a 32-bit hash means "drop", read as a signed number with its top bit flipped; the scale."""
    threshold = min(round(p * 2**32), _MASK32)
    return threshold - 2**31, 0.0 if p == 1.0 else 1.0 / (1.0 - p)


@cache
def module_salts(module_id: int) -> tuple[int, int]:
    """Two int32 numbers that stand for a module; mixed, so that neighbouring ids are not neighbours."""
    salt = _mix64_int((module_id & _MASK64) ^ _GOLDEN64)
    return _signed(salt & _MASK32, 32), _signed(salt >> 32, 32)


def _mix32_(value: Tensor, spare: Tensor) -> Tensor:
    """murmur3's finaliser in place on int32; `spare` has the same shape and is overwritten."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        torch.bitwise_right_shift(value, shift, out=spare)
        value.bitwise_xor_(spare.bitwise_and_(_MASK32 >> shift))
        if factor is not None:
            value.mul_(_signed(factor, 32))
    return value


def _token_states(keys: Tensor, module_id: int) -> tuple[Tensor, Tensor]:
    """The two int32 words with which a token enters every element's hash in a module."""
    words = []
    for half, salt in zip((keys, keys >> 32), module_salts(module_id), strict=True):
        low = half & _MASK32
        word = torch.where(low >= 1 << 31, low - (1 << 32), low).int().bitwise_xor_(salt)
        words.append(_mix32_(word, torch.empty_like(word)))
    return words[0], words[1]


def _drop_rows(x: Tensor, out: Tensor, states: tuple[Tensor, Tensor], features: Tensor, p: float) -> None:
    """Dropout of a matrix [tokens, features] on the CPU, a few rows at a time so that temporaries stay in the cache."""
    threshold, scale = threshold_and_scale(p)
    first, second = (state.unsqueeze(1) for state in states)
    stride = features * _signed(_GOLDEN32, 32)
    rows = max(1, _CPU_ELEMENTS // max(1, x.shape[1]))
    hashes, spare = (torch.empty((min(rows, x.shape[0]), x.shape[1]), dtype=torch.int32) for _ in range(2))
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        h, s = hashes[: x[part].shape[0]], spare[: x[part].shape[0]]
        torch.add(first[part], stride, out=h)
        _mix32_(_mix32_(h, s).bitwise_xor_(second[part]), s)
        dropped = h.bitwise_xor_(-(2**31)) < threshold
        torch.mul(x[part], scale, out=out[part]).masked_fill_(dropped, 0)


@torch.library.custom_op("brimful::row_dropout", mutates_args=(), device_types="cpu")
def _row_dropout(x: Tensor, keys: Tensor, module_id: int, p: float) -> Tensor:
    out = x.new_empty(x.shape)
    features = torch.arange(x.shape[-1], dtype=torch.int32)
    flat = (x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1]))
    _drop_rows(*flat, _token_states(keys.reshape(-1), module_id), features, p)
    return out


@_row_dropout.register_kernel("cuda")
def _(x: Tensor, keys: Tensor, module_id: int, p: float) -> Tensor:
    from brimful.step import dropout_triton

    return dropout_triton.row_dropout(x, keys, module_salts(module_id), *threshold_and_scale(p))


@_row_dropout.register_fake
def _(x: Tensor, keys: Tensor, module_id: int, p: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("brimful::row_dropout_scores", mutates_args=(), device_types="cpu")
def _row_dropout_scores(probs: Tensor, query_keys: Tensor, key_positions: Tensor, module_id: int, p: float) -> Tensor:
    out = probs.new_empty(probs.shape)
    for row in range(probs.shape[0]):
        states = _token_states(query_keys[row], module_id)
        for head in range(probs.shape[1]):
            features = (key_positions[row] + (head << _HEAD_BITS)).int()
            _drop_rows(probs[row, head], out[row, head], states, features, p)
    return out


@_row_dropout_scores.register_kernel("cuda")
def _(probs: Tensor, query_keys: Tensor, key_positions: Tensor, module_id: int, p: float) -> Tensor:
    from brimful.step import dropout_triton

    return dropout_triton.row_dropout_scores(
        probs, query_keys, key_positions, module_salts(module_id), *threshold_and_scale(p)
    )


@_row_dropout_scores.register_fake
def _(probs: Tensor, query_keys: Tensor, key_positions: Tensor, module_id: int, p: float) -> Tensor:
    return probs.new_empty(probs.shape)


# The derivative of dropout is dropout with the same mask. The keys are saved as they are: they are alive anyway.
def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.module_id, ctx.p = inputs
    ctx.save_for_backward(*tensors[1:])


def _row_dropout_backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _row_dropout(grad, *ctx.saved_tensors, ctx.module_id, ctx.p), None, None, None


def _row_dropout_scores_backward(ctx, grad):  # type: ignore[no-untyped-def]
    return _row_dropout_scores(grad, *ctx.saved_tensors, ctx.module_id, ctx.p), None, None, None, None


_row_dropout.register_autograd(_row_dropout_backward, setup_context=_save)
_row_dropout_scores.register_autograd(_row_dropout_scores_backward, setup_context=_save)
