"""What only CUDA takes: sizes that were read off an H200's memory history, and CUDA's autocast on a CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.forecast.autocast import like_cuda
from brimful.forecast.persona import Persona
from brimful.forecast.recorder import Recorder
from brimful.forecast.reductions import Multiprocessors, reduction_buffers

H200 = Multiprocessors(132, 2048)
aten = torch.ops.aten


@pytest.fixture
def persona() -> Persona:
    return Persona((9, 0), H200)


def test_a_sum_over_many_rows_meets_in_a_buffer_of_the_size_that_the_gpu_took() -> None:
    rows = torch.empty(2, 1024, 2048, dtype=torch.bfloat16, device="meta")
    assert reduction_buffers(rows, [0, 1], H200) == (33_554_432, 64)


@pytest.mark.parametrize("dims", [[-1], [2]])
def test_a_sum_within_rows_needs_no_buffer(dims: list[int]) -> None:
    assert reduction_buffers(torch.empty(2, 1024, 4096, device="meta"), dims, H200) == ()


def test_the_first_product_of_each_thread_takes_a_workspace_and_later_ones_none(persona: Persona) -> None:
    assert persona.workspace(aten.addmm.default) == [32 << 20, 1 << 20]
    assert persona.workspace(aten.mm.default) == []
    assert Persona((8, 6), H200).workspace(aten.mm.default) == [8 * (1 << 20) + 128 * 1024]


@pytest.mark.parametrize(("tokens", "width", "largest"), [(16384, 1024, 73_818_112), (8192, 512, 18_454_528)])
def test_an_embeddings_gradient_takes_the_partial_sums_that_the_gpu_took(
    persona: Persona, tokens: int, width: int, largest: int
) -> None:
    grad = torch.empty(1, tokens, width, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    ((*_, partial),) = persona.temporaries(
        aten.embedding_dense_backward.default, (grad, ids, 151_936, -1, False), {}, None
    )
    assert partial == largest


def test_a_short_embeddings_gradient_is_not_sorted(persona: Persona) -> None:
    grad, ids = torch.empty(1, 1024, 64, device="meta"), torch.empty(1, 1024, dtype=torch.int64, device="meta")
    assert not persona.temporaries(aten.embedding_dense_backward.default, (grad, ids, 1000, -1, False), {}, None)
    assert persona.held(aten.embedding_dense_backward.default, (grad, ids)) == ((), ())


def test_gradients_that_meet_are_added_in_place_as_autograd_does_with_real_tensors(persona: Persona) -> None:
    def bytes_made(branches: int) -> int:
        recorder = Recorder(Persona((9, 0), H200))
        with FakeTensorMode(), recorder:
            x = torch.empty(64, 64, requires_grad=True)
            y = x * 2.0
            total = sum((y.exp() for _ in range(branches)), start=torch.zeros(()))
            before = len(recorder.made)
            total.sum().backward()
        return sum(m.size for m in recorder.made[before:] if m.op == "add.Tensor")

    assert bytes_made(3) == 0


def test_autocast_widens_what_cuda_widens_and_lets_go_afterwards() -> None:
    half = torch.randn(3, 4, dtype=torch.bfloat16)

    def types() -> list[torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            results = (
                half.pow(2),
                half.softmax(-1),
                half.sum(),
                half.cumsum(0),
                torch.nn.functional.layer_norm(half, (4,)),
                half @ half.T,
            )
        return [result.dtype for result in results]

    before = types()
    with like_cuda(True):
        assert types() == [*[torch.float32] * 5, torch.bfloat16]
    assert types() == before == [torch.bfloat16] * 6
