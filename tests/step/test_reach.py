"""What is out of the step's reach is refused; what goes through a kernel keeps its meaning on the way back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from brimful.core.errors import ModelError, UsageError
from brimful.core.runfile import from_mapping
from brimful.forecast import forecast
from brimful.forecast.persona import Persona
from brimful.step.attention import Demand, choose_kernel
from brimful.step.batch import Row, make_batch
from brimful.step.target import Target

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 6, "num_heads": 4}
aten = torch.ops.aten


def run_of(tmp_path: Path, config: dict[str, Any], **keys: Any):  # type: ignore[no-untyped-def]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return from_mapping({"model": str(tmp_path), "batch": 2, "data": {"max_length": 32}, **keys})


def test_a_windowed_kernel_goes_back_through_the_same_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows: dict[Any, list[Any]] = {
        aten._efficient_attention_forward.default: [],
        aten._efficient_attention_backward.default: [],
    }
    run_op = Persona.run

    def watched(self, func, args, kwargs):  # type: ignore[no-untyped-def]
        if func in windows:
            windows[func].append(kwargs.get("window_size"))
        return run_op(self, func, args, kwargs)

    monkeypatch.setattr(Persona, "run", watched)
    config = {"model_type": "mistral", **SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "sliding_window": 8}
    forecast(run_of(tmp_path, config, precision="fp32"))
    forward, backward = windows.values()
    assert set(forward) == set(backward) == {8}


def test_recomputation_repeats_dropout_that_a_model_draws_by_itself(bench, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = {"model_type": "opt", **SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    gradients = []
    for recompute in ("none", "all"):
        step = bench.step(str(tmp_path), {"recompute": recompute})
        torch.manual_seed(0)
        step.accumulate(bench.batches(step, (5,))[0], targets=10)
        gradients.append({name: p.grad for name, p in step.parameters.items() if p.grad is not None})
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bloom", "vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "by itself"),
        (
            {"model_type": "bart", "vocab_size": 61, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
            "not known",
        ),
    ],
)
def test_a_family_whose_attention_is_out_of_reach_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        forecast(run_of(tmp_path, config))


def test_layers_that_carry_a_row_into_the_next_are_not_run_unpadded(tmp_path: Path) -> None:
    config = {"model_type": "lfm2", **SMALL, "intermediate_size": 48, "layer_types": ["conv", "full_attention"]}
    with pytest.raises(UsageError, match="carry one row into the next"):
        forecast(run_of(tmp_path, config, pin={"layout": "unpadded"}))


def test_padding_costs_a_t5_one_bias_and_not_one_a_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", **T5}))
    made = {}
    for length in (128, 125):  # lengths are rounded up to 8, so 125 leaves padding
        data = {"max_length": length, "max_target_length": 16}
        result, _ = forecast(from_mapping({"model": str(tmp_path), "batch": 4, "data": data}))
        made[length] = result.allocated
    bias = 4 * T5["num_heads"] * 128 * 128 * 2
    assert made[125] - made[128] < 3 * bias


def test_values_of_another_width_than_queries_are_not_given_to_flash() -> None:
    hopper = Target("cuda", (9, 0))
    assert choose_kernel(Demand(64, torch.bfloat16, value_size=64), hopper) == "flash"
    assert choose_kernel(Demand(64, torch.bfloat16, value_size=32), hopper) == "efficient"


def test_an_empty_row_is_refused() -> None:
    with pytest.raises(UsageError, match="row 7 is empty"):
        make_batch([Row(1, [2, 3], [2, 3]), Row(7, [], [])], padded=False)
