from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from brimful.core.errors import RunFileError, UsageError
from brimful.core.precision import PRESETS, Precision
from brimful.core.runfile import (
    KEYS,
    METHODS,
    OPTIMIZERS,
    Data,
    Lora,
    Optimizer,
    Pin,
    RunFile,
    Source,
    from_mapping,
    load,
    override,
    to_mapping,
)
from brimful.core.units import Batch, Duration, GiB

WHOLE = """
model: mistralai/Mistral-7B-v0.3
trust_remote_code: false
method: lora
lora: {rank: 8, alpha: 16, dropout: 0.1, targets: [q_proj, v_proj], save_modules: [lm_head], variant: dora, from: old}
precision: {weights: bf16, compute: bf16, gradients: fp32, optimizer: fp32, adapter: fp32}
data:
  train: [{path: a.jsonl, weight: 2}, b.parquet]
  validation: 1%
  max_length: 2048
  max_target_length: 64
  too_long: drop
  layout: concat
batch: 16384 tokens
epochs: 3
optimizer: {name: adamw-8bit, learning_rate: 2e-4, schedule: linear, warmup: 100 steps, clip: 0, betas: [0.9, 0.95]}
groups: [{match: "*indexer*", learning_rate: ×10, warmup: 1000 steps}]
evaluate: {every: 500 steps, samples: 4}
hardware: {gpu: a10g, count: 1, headroom: 1 GiB}
checkpoint: {every: 500 steps, keep: 3, mirror: s3://bucket/runs/x}
report_to: [tensorboard]
notify: [discord]
allow: [quantize]
pin: {micro_batch: 2, layout: unpadded, recompute: [7, 3], loss: chunked, loss_chunk: 512, optimizer_impl: fused}
seed: 7
"""


def test_every_key_of_a_whole_run_file_arrives(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(WHOLE, encoding="utf-8")
    run = load(path)
    assert run.data.train == (Source("a.jsonl", 2.0), Source("b.parquet"))
    assert run.batch == Batch(tokens=16384)
    assert run.optimizer.learning_rate == 2e-4
    assert run.optimizer.warmup == Duration(steps=100)
    assert run.groups[0].learning_rate == "×10"
    assert run.hardware.headroom == GiB
    assert run.pin.recompute == (3, 7)
    assert run.lora.source == "old"
    assert run.checkpoint.keep == "3"
    assert from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(run), allow_unicode=True))) == run


def test_a_model_is_enough() -> None:
    assert from_mapping({"model": "gpt2"}) == RunFile("gpt2")
    assert RunFile("gpt2").precision == PRESETS["bf16"]


runs = st.builds(
    RunFile,
    model=st.sampled_from(["gpt2", "org/name", "mod:Class"]),
    method=st.sampled_from(METHODS),
    lora=st.builds(
        Lora,
        rank=st.integers(1, 256),
        targets=st.sampled_from([None, "all-linear", ("q_proj",), ("q_proj", "v_proj")]),
        variant=st.sampled_from(["lora", "rslora", "dora"]),
    ),
    precision=st.sampled_from([*PRESETS.values(), Precision.parse({"weights": "bf16", "optimizer": "fp32"})]),
    data=st.builds(Data, max_length=st.integers(1, 4096), max_target_length=st.none() | st.integers(1, 512)),
    batch=st.builds(Batch, sequences=st.integers(64, 512)) | st.builds(Batch, tokens=st.integers(4096, 10**6)),
    epochs=st.none() | st.floats(0.1, 10),
    optimizer=st.builds(Optimizer, name=st.sampled_from(OPTIMIZERS), momentum=st.floats(0, 0.99)),
    pin=st.builds(
        Pin,
        micro_batch=st.none() | st.integers(1, 64),
        recompute=st.sampled_from(["none", "all", "half", "every-2nd", (), (0, 5)]),
        layout=st.sampled_from([None, "padded", "unpadded"]),
    ),
    seed=st.integers(0, 2**31),
)


@given(runs)
def test_written_and_read_it_is_the_same_run(run: RunFile) -> None:
    assert from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(run)))) == run
    assert override(run, {}) == run


@pytest.mark.parametrize(
    ("raw", "place", "offer"),
    [
        ({"model": "m", "metod": "lora"}, "metod", "method"),
        ({"model": "m", "lora": {"rnak": 8}}, "lora.rnak", "lora.rank"),
        ({"model": "m", "pin": {"micro-batch": 2}}, "pin.micro-batch", "pin.micro_batch"),
        ({"model": "m", "optimizer": {"lr": 1}}, "optimizer.lr", "learning_rate"),
        ({"model": "m", "groups": [{"match": "*", "rate": 1}]}, "groups[0].rate", "learning_rate"),
        ({"model": "m", "precision": {"optimiser": "fp32"}}, "precision.optimiser", "optimizer"),
    ],
)
def test_an_unknown_key_is_refused_with_its_place_and_the_nearest_known_one(
    raw: dict[str, object], place: str, offer: str
) -> None:
    with pytest.raises(RunFileError) as error:
        from_mapping(raw)
    assert place in error.value.message
    assert offer in str(error.value.hint)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "loora"}, "method"),
        ({"lora.rank": 0}, "lora.rank"),
        ({"lora.rank": "many"}, "lora.rank"),
        ({"lora.rank": 1.5}, "lora.rank"),
        ({"lora.dropout": 1.0}, "lora.dropout"),
        ({"lora.targets": []}, "lora.targets"),
        ({"data.max_length": 0}, "data.max_length"),
        ({"batch": "none"}, "batch"),
        ({"batch": 2.5}, "batch"),
        ({"batch": 0}, "batch"),
        ({"batch": "100 tokens"}, "batch"),
        ({"epochs": 1, "steps": 10}, "epochs"),
        ({"epochs": 0}, "epochs"),
        ({"optimizer.name": "adam"}, "optimizer.name"),
        ({"optimizer.warmup": 100}, "optimizer.warmup"),
        ({"optimizer.betas": [0.9]}, "optimizer.betas"),
        ({"optimizer.learning_rate": -1}, "optimizer.learning_rate"),
        ({"optimizer.learning_rate": "nan"}, "optimizer.learning_rate"),
        ({"hardware.headroom": "much"}, "hardware.headroom"),
        ({"hardware.count": 0}, "hardware.count"),
        ({"checkpoint.keep": "some"}, "checkpoint.keep"),
        ({"pin.micro_batch": 9, "batch": 8}, "pin.micro_batch"),
        ({"pin.recompute": "some"}, "pin.recompute"),
        ({"pin.recompute": [-1]}, "pin.recompute"),
        ({"pin.recompute": False}, "pin.recompute"),
        ({"pin.loss_chunk": 512}, "pin.loss"),
        ({"allow": ["magic"]}, "allow"),
        ({"trust_remote_code": "yes"}, "trust_remote_code"),
        ({"precision": {"weights": "fp16"}}, "precision.weights"),
        ({"lora": 8}, "lora"),
        ({"model": " "}, "model"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_that_names_the_key(change: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError) as error:
        override(RunFile("gpt2"), change)
    assert named in error.value.message
    assert "\n" not in error.value.message
    assert error.value.hint


def test_flags_win_over_the_file_and_none_leaves_a_key_alone() -> None:
    run = override(from_mapping(yaml.safe_load(WHOLE)), {"lora.rank": 32, "batch": "4", "method": None, "steps": 10})
    assert (run.lora.rank, run.batch, run.method) == (32, Batch(sequences=4), "lora")
    assert (run.steps, run.epochs) == (10, None)
    assert run.lora.alpha == 16


def test_a_part_of_a_precision_can_be_set_over_a_preset() -> None:
    run = override(RunFile("gpt2"), {"precision.adapter": "bf16", "precision": "fp32-autocast"})
    assert run.precision == Precision("fp32", "bf16", "fp32", "fp32", "bf16")


@pytest.mark.parametrize("text", ["all-linear", "q_proj", "q_proj, v_proj"])
def test_lora_targets_may_be_written_as_on_a_command_line(text: str) -> None:
    targets = override(RunFile("gpt2"), {"lora.targets": text}).lora.targets
    assert targets == (text if text == "all-linear" else tuple(text.split(", ")))


def test_an_optimizer_may_be_just_its_name() -> None:
    run = override(RunFile("gpt2"), {"optimizer": "sgd", "optimizer.momentum": 0.9})
    assert run.optimizer == Optimizer(name="sgd", momentum=0.9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: [", "line"),
        ("- a\n- b\n", "keys and values"),
        ("", "keys and values"),
        ("method: lora\n", "model is missing"),
        ("model: a\nmodel: b\n", "twice"),
        ("model: \x00", "YAML"),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RunFileError) as error:
        load(path)
    assert str(path) in error.value.message
    assert says in error.value.message


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="nowhere"):
        load(tmp_path / "nowhere.yaml")


def test_every_key_is_documented_once() -> None:
    names = [key.name for key in KEYS]
    assert len(names) == len(set(names))
    assert all(key.help for key in KEYS)
    assert {"lora.from", "pin.recompute", "precision.adapter", "groups.match", "optimizer.warmup"} <= set(names)


def test_a_run_file_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RunFile("gpt2").seed = 1  # type: ignore[misc]
