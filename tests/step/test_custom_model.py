"""A model of the user's own: Class(**model_config), layers, head, and whether it can run unpadded."""

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from brimful.core.errors import ModelError, UsageError
from brimful.core.runfile import from_mapping, to_mapping
from brimful.forecast import forecast
from brimful.step.assemble import full_rows
from brimful.step.batch import make_batch

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return x + self.dropout(self.out(weights @ v))


class Model(nn.Module):
    supports_unpadded = True

    def __init__(self, vocab_size, width=16, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab_size)
        self.register_buffer("waves", torch.arange(1, width + 1) * 0.1, persistent=False)

    def forward(self, input_ids, position_ids, row_starts):
        x = self.embed(input_ids) + torch.sin(position_ids.unsqueeze(-1) * self.waves)
        places = torch.arange(input_ids.shape[1])
        mask = places[None, :] <= places[:, None]
        if row_starts is not None:
            rows = torch.searchsorted(row_starts, places.int(), right=True)
            mask = mask & (rows[None, :] == rows[:, None])
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Padded(Model):
    supports_unpadded = False


class Logits(Model):
    def __init__(self, **config):
        super().__init__(**config)
        self.to_logits = self.head
        del self.head

    def forward(self, *inputs):
        return self.to_logits(super().forward(*inputs))


class WideScale(Model):
    def __init__(self, **config):
        super().__init__(**config)
        self.last = nn.Parameter(torch.ones((), dtype=torch.float32))

    def forward(self, *inputs):
        hidden = super().forward(*inputs)
        return (hidden * self.last).to(hidden.dtype)


class NoLayers(Model):
    def __init__(self, **config):
        super().__init__(**config)
        del self.layers

    def forward(self, input_ids, position_ids, row_starts):
        return self.embed(input_ids)


class Peeks(Model):
    def forward(self, input_ids, position_ids, row_starts):
        if input_ids.max() > 3:  # PEEKS
            position_ids = position_ids + 1
        return super().forward(input_ids, position_ids, row_starts)


class Reads(Model):
    def forward(self, input_ids, position_ids, row_starts):
        longest = int(position_ids.max().item())  # READS
        return super().forward(input_ids, position_ids, row_starts)[:, : longest + 1]


class Picks(Model):
    def forward(self, input_ids, position_ids, row_starts):
        states = super().forward(input_ids, position_ids, row_starts)
        return states.reshape(-1, states.shape[-1])[input_ids.reshape(-1).nonzero().squeeze(1)]  # PICKS


class Leaves(Model):
    def forward(self, input_ids, position_ids, row_starts):
        longest = position_ids.numpy().max()  # LEAVES
        return super().forward(input_ids, position_ids, row_starts)


class Misfits(Model):
    def forward(self, input_ids, position_ids, row_starts):
        return super().forward(input_ids, position_ids, row_starts) @ torch.ones(3, 3)  # MISFITS


class Breaks(Model):
    def __init__(self, **config):
        super().__init__(**config)
        self.depth = 1 // (len(self.layers) - 2)  # BREAKS


def not_a_model(**config):
    return 3
"""
CONFIG = {"vocab_size": 61}
_numbers = count()


class User:
    """The user's file, and runs of the classes in it."""

    def __init__(self, folder: Path) -> None:
        self.name = f"users_model_{next(_numbers)}"
        self.file = folder / f"{self.name}.py"
        self.file.write_text(MODEL)

    def keys(self, name: str, **keys: Any) -> dict[str, Any]:
        return {"model": f"{self.name}:{name}", "model_config": CONFIG, **keys}

    def line(self, mark: str) -> str:
        number = next(i for i, line in enumerate(MODEL.splitlines(), 1) if f"# {mark}" in line)
        return f"{self.file}:{number}"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[User]:
    made = User(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield made
    sys.modules.pop(made.name, None)


def step_of(bench, user: User, name: str, pin: dict[str, Any] | None = None, **keys: Any):  # type: ignore[no-untyped-def]
    return bench.step(**user.keys(name, pin=pin or {}, **keys))


def after(bench, user: User, name: str, slices: tuple[int, ...], pin: dict[str, Any], **keys: Any):  # type: ignore[no-untyped-def]
    step = step_of(bench, user, name, pin, **keys)
    rows, start, batches = bench.rows(step), 0, []
    for number in slices:
        padded = pin.get("layout") != "unpadded"
        batches.append(make_batch(rows[start : start + number], padded=padded, seed=3))
        start += number
    loss = step.run(batches)
    return loss, {parameter: p.detach() for parameter, p in step.parameters.items()}


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_custom_model_obeys_the_law_of_the_step(bench, user: User, method: str) -> None:  # type: ignore[no-untyped-def]
    keys = {"method": method, "lora": {"targets": ["qkv", "out"]}}
    expected = after(bench, user, "Model", (5,), {}, **keys)
    for slices, pin in (
        ((1,) * 5, {"recompute": "all"}),
        ((2, 3), {"loss": "chunked"}),
        ((2, 3), {"layout": "unpadded", "loss": "chunked", "recompute": [1]}),
    ):
        found = after(bench, user, "Model", slices, pin, **keys)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_qlora_leaves_the_head_of_a_custom_model_whole(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    step = step_of(bench, user, "Model", {"loss": "chunked"}, method="qlora", lora={"targets": ["qkv"]})
    assert type(step.model.head) is torch.nn.Linear


def test_buffers_that_are_computed_in_the_constructor_have_their_values(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    step = step_of(bench, user, "Model")
    assert torch.equal(step.model.base.waves, (torch.arange(1, 17) * 0.1).to(step.model.base.waves.dtype))


def test_a_model_that_returns_logits_learns_by_the_plain_loss_as_one_with_a_head(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    (with_head, _), (with_logits, _) = (after(bench, user, name, (5,), {}) for name in ("Model", "Logits"))
    torch.testing.assert_close(with_logits, with_head, rtol=1e-9, atol=0)


@pytest.mark.parametrize("loss", ["fused", "chunked"])
def test_a_model_that_returns_logits_says_so_to_another_loss(bench, user: User, loss: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="returns logits") as caught:
        step_of(bench, user, "Logits", {"loss": loss})
    assert "loss: plain" in caught.value.hint


def test_unpadded_is_refused_where_the_model_does_not_promise_it(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="end to end") as caught:
        step_of(bench, user, "Padded", {"layout": "unpadded"})
    assert "supports_unpadded" in caught.value.hint


def test_a_weight_that_is_wider_than_the_others_learns_beside_masters(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    precision = {"weights": "bf16", "compute": "bf16", "gradients": "fp32", "optimizer": "fp32"}
    _, weights = after(bench, user, "WideScale", (2, 3), {}, precision=precision)
    step = step_of(bench, user, "WideScale", precision=precision)
    assert weights["last"].dtype == torch.float32
    assert not torch.equal(step.parameters["last"], weights["last"])
    assert all(p.grad is None for p in step.parameters.values())


def test_a_model_that_fails_to_build_says_at_which_line(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError) as caught:
        step_of(bench, user, "Breaks")
    assert user.line("BREAKS") in caught.value.message
    assert "ZeroDivisionError" in caught.value.message


def test_arguments_that_the_class_does_not_take_are_named(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match=r"unexpected keyword argument 'hidden'"):
        bench.step(f"{user.name}:Model", model_config={"vocab_size": 61, "hidden": 3})
    with pytest.raises(ModelError, match="vocab_size"):
        bench.step(f"{user.name}:Model")


@pytest.mark.parametrize(("name", "what"), [("NoLayers", "no attribute `layers`"), ("not_a_model", r"not a torch\.nn")])
def test_what_breaks_the_contract_is_named(bench, user: User, name: str, what: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match=what):
        step_of(bench, user, name)


def test_a_class_or_module_that_is_not_there_is_named(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match="unknown class 'Modle'") as caught:
        step_of(bench, user, "Modle")
    assert "did you mean Model" in caught.value.hint
    with pytest.raises(ModelError, match="cannot import"):
        bench.step("no_such_module:Model")


@pytest.mark.parametrize(("text", "what"), [("x = (\n", "SyntaxError"), ("\n\nx = 1 / 0\n", "ZeroDivisionError")])
def test_a_file_that_cannot_be_imported_says_at_which_line(bench, user: User, text: str, what: str) -> None:  # type: ignore[no-untyped-def]
    broken = user.file.with_name(f"{user.name}_broken.py")
    broken.write_text(text)
    with pytest.raises(ModelError) as caught:
        bench.step(f"{broken.stem}:Model")
    assert f"{broken}:{3 if 'Zero' in what else 1}" in caught.value.message
    assert what in caught.value.message


@pytest.mark.parametrize("name", ["Peeks", "Reads", "Picks", "Leaves", "Misfits"])
def test_a_forecast_of_a_model_that_fails_or_looks_at_its_data_names_the_line(user: User, name: str) -> None:
    mark = name.upper()
    run = from_mapping(user.keys(name, data={"max_length": 16}, precision="fp32"))
    with pytest.raises(ModelError) as caught:
        forecast(run)
    assert user.line(mark) in caught.value.message
    assert "\n" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_a_custom_model_is_forecast_like_any_other(user: User, layout: str) -> None:
    run = from_mapping(user.keys("Model", data={"max_length": 16}, batch=2, pin={"layout": layout, "loss": "chunked"}))
    result, _ = forecast(run)
    assert result.total_parameters == 61 * 16 + 2 * (16 * 48 + 48 + 16 * 16 + 16) + 16 * 61 + 61
    assert result.allocated > 0


def test_the_arguments_survive_a_run_file_and_belong_to_custom_models_alone(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    run = from_mapping(user.keys("Model"))
    assert from_mapping(to_mapping(run)) == run
    with pytest.raises(UsageError, match="expected keys and values"):
        from_mapping({"model": "a:B", "model_config": [1]})
    with pytest.raises(UsageError, match="model_config is for a module:Class"):
        bench.step(bench.folder("llama"), model_config={"vocab_size": 3})


def test_rows_for_a_measurement_stay_within_a_small_vocabulary(bench, user: User) -> None:  # type: ignore[no-untyped-def]
    run = bench.run(**user.keys("Model", data={"max_length": 200}))
    step = bench.step_of(run)
    assert max(full_rows(run, step.model.source, 1)[0].tokens) < 61
    step.evaluate(make_batch(full_rows(run, step.model.source, 1), padded=True))
