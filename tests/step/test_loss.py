"""Losses are sums; the chunked one is the plain one with less memory."""

import weakref
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.step.loss import (
    IGNORE,
    default_chunk,
    linear_cross_entropy,
    plain,
    softmax_cross_entropy_,
)

TOKENS, HIDDEN, VOCAB = 13, 6, 17


def problem(kind: torch.dtype = torch.float64, ignored: bool = True) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=kind)
    head = nn.Linear(HIDDEN, VOCAB, dtype=kind)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    if ignored:
        labels[::3] = IGNORE
    return hidden, head, labels


def gradients(loss, hidden, head, labels, trainable: bool, incoming: float = 0.7) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    hidden = hidden.clone().requires_grad_()
    head.requires_grad_(trainable).zero_grad()
    total = loss(hidden, head, labels)
    (total * incoming).backward()
    found = [total.detach(), hidden.grad]
    if trainable:
        found += [p.grad.clone() for p in head.parameters()]
    return found


@pytest.mark.parametrize("kernel", ["torch", "liger"])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("ignored", [True, False])
def test_the_chunked_loss_and_its_gradients_are_the_plain_ones(kernel: str, trainable: bool, ignored: bool) -> None:
    hidden, head, labels = problem(ignored=ignored)
    bare = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64)
    for chunk, softcap, scale, head_ in product((1, 4, 64), (None, 2.0), (1.0, 0.3), (head, bare)):

        def reference(h, w, y, softcap=softcap, scale=scale):  # type: ignore[no-untyped-def]
            return plain(h, w, y, softcap=softcap, scale=scale)

        def chunked(h, w, y, chunk=chunk, softcap=softcap, scale=scale):  # type: ignore[no-untyped-def]
            return linear_cross_entropy(
                h, w.weight, w.bias, y, chunk=chunk, kernel=kernel, softcap=softcap, scale=scale
            )

        expected = gradients(reference, hidden, head_, labels, trainable)
        found = gradients(chunked, hidden, head_, labels, trainable)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_head_can_learn_while_the_hidden_states_are_frozen() -> None:
    hidden, head, labels = problem()
    plain(hidden, head, labels).backward()
    expected = head.weight.grad.clone()
    head.zero_grad()
    linear_cross_entropy(hidden, head.weight, head.bias, labels, chunk=4).backward()
    torch.testing.assert_close(head.weight.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_are_those_of_finite_differences(softcap: float | None) -> None:
    hidden, head, labels = problem()
    inputs = (hidden.requires_grad_(), head.weight, head.bias)

    def loss(h, w, b):  # type: ignore[no-untyped-def]
        return linear_cross_entropy(h, w, b, labels, chunk=5, softcap=softcap, scale=0.5)

    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


def test_a_graph_is_differentiated_twice_only_if_it_was_retained() -> None:
    hidden, head, labels = problem()
    hidden.requires_grad_()
    total = linear_cross_entropy(hidden, head.weight, head.bias, labels, chunk=4)
    (first,) = torch.autograd.grad(total, hidden, torch.tensor(2.0).double(), retain_graph=True)
    (second,) = torch.autograd.grad(total, hidden)
    assert torch.equal(first, 2 * second)
    with pytest.raises(RuntimeError, match="twice"):
        total.backward()


def test_without_gradients_the_sum_is_the_same_and_nothing_is_kept() -> None:
    hidden, head, labels = problem()
    with torch.no_grad():
        total = linear_cross_entropy(hidden.requires_grad_(), head.weight, head.bias, labels, chunk=4)
        assert not total.requires_grad
        torch.testing.assert_close(total, plain(hidden, head, labels), rtol=1e-12, atol=1e-12)


def test_nothing_but_ignored_labels_costs_nothing() -> None:
    hidden, head, labels = problem()
    labels[:] = IGNORE
    total, hidden_grad, *head_grads = gradients(
        lambda h, w, y: linear_cross_entropy(h, w.weight, w.bias, y, chunk=4), hidden, head, labels, True
    )
    assert total == 0
    assert all(g.count_nonzero() == 0 for g in (hidden_grad, *head_grads))


def chunked(hidden: Tensor, head: nn.Linear, labels: Tensor, **options: Any) -> Tensor:
    return linear_cross_entropy(hidden, head.weight, head.bias, labels, **options)


def test_the_sums_of_slices_add_up_to_that_of_the_whole() -> None:
    hidden, head, labels = problem()
    for loss in (plain, partial(chunked, chunk=3), partial(chunked, chunk=7, kernel="liger", softcap=4.0)):
        whole = loss(hidden, head, labels)
        parts = [loss(hidden[part], head, labels[part]) for part in (slice(0, 5), slice(5, 6), slice(6, None))]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", ["torch", "liger"])
def test_half_precision_is_close_to_double_and_summed_in_fp32(kernel: str) -> None:
    hidden, head, labels = problem()
    expected = gradients(plain, hidden, head, labels, True)
    head16 = nn.Linear(HIDDEN, VOCAB, dtype=torch.bfloat16)
    head16.load_state_dict(head.state_dict())
    found = gradients(
        lambda h, w, y: linear_cross_entropy(h, w.weight, w.bias, y, chunk=4, kernel=kernel),
        hidden.bfloat16(),
        head16,
        labels,
        True,
    )
    assert found[0].dtype == torch.float32
    assert {g.dtype for g in found[1:]} == {torch.bfloat16}
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other.double(), rtol=0.05, atol=0.05)


def test_an_fp32_head_under_bf16_compute_gets_its_gradient_in_fp32() -> None:
    hidden, head, labels = problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = linear_cross_entropy(hidden.bfloat16().requires_grad_(), head.weight, head.bias, labels, chunk=4)
    total.backward()
    assert head.weight.grad.dtype == head.bias.grad.dtype == torch.float32
    torch.testing.assert_close(total, plain(hidden, head, labels), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "chunk"),
    [(16384, 4096, 32000, 2048), (4096, 4096, 128256, 128), (100, 4096, 1000, 100), (1, 8, 8000, 1), (0, 8, 80, 1)],
)
def test_the_default_chunk_is_ligers(tokens: int, hidden: int, vocab: int, chunk: int) -> None:
    assert default_chunk(tokens, hidden, vocab) == chunk


class Meter(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, while they live, and remembers the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0
        self.widest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        known = {t.untyped_storage()._cdata for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage()._cdata not in known:
            storage, size = out.untyped_storage(), out.untyped_storage().nbytes()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = size
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return out

    @property
    def alive(self) -> int:
        return sum(self.sizes.values())


@pytest.mark.parametrize(("kernel", "bytes_per_logit"), [("torch", 6), ("liger", 2)])
@pytest.mark.parametrize("trainable", [True, False])
def test_logits_cost_one_chunk_and_nothing_as_wide_survives_forward(
    kernel: str, bytes_per_logit: int, trainable: bool
) -> None:
    tokens, width, vocab, chunk = 4096, 64, 32000, 256
    with FakeTensorMode():
        hidden = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, width, dtype=torch.bfloat16, requires_grad=trainable)
        labels = torch.empty(tokens, dtype=torch.long)
        with Meter() as meter:
            total = linear_cross_entropy(hidden, weight, None, labels, chunk=chunk, kernel=kernel)
            kept = meter.alive
            total.backward()
    small = 64 * 1024
    grad_hidden, grad_head = 2 * tokens * width, vocab * width if trainable else 0
    assert kept == pytest.approx(grad_hidden + 2 * grad_head, abs=small)
    logits = chunk * vocab * bytes_per_logit
    assert meter.peak == pytest.approx(grad_hidden + max(logits + 4 * grad_head, 6 * grad_head), abs=small)
    assert hidden.grad is not None


def test_the_operator_returns_losses_in_fp32_and_changes_the_logits_in_place() -> None:
    logits, labels = torch.randn(4, 9), torch.tensor([1, IGNORE, 8, 0])
    before = logits.clone()
    losses = softmax_cross_entropy_(logits, labels, None, True)
    expected = before.softmax(1) - nn.functional.one_hot(labels.clamp_min(0), 9)
    expected[1] = 0
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(losses, nn.functional.cross_entropy(before, labels, reduction="none"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["torch", "liger"])
def test_a_gpu_computes_the_plain_loss_in_either_kernel(kernel: str) -> None:
    if kernel == "liger":
        pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda")
    head = nn.Linear(64, 40000, device="cuda")
    labels = torch.randint(0, 40000, (300,), device="cuda")
    labels[::4] = IGNORE
    for softcap in (None, 3.0):
        expected = gradients(lambda h, w, y, c=softcap: plain(h, w, y, softcap=c), hidden, head, labels, True)
        found = gradients(
            lambda h, w, y, c=softcap: linear_cross_entropy(h, w.weight, w.bias, y, chunk=64, kernel=kernel, softcap=c),
            hidden,
            head,
            labels,
            True,
        )
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
