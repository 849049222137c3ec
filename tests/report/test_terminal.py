import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from brimful.core.forecast import Card, Culprit, Forecast, LiveTensor, PhasePeak, Verdict
from brimful.core.tape import Category, Phase
from brimful.core.units import GiB, MiB
from brimful.report.as_json import to_json
from brimful.report.terminal import show_forecast

FORECAST = Forecast(
    job={
        "model": "mistral-7b-v0.3",
        "method": "lora",
        "lora": {"rank": 16},
        "precision": "bf16",
        "data": {"max_length": 1024},
        "batch": "4 sequences",
        "optimizer": {"name": "adamw"},
        "pin": {"recompute": "none", "micro_batch": 2},
    },
    allocated=int(17.2 * GiB),
    reserved=int(17.9 * GiB),
    device_used=int(18.3 * GiB),
    smallest_capacity=int(17.5 * GiB),
    verdict=Verdict.FITS,
    card=Card("A10G", int(22.0 * GiB), int(0.5 * GiB), int(21.5 * GiB), measured=True),
    items={
        "weights": int(13.5 * GiB),
        "adapters": 26 * MiB,
        "gradients": 0,
        "optimizer state": 52 * MiB,
        "activations": int(3.1 * GiB),
        "logits and loss": int(0.5 * GiB),
        "fragmentation": int(0.4 * GiB),
        "context": int(0.4 * GiB),
        "inputs": 4096,
    },
    phases=(
        PhasePeak(Phase.LOAD, int(13.5 * GiB), int(13.5 * GiB)),
        PhasePeak(Phase.STEADY, int(17.2 * GiB), int(17.9 * GiB)),
    ),
    culprit=Culprit("aten::_log_softmax", "lm_head", "step/loss.py:41", Phase.STEADY, 512 * MiB),
    largest=(
        LiveTensor(256 * MiB, 1, Category.WEIGHTS, "aten::empty", "model.embed_tokens", (32768, 4096), "bf16"),
        LiveTensor(112 * MiB, 96, Category.WEIGHTS, "aten::empty", "model.layers.*.mlp", (14336, 4096), "bf16"),
    ),
    trainable_parameters=6_815_744,
    total_parameters=7_254_839_296,
    host_ram=int(1.1 * GiB),
    notes=("attention runs in the flash kernel",),
    versions={"torch": "2.13.0"},
    trace_s=4.2,
)


def shown(forecast: Forecast, **console: object) -> str:
    out = io.StringIO()
    show_forecast(forecast, Console(file=out, **{"width": 80, **console}))  # type: ignore[arg-type]
    return out.getvalue()


@pytest.mark.parametrize(
    ("verdict", "needed", "first_line"),
    [
        (Verdict.FITS, 17.5, "fits    17.5 of 21.5 GiB  A10G, after its context: 4.00 GiB to spare"),
        (Verdict.TIGHT, 21.3, "tight   21.3 of 21.5 GiB  A10G, after its context: 205 MiB to spare: it survives"),
        (Verdict.NO, 27.4, "no      27.4 of 21.5 GiB  A10G, after its context: 5.90 GiB too much"),
    ],
)
def test_the_verdict_comes_first_and_says_by_how_much(verdict: Verdict, needed: float, first_line: str) -> None:
    text = shown(replace(FORECAST, verdict=verdict, smallest_capacity=int(needed * GiB)))
    assert text.startswith(first_line)


def test_without_a_card_it_says_what_is_needed_and_how_to_judge() -> None:
    text = shown(replace(FORECAST, verdict=None, card=None))
    assert text.splitlines()[0].startswith("needs   17.5 GiB")
    assert "--gpu" in text.splitlines()[0]


def test_notes_are_told() -> None:
    assert "never measured" in shown(replace(FORECAST, notes=("A10G: this generation was never measured",)))


def test_a_pipe_gets_whole_lines_without_escape_codes() -> None:
    long = "model." + "very_long_module_name." * 12
    text = shown(replace(FORECAST, culprit=replace(FORECAST.culprit, module=long)))
    assert "\x1b" not in text
    assert long in text
    assert not re.search(r"[ \t]$", text, re.MULTILINE)


def test_a_terminal_gets_colour_and_no_wrapped_lines() -> None:
    long = "model." + "very_long_module_name." * 12
    text = shown(replace(FORECAST, culprit=replace(FORECAST.culprit, module=long)), force_terminal=True, width=60)
    assert "\x1b[" in text
    assert long not in text
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, bare.splitlines())) <= 60


def test_items_come_largest_first_add_up_and_leave_out_what_is_nothing() -> None:
    text = shown(FORECAST)
    assert text.index("weights") < text.index("activations") < text.index("optimizer state")
    assert not re.search(r"^  (gradients|inputs)", text, re.MULTILINE)
    assert re.search(r"in all +18\.0 GiB", text)


def test_the_job_is_told_in_one_line() -> None:
    line = "mistral-7b-v0.3 · lora rank 16 · 4 sequences · ≤ 1024 tokens · bf16 · adamw · micro batch 2"
    assert line in [part.strip() for part in shown(FORECAST).splitlines()]


def test_bars_keep_to_ascii_where_the_output_does() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    show_forecast(FORECAST, Console(file=out, width=80))
    out.flush()
    assert b"####" in raw.getvalue()


def test_culprit_tensors_and_notes_are_named() -> None:
    text = shown(FORECAST)
    for part in ("512 MiB for aten::_log_softmax in lm_head", "step/loss.py:41", "112 MiB × 96 = 10.5 GiB"):
        assert part in text
    assert "note    attention runs in the flash kernel" in text
    assert "trains 6.82 M of 7.25 B parameters (0.09%)" in text


def test_a_long_note_is_wrapped_on_a_terminal_and_never_cut() -> None:
    note = " ".join(f"word{i}" for i in range(40))
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown(replace(FORECAST, notes=(note,)), force_terminal=True, width=60))
    assert "word39" in text
    assert max(map(len, text.splitlines())) <= 60


def test_json_holds_every_field_and_enums_as_words() -> None:
    plain = json.loads(to_json(FORECAST))
    assert plain["verdict"] == "fits"
    assert plain["culprit"]["phase"] == "steady state"
    assert plain["largest"][0]["shape"] == [32768, 4096]
    assert set(plain) == set(FORECAST.__dataclass_fields__)
