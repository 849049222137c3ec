"""Laws of the forecast on tiny models, and a sample of the matrix against what a GPU measured."""

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from brimful.catalog.gpus import get_gpu
from brimful.core.forecast import Forecast, Verdict
from brimful.core.runfile import from_mapping
from brimful.core.tape import Category, Phase, Tape
from brimful.forecast import forecast
from brimful.forecast.budget import judge
from brimful.forecast.summary import _notes
from brimful.report.as_json import to_json, to_plain

LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 4096,
    "d_model": 256,
    "d_ff": 768,
    "d_kv": 64,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
}
LENGTHS = {"llama": {"max_length": 256}, "t5": {"max_length": 256, "max_target_length": 128}}
FAMILIES = list(LENGTHS)


@pytest.fixture(scope="session", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, config in (("llama", LLAMA), ("t5", T5)):
        FOLDERS[name] = tmp_path_factory.mktemp(name)
        (FOLDERS[name] / "config.json").write_text(json.dumps(config))


FOLDERS: dict[str, Path] = {}


@cache
def _traced(text: str) -> tuple[Forecast, Tape]:
    return forecast(from_mapping(json.loads(text)))


def traced(family: str = "llama", **keys: Any) -> tuple[Forecast, Tape]:
    base = {"model": str(FOLDERS[family]), "method": "full", "batch": 4, "data": LENGTHS[family]}
    return _traced(json.dumps({**base, **keys}, sort_keys=True))


def of(family: str = "llama", **keys: Any) -> Forecast:
    return traced(family, **keys)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_more_rows_take_more(family: str) -> None:
    peaks = [of(family, batch=rows).allocated for rows in (1, 4, 8)]
    assert peaks == sorted(set(peaks))


def test_longer_rows_take_more() -> None:
    assert of(data={"max_length": 512}).allocated > of().allocated


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_more_layers_takes_less(family: str) -> None:
    every, half, none = (of(family, pin={"recompute": choice}).allocated for choice in ("all", "half", "none"))
    assert every <= half <= none
    assert every < none


def test_a_fused_or_chunked_loss_takes_no_more_than_the_plain_one() -> None:
    plain = of(pin={"loss": "plain"}).allocated
    assert of(pin={"loss": "fused"}).allocated <= plain
    assert of(pin={"loss": "chunked"}).allocated <= plain


def test_a_fused_optimizer_takes_no_more_than_foreach() -> None:
    def peak(choice: str) -> int:
        return of(batch=1, data={"max_length": 16}, pin={"optimizer_impl": choice}).allocated

    assert peak("fused") <= peak("foreach")


def test_full_rows_take_as_much_unpadded_as_padded() -> None:
    padded, unpadded = (of(pin={"layout": layout}).allocated for layout in ("padded", "unpadded"))
    assert unpadded == pytest.approx(padded, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_take_less_than_all_weights_and_quantised_ones_less_still(family: str) -> None:
    # short rows: adapters save weights' companions and cost activations
    keys = {"lora": {"targets": "all-linear", "rank": 4}, "batch": 1, "data": dict.fromkeys(LENGTHS[family], 16)}
    full, lora, qlora = (of(family, method=method, **keys).allocated for method in ("full", "lora", "qlora"))
    assert lora < full
    assert qlora < lora


def test_smaller_micro_batches_take_less() -> None:
    assert of(batch=8, pin={"micro_batch": 2}).allocated < of(batch=8).allocated


def test_expandable_segments_reserve_no_more() -> None:
    plain, expandable = of(), of(pin={"allocator": "expandable_segments:True"})
    assert expandable.reserved <= plain.reserved
    assert expandable.smallest_capacity <= plain.smallest_capacity


def test_a_larger_card_is_never_judged_worse() -> None:
    order = [Verdict.NO, Verdict.TIGHT, Verdict.FITS]
    need = of().smallest_capacity
    verdicts = [order.index(judge(need, int(need * share))) for share in (0.5, 0.99, 1.0, 1.01, 1.02, 1.021, 2.0)]
    assert verdicts == sorted(verdicts)
    assert {order[0], order[1], order[2]} == {order[index] for index in verdicts}


def test_the_verdict_is_for_the_card_that_is_named() -> None:
    assert of().verdict is None
    judged = of(hardware={"gpu": "a10g"})
    assert judged.verdict is Verdict.FITS
    assert judged.card is not None
    assert judged.card.name == "A10G"


@pytest.mark.parametrize("family", FAMILIES)
def test_two_forecasts_of_one_run_are_equal(family: str) -> None:
    first, tape = traced(family)
    again, same = forecast(from_mapping(first.job))
    assert replace(first, trace_s=0.0) == replace(again, trace_s=0.0)
    assert tape == same


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_items_add_up_and_peaks_are_in_order(family: str, method: str) -> None:
    found = of(family, method=method, lora={"targets": "all-linear"})
    assert found.allocated <= found.reserved <= found.device_used
    assert sum(found.items.values()) == found.device_used
    assert all(size >= 0 for size in found.items.values())
    assert found.smallest_capacity <= found.reserved
    for peak in found.phases:
        assert peak.allocated <= found.allocated
        assert peak.reserved <= found.reserved
    assert max(peak.allocated for peak in found.phases) == found.allocated
    assert max(peak.reserved for peak in found.phases) == found.reserved


def test_weights_and_optimizer_state_are_what_the_parameters_say() -> None:
    found = of()
    assert found.trainable_parameters == found.total_parameters
    # bf16 weights and two bf16 moments; buffers and counters are small
    assert found.items[Category.WEIGHTS] == pytest.approx(2 * found.total_parameters, rel=0.01)
    assert found.items[Category.OPTIMIZER] == pytest.approx(4 * found.total_parameters, rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tape_allocates_before_it_frees_and_ends_as_it_began(family: str) -> None:
    _, tape = traced(family)
    live: set[int] = set()
    for event in tape.events:
        if event > 0:
            assert event not in live
            live.add(event)
        else:
            live.remove(-event)
    assert [span.phase for span in tape.spans][:3] == [Phase.LOAD, Phase.FIRST_STEP, Phase.STEADY]
    left = {tape.allocations[event - 1].category for event in live}
    assert left <= {Category.WEIGHTS, Category.OPTIMIZER, Category.WORKSPACE, Category.GRADIENTS, Category.LOSS}


def test_a_forecast_survives_json() -> None:
    found = of(hardware={"gpu": "a10g"})
    plain = json.loads(to_json(found))
    assert plain == to_plain(found)
    assert plain["allocated"] == found.allocated
    assert from_mapping(plain["job"]) == from_mapping(found.job)


@pytest.mark.parametrize(
    ("gpu", "said"), [("a10g", "generation was never measured"), ("h100-80", "measured, on an H200")]
)
def test_a_card_that_was_never_measured_is_told(gpu: str, said: str) -> None:
    (note,) = _notes(get_gpu(gpu))
    assert said in note
    assert _notes(get_gpu("h200")) == _notes(None) == ()


# against a GPU

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "forecast"
MEASURED = BENCHMARKS / "results" / "measured.json"
BAR = 0.005
NUM_SAMPLED = 4


def measured() -> Mapping[str, Mapping[str, Any]]:
    """The rows of the matrix that were measured, of those that are still in it."""
    if not MEASURED.exists():
        return {}
    rows = json.loads(MEASURED.read_text("utf-8"))["rows"]
    matrix = yaml.safe_load((BENCHMARKS / "matrix.yaml").read_text("utf-8"))
    return {n: {**rows[n], "run": matrix[n]} for n in matrix if n in rows and not rows[n].get("died", rows[n])}


def sampled(names: list[str]) -> list[str]:
    """Another sample for every commit, the same one each time that it is tested; BRIMFUL_SAMPLE chooses it by hand."""
    seed = os.environ.get("BRIMFUL_SAMPLE") or _commit()
    return sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())[:NUM_SAMPLED]


def _commit() -> str:
    asked = ["git", "-C", str(BENCHMARKS), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


ROWS = measured()
NONE_MEASURED = pytest.param(None, marks=pytest.mark.skip(reason=f"{MEASURED.name} is not there"))


def check(name: str) -> None:
    found, _ = forecast(from_mapping(ROWS[name]["run"]))
    assert found.allocated == pytest.approx(ROWS[name]["allocated"], rel=BAR)
    assert found.reserved == pytest.approx(ROWS[name]["reserved"], rel=BAR)


@pytest.mark.parametrize("name", sampled(list(ROWS)) or [NONE_MEASURED])
def test_a_sample_of_the_matrix_is_forecast_as_it_was_measured(name: str) -> None:
    check(name)


@pytest.mark.full
@pytest.mark.parametrize("name", list(ROWS) or [NONE_MEASURED])
def test_the_whole_matrix_is_forecast_as_it_was_measured(name: str) -> None:
    check(name)
