"""What holds for every tape: nothing is lost, nothing overlaps, and a capacity is kept."""

import random
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.core.tape import Allocation, Category, Tape
from brimful.forecast import allocator as module
from brimful.forecast.allocator import Settings, replay, smallest_capacity
from brimful.forecast.allocator_blocks import FREE, LIVE, NO_LIMIT, UNMAPPED, Allocator, Block
from brimful.forecast.allocator_settings import SMALL_REQUEST

MIB = 1 << 20
CONFIGURATIONS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "roundup_power2_divisions:[1:8,>:4]",
    "large_segment_size_mb:30",
    "max_split_size_mb:20,garbage_collection_threshold:0.6",
    "expandable_segments:True,max_split_size_mb:24",
]
CONFIGURATION = st.sampled_from(CONFIGURATIONS).map(Settings.parse)
SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 60 * MIB), st.integers(1, 30).map(lambda n: n * 2 * MIB))


@st.composite
def tapes(draw: st.DrawFn) -> Tape:
    """Requests of any size, freed at any later moment or never."""
    allocations: list[Allocation] = []
    events: list[int] = []
    live: list[int] = []
    for _ in range(draw(st.integers(1, 60))):
        if live and draw(st.booleans()):
            events.append(-live.pop(draw(st.integers(0, len(live) - 1))))
        else:
            allocations.append(Allocation(draw(SIZES), Category.TEMPORARIES, "any"))
            live.append(len(allocations))
            events.append(len(allocations))
    return Tape(allocations, events)


def a_training_run(steps: int, seed: int = 0) -> Tape:
    """Weights that stay, then steps whose activations pile up and go in reverse, with temporaries between."""
    draw = random.Random(seed)
    allocations: list[Allocation] = []
    events: list[int] = []

    def allocate(size: float) -> int:
        allocations.append(Allocation(int(size), Category.ACTIVATIONS, "any"))
        events.append(len(allocations))
        return len(allocations)

    for _ in range(200):
        allocate(2 ** draw.uniform(12, 27))
    layers = [2 ** draw.uniform(12, 26) for _ in range(500)]
    for _ in range(steps):
        length = draw.uniform(0.5, 1)
        saved = []
        for size in layers:
            saved.append(allocate(size * length))
            events.append(-allocate(2 ** draw.uniform(9, 24)))
        while saved:
            gradient = allocate(2 ** draw.uniform(10, 25))
            events += [-saved.pop(), -gradient]
    return Tape(allocations, events)


def segments(live: dict[int, Block], allocator: Allocator) -> Iterator[list[Block]]:
    heads = {}
    for block in [*live.values(), *(block for pool in allocator.pools for block in pool.in_order())]:
        while block.prev is not None:
            block = block.prev
        heads[id(block)] = block
    for head in heads.values():
        blocks, block = [head], head
        while block.next is not None:
            assert block.next.prev is block
            block = block.next
            blocks.append(block)
        yield blocks


def check_state(live: dict[int, Block], allocator: Allocator) -> None:
    reserved = allocated = 0
    in_pools = {id(block) for pool in allocator.pools for block in pool.in_order()}
    for blocks in segments(live, allocator):
        for block, after in pairwise(blocks):
            assert block.address + block.size == after.address
            assert block.state == LIVE or block.state != after.state, "two neighbours that should be one"
        for block in blocks:
            assert (block.state == FREE) == (id(block) in in_pools)
            reserved += block.size if block.state != UNMAPPED else 0
            allocated += block.size if block.state == LIVE else 0
    assert (reserved, allocated) == (allocator.reserved, allocator.allocated)
    assert allocated == sum(block.size for block in live.values())


@settings(deadline=None)
@given(tapes(), CONFIGURATION, st.none() | st.integers(20, 400).map(lambda n: n * MIB))
def test_blocks_tile_their_segments_and_no_byte_is_lost(tape: Tape, setting: Settings, capacity: int | None) -> None:
    allocator = Allocator(setting, capacity)
    live: dict[int, Block] = {}
    small: dict[int, bool] = {}
    for event in tape.events:
        if event > 0:
            size = setting.rounded(tape.allocations[event - 1].size)
            block = allocator.malloc(size)
            if block is None:
                break
            assert block.size >= size
            live[event], small[event] = block, size <= SMALL_REQUEST
        else:
            allocator.free(live.pop(-event), small[-event])
        check_state(live, allocator)
        assert allocator.reserved >= allocator.allocated
        # An expandable segment may pass the capacity by less than one page.
        slack = setting.large_segment_size if setting.expandable_segments else 0
        assert allocator.reserved <= (NO_LIMIT if capacity is None else capacity + slack)
    for event, block in live.items():
        allocator.free(block, small[event])
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@settings(deadline=None)
@given(tapes(), CONFIGURATION)
def test_a_tape_survives_at_its_smallest_capacity_and_dies_below_it(tape: Tape, setting: Settings) -> None:
    smallest = smallest_capacity(tape, setting)
    assert replay(tape, setting, smallest).died_at is None
    if not setting.garbage_collection_threshold and smallest:
        assert replay(tape, setting, smallest - 1).died_at is not None


@settings(deadline=None)
@given(tapes(), CONFIGURATION)
def test_a_capacity_of_all_that_was_ever_asked_for_changes_nothing(tape: Tape, setting: Settings) -> None:
    free = replay(tape, setting)
    largest = max(setting.segment(setting.rounded(allocation.size)) for allocation in tape.allocations)
    # An expandable segment is refused the whole request even if only a part is missing.
    enough = free.peak_reserved + (largest if setting.expandable_segments else 0)
    if setting.garbage_collection_threshold:
        enough = int(enough / setting.garbage_collection_threshold) + 1
    assert replay(tape, setting, enough) == free


@settings(deadline=None)
@given(tapes(), st.sampled_from(["", "expandable_segments:True"]).map(Settings.parse))
def test_capacity_hardly_moves_what_is_allocated(tape: Tape, setting: Settings) -> None:
    free, tight = replay(tape, setting), replay(tape, setting, smallest_capacity(tape, setting))
    # A large block of a fixed segment may keep a rest of 1 MiB, depending on which block was found; nothing else can.
    large = 0 if setting.expandable_segments else sum(allocation.size > MIB for allocation in tape.allocations)
    assert abs(free.peak_allocated - tight.peak_allocated) <= large * MIB


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_a_training_run_dies_just_below_its_smallest_capacity(text: str) -> None:
    tape, setting = a_training_run(steps=3), Settings.parse(text)
    smallest = smallest_capacity(tape, setting)
    for more in (0, 2, 4, 64):
        assert replay(tape, setting, smallest + more * MIB).died_at is None
    # Garbage collection changes with every byte of capacity, and islands of survival lie below the answer.
    below = smallest * 96 // 100 if setting.garbage_collection_threshold else smallest - 4 * MIB
    assert replay(tape, setting, below).died_at is not None


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_the_smallest_capacity_takes_at_most_12_replays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []

    class Counted(module._Run):
        def __init__(self, tape: Tape, setting: Settings, capacity: int | None) -> None:
            replays.append(capacity)
            super().__init__(tape, setting, capacity)

    monkeypatch.setattr(module, "_Run", Counted)
    smallest_capacity(a_training_run(steps=2, seed=1), Settings.parse(text))
    assert len(replays) <= 12


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_200_000_events_replay_in_a_second_and_a_half(text: str) -> None:
    tape = a_training_run(steps=80)
    assert len(tape.events) > 200_000
    start = time.process_time()
    replay(tape, Settings.parse(text))
    assert time.process_time() - start < 1.5
