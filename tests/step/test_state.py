"""What is saved and restored goes on bit for bit; a rehearsal leaves no trace."""

import json
from typing import Any

import pytest
import torch

from brimful.core.errors import UsageError
from brimful.step.state import State, restore, rollback, save, snapshot

MIXED = {"weights": "bf16", "compute": "bf16", "gradients": "fp32", "optimizer": "fp32"}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "sgd": {"optimizer": {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}},
    "adafactor": {"optimizer": {"name": "adafactor", "learning_rate": 1e-2}},
    "masters": {"precision": MIXED},
    "fp16": {"precision": "fp16-scaled"},
    "groups": {"groups": [{"match": "*v_proj*", "learning_rate": "×10"}, {"match": "*q_proj*", "learning_rate": 0.5}]},
    "fused": {"pin": {"optimizer_impl": "fused"}},
}


def values(step) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    return {name: p.detach().clone() for name, p in step.parameters.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", RUNS)
def test_a_restored_step_goes_on_bit_for_bit(bench, kind: str) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama")
    step = bench.step(model, **RUNS[kind])
    for number in range(2):
        step.run(bench.batches(step, (2, 3), number))
    saved = save(step)
    data = json.loads(json.dumps(saved.data))
    expected = step.run(bench.batches(step, (2, 3), 2)), values(step)
    fresh = bench.step(model, **RUNS[kind])
    restore(fresh, State(saved.tensors, data))
    assert torch.equal(fresh.run(bench.batches(fresh, (2, 3), 2)), expected[0])
    assert same(values(fresh), expected[1])
    assert same(save(fresh).tensors, save(step).tensors)


def test_a_saved_state_does_not_change_as_training_goes_on(bench) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder("llama"))
    step.run(bench.batches(step, (5,)))
    saved = save(step)
    before = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    fresh = bench.step(bench.folder("llama"))
    restore(fresh, saved)
    for trained in (step, fresh):
        trained.run(bench.batches(trained, (5,), 1))
    assert same(saved.tensors, before)


def test_names_say_what_a_tensor_is(bench) -> None:  # type: ignore[no-untyped-def]
    step = bench.step(bench.folder("llama"), precision=MIXED)
    step.run(bench.batches(step, (5,)))
    saved = save(step)
    weight = "model.norm.weight"
    assert saved.tensors[f"weights/{weight}"].dtype == torch.bfloat16
    assert saved.tensors[f"masters/{weight}"].dtype == torch.float32
    assert saved.tensors[f"optimizer/{weight}/exp_avg"].shape == saved.tensors[f"weights/{weight}"].shape
    assert {tensor.device.type for tensor in saved.tensors.values()} == {"cpu"}


def test_the_optimizers_implementation_may_change_over_a_restore(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama")
    step = bench.step(model, {"optimizer_impl": "foreach"})
    step.run(bench.batches(step, (5,)))
    saved = save(step)
    step.run(bench.batches(step, (5,), 1))
    fused = bench.step(model, {"optimizer_impl": "fused"})
    restore(fused, saved)
    fused.run(bench.batches(fused, (5,), 1))
    assert fused.optimizer.param_groups[0]["fused"]
    torch.testing.assert_close(values(fused), values(step), rtol=1e-9, atol=1e-12)


def test_a_state_of_another_run_is_refused(bench) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama")
    saved = save(bench.step(model))
    with pytest.raises(UsageError, match="saved state"):
        restore(bench.step(model, method="lora"), saved)
    with pytest.raises(UsageError, match="was saved as"):
        restore(bench.step(bench.folder("llama", intermediate_size=64)), saved)


@pytest.mark.parametrize("kind", RUNS)
def test_a_rehearsal_leaves_weights_untouched_and_the_optimizer_at_step_0(bench, kind: str) -> None:  # type: ignore[no-untyped-def]
    model = bench.folder("llama")
    untouched, rehearsed = bench.step(model, **RUNS[kind]), bench.step(model, **RUNS[kind])
    before = snapshot(rehearsed)
    rehearsed.run(bench.batches(rehearsed, (5,)))
    rehearsed.accumulate(bench.batches(rehearsed, (5,))[0], 1)  # and one that was interrupted
    assert not same(values(rehearsed), values(untouched))
    storages = {tensor.data_ptr() for state in rehearsed.optimizer.state.values() for tensor in state.values()
                if isinstance(tensor, torch.Tensor)}  # fmt: skip
    rollback(rehearsed, before)
    assert same(values(rehearsed), values(untouched))
    after = {
        t.data_ptr() for s in rehearsed.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
    }
    assert after == storages
    for number in range(2):
        losses = [step.run(bench.batches(step, (2, 3), number)) for step in (untouched, rehearsed)]
        assert torch.equal(*losses)
    assert same(values(rehearsed), values(untouched))
