"""Laws of the timeline page: it tells the truth about the tape, stands alone, and no name on it can break it."""

import json
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest

from brimful.core.forecast import Card, Culprit, Forecast, LiveTensor, PhasePeak, Verdict
from brimful.core.tape import Allocation, Category, Phase, Span, Tape
from brimful.report import timeline

GIB = 2**30
MIB = 2**20
HOSTILE = "</script><script>alert(1)</script><!--put:data--><img src=x onerror=alert(2)>&amp;\"'\u2028\x00\ud800é"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Recorder:
    """Writes a tape the way a run does: things are made, live and are freed."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[int] = []
        self.spans: list[Span] = []

    def make(self, size: int, category: Category, op: str = "aten::mm", module: str = "") -> int:
        self.allocations.append(Allocation(size, category, op, module, (size // 2,), "bfloat16", "model.py:12"))
        self.events.append(len(self.allocations))
        return len(self.allocations)

    def free(self, *handles: int) -> None:
        self.events.extend(-handle for handle in handles)

    def close(self, phase: Phase) -> None:
        self.spans.append(Span(phase, self.spans[-1].end if self.spans else 0, len(self.events)))

    def tape(self) -> Tape:
        return Tape(self.allocations, self.events, self.spans)


def training_tape(num_layers: int = 32, num_ops: int = 12, seed: int = 0) -> Tape:
    """Weights; then per step a forward that keeps activations, logits, a backward that turns them into gradients."""
    rng, run = random.Random(seed), Recorder()
    for layer in range(num_layers):
        staging = run.make(180 * MIB, Category.TEMPORARIES, "aten::_to_copy", f"layers.{layer}")
        for _ in range(7):
            run.make(rng.randrange(8, 60) * MIB, Category.WEIGHTS, "aten::empty", f"layers.{layer}.weight")
        run.free(staging)
    run.close(Phase.LOAD)
    for phase in (Phase.FIRST_STEP, Phase.STEADY):
        kept: list[list[int]] = []
        for layer in range(num_layers):
            kept.append([])
            for op in range(num_ops):
                scratch = run.make(rng.randrange(1, 40) * MIB, Category.TEMPORARIES, "aten::mul", f"layers.{layer}")
                kept[-1].append(
                    run.make(rng.randrange(1, 90) * MIB, Category.ACTIVATIONS, f"op{op}", f"layers.{layer}")
                )
                run.free(scratch)
        logits = run.make(2 * GIB, Category.LOSS, "aten::mm", "lm_head")
        upcast = run.make(4 * GIB, Category.LOSS, "aten::_to_copy", "loss")
        run.free(logits, upcast)
        gradients = []
        for layer in reversed(range(num_layers)):
            gradients.append(run.make(20 * MIB, Category.GRADIENTS, "aten::mm", f"layers.{layer}"))
            run.free(*reversed(kept.pop()))
        if phase is Phase.FIRST_STEP:
            for layer in range(num_layers):
                run.make(40 * MIB, Category.OPTIMIZER, "aten::zeros_like", f"layers.{layer}")
        run.free(*gradients)
        run.close(phase)
    return run.tape()


def forecast(tape: Tape, card: Card | None = None, name: str = "tiny") -> Forecast:
    peak = max(totals(tape), default=0)
    return Forecast(
        job={"model": name, "micro_batch": 2, "note": name, "recompute": True, "extra": None},
        allocated=peak,
        reserved=peak + GIB // 4,
        device_used=peak + GIB,
        smallest_capacity=peak,
        verdict=Verdict.FITS if card else None,
        card=card,
        items={Category.WEIGHTS.value: peak // 2, "fragmentation": peak // 4, name: 0},
        phases=[PhasePeak(Phase.STEADY, peak, peak)],
        culprit=Culprit(name, name, name, Phase.STEADY, 10),
        largest=[LiveTensor(4 * GIB, 1, Category.LOSS, name, name, (2, 3), name)],
        trainable_parameters=1,
        total_parameters=2,
        host_ram=3,
        notes=[name],
        versions={"torch": name},
    )


def totals(tape: Tape) -> list[int]:
    return list(accumulate((1 if e > 0 else -1) * tape.allocations[abs(e) - 1].size for e in tape.events))


class Outline(HTMLParser):
    """Elements with their attributes, the text of scripts, and whatever was not closed in order."""

    VOID = frozenset({"meta", "br", "img", "input", "link", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.misplaced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.attributes.extend((tag, name, value or "") for name, value in attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.misplaced.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def embedded(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Outline(page).scripts[0])
    return data


def columns(data: dict[str, Any], num_events: int) -> list[tuple[int, int, int, int]]:
    """Each column's first event, end, instant and total as the page's script adds it up."""
    starts = list(accumulate(data["columns"]["start"]))
    instants = [start + offset for start, offset in zip(starts, data["columns"]["instant"], strict=True)]
    heights = [sum(row) for row in zip(*(accumulate(deltas) for deltas in data["rest"]), strict=True)]
    tensors = data["tensors"]
    changes: list[tuple[int, int]] = []
    for size, born, life in zip(tensors["size"], accumulate(tensors["born"]), tensors["freed"], strict=True):
        changes += [(born, size), (born + life, -size)]
    changes.sort(key=lambda change: change[0])
    named, at = 0, 0
    for column, instant in enumerate(instants):
        while at < len(changes) and changes[at][0] <= instant:
            named += changes[at][1]
            at += 1
        heights[column] += named
    return [
        (start, end, *rest)
        for (start, end), *rest in zip(pairwise([*starts, num_events]), instants, heights, strict=True)
    ]


TAPES = {
    "training": training_tape(),
    "long": training_tape(num_layers=64, num_ops=120, seed=1),
    "one event": Tape([Allocation(5, Category.INPUTS, "aten::empty")], [1]),
    "no spans": Tape(training_tape().allocations, training_tape().events),
    "gaps and overlaps": Tape(
        training_tape().allocations,
        training_tape().events,
        [Span(Phase.STEADY, 900, 10**9), Span(Phase.FIRST_STEP, 50, 1000), Span(Phase.LOAD, 10, 10)],
    ),
}


@pytest.fixture(params=TAPES, ids=lambda name: name.replace(" ", "-"))
def tape(request: pytest.FixtureRequest) -> Tape:
    return TAPES[request.param]


def test_the_peak_of_the_page_is_the_peak_of_the_tape_to_the_byte(tape: Tape) -> None:
    data, truth = embedded(timeline.page(forecast(tape), tape)), totals(tape)
    assert data["peak"] == {"event": truth.index(max(truth)), "bytes": max(truth)}
    assert max(height for *_, height in columns(data, len(truth))) == max(truth)


def test_a_column_shows_the_true_total_at_its_instant_and_no_event_in_it_is_higher(tape: Tape) -> None:
    truth = totals(tape)
    for start, end, instant, height in columns(embedded(timeline.page(forecast(tape), tape)), len(truth)):
        assert start <= instant < end
        assert height == truth[instant] == max(truth[start:end])


def test_every_event_belongs_to_one_phase_and_the_width_is_shared_out_completely(tape: Tape) -> None:
    segments = timeline.picture(forecast(tape), tape)["segments"]
    assert isinstance(segments, list)
    assert [segments[0][1], *(s[2] for s in segments)] == [*(s[1] for s in segments), len(tape.events)]
    assert [segments[0][3], *(s[4] for s in segments)] == [*(s[3] for s in segments), 1.0]
    assert all(left < right for *_, left, right in segments)


def test_a_long_load_is_given_little_room() -> None:
    run = Recorder()
    for _ in range(5000):
        run.free(run.make(MIB, Category.WEIGHTS))
    run.close(Phase.LOAD)
    for _ in range(500):
        run.free(run.make(MIB, Category.ACTIVATIONS))
    run.close(Phase.STEADY)
    segments = timeline.picture(forecast(run.tape()), run.tape())["segments"]
    assert isinstance(segments, list)
    assert segments[0][4] == pytest.approx(timeline.LOAD_SHARE)


def test_the_ten_largest_tensors_at_any_column_can_be_named() -> None:
    tape = TAPES["long"]
    data = embedded(timeline.page(forecast(tape), tape))
    tensors = data["tensors"]
    named = list(zip(tensors["size"], accumulate(tensors["born"]), tensors["freed"], strict=True))
    shown = columns(data, len(tape.events))
    for _, _, instant, _ in shown[:: len(shown) // 40]:
        alive: dict[int, int] = {}
        for event in tape.events[: instant + 1]:
            if event > 0:
                alive[event] = tape.allocations[event - 1].size
            else:
                del alive[-event]
        truth = sorted(alive.values(), reverse=True)[: timeline.NUM_NAMED_PER_COLUMN]
        page = sorted((size for size, born, life in named if born <= instant < born + life), reverse=True)
        assert page[: len(truth)] == truth


def test_a_named_tensor_carries_its_op_module_shape_type_and_line() -> None:
    run = Recorder()
    run.make(6, Category.LOSS, "aten::mm", "lm_head")
    data = timeline.picture(forecast(run.tape()), run.tape())
    tensors, strings = data["tensors"], data["strings"]
    assert isinstance(tensors, dict)
    assert isinstance(strings, list)
    words = [strings[tensors[field][0]] for field in ("op", "module", "shape", "dtype", "line")]
    assert words == ["aten::mm", "lm_head", "3", "bf16", "model.py:12"]
    assert data["categories"][tensors["category"][0]] == ["loss", "logits and loss"]  # type: ignore[index]


def test_the_page_is_well_formed_and_asks_the_network_for_nothing() -> None:
    tape = TAPES["training"]
    page = timeline.page(forecast(tape, Card("A10G", 22 * GIB, GIB // 2, 21 * GIB, measured=True)), tape)
    outline = Outline(page)
    assert not outline.misplaced
    assert not outline.open
    assert "<!--put:" not in page
    assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket", page)
    assert not [a for a in outline.attributes if a[1] in ("src", "href", "srcset", "action")]
    assert "default-src 'none'" in page


def test_names_from_outside_stay_names() -> None:
    run = Recorder()
    run.make(6, Category.LOSS, HOSTILE, HOSTILE)
    plain = Outline(timeline.page(forecast(run.tape(), Card("x", 1, 1, 1, measured=False)), run.tape()))
    outline = Outline(timeline.page(forecast(run.tape(), Card(HOSTILE, 1, 1, 1, False), HOSTILE), run.tape()))
    assert outline.count == plain.count
    assert not outline.misplaced
    assert not set("<>&") & set(outline.scripts[0])
    assert HOSTILE.replace("\ud800", "?") in json.loads(outline.scripts[0])["strings"]


def test_an_empty_tape_and_no_card_still_make_a_page(tmp_path: Path) -> None:
    timeline.write(tmp_path / "t.html", forecast(Tape([], [])), Tape([], []))
    assert embedded((tmp_path / "t.html").read_text("utf-8"))["num_events"] == 0


def test_hostile_text_can_be_written_to_a_file(tmp_path: Path) -> None:
    tape = TAPES["one event"]
    timeline.write(tmp_path / "t.html", forecast(tape, name=HOSTILE), tape)
    assert [p.name for p in tmp_path.iterdir()] == ["t.html"]


def test_a_write_that_fails_leaves_the_old_page_and_no_litter(tmp_path: Path) -> None:
    tape, path = TAPES["one event"], tmp_path / "t.html"
    path.write_text("old")
    with pytest.raises(IndexError):
        timeline.write(path, forecast(tape), Tape([], [7]))
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        timeline.write(tmp_path / "folder", forecast(tape), tape)
    assert path.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"t.html", "folder"}


def test_a_tape_of_hundreds_of_thousands_of_events_makes_a_page_of_under_three_megabytes() -> None:
    tape = training_tape(num_layers=200, num_ops=160)
    assert len(tape.events) > 200_000
    assert len(timeline.page(forecast(tape), tape).encode("utf-8")) < 3_000_000


def test_every_category_has_a_place_in_the_stack_and_a_colour_in_light_and_dark() -> None:
    page = timeline.page(forecast(TAPES["one event"]), TAPES["one event"])
    assert sorted(timeline.STACK) == sorted(Category)
    for category in Category:
        assert len(re.findall(rf"--c-{category.name.lower()}: #", page)) == 2


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("name", ["lm_head", HOSTILE], ids=["plain", "hostile"])
def test_a_browser_names_the_tensor_that_a_link_points_at(tmp_path: Path, name: str) -> None:
    assert CHROMIUM is not None
    run = Recorder()
    run.make(GIB, Category.WEIGHTS, "aten::empty", "weight")
    run.make(2 * GIB, Category.LOSS, "aten::mm", name)
    timeline.write(tmp_path / "t.html", forecast(run.tape(), name=name), run.tape())
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    seen = subprocess.run(
        [
            *(CHROMIUM, *flags.split(), "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--dump-dom", f"{(tmp_path / 't.html').as_uri()}#at=0.9&gib=2.5"),
        ],
        capture_output=True,
        timeout=120,
        check=True,
    ).stdout.decode("utf-8", "replace")
    tip = seen[seen.index('id="tip"') : seen.index('id="map"')]
    assert "2.00 GiB" in tip
    assert "logits and loss" in tip
    assert ("lm_head" if name == "lm_head" else "alert(1)&lt;/script&gt;") in tip
    assert Outline(seen).count["script"] == 2
