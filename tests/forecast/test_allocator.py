"""Each rule of the caching allocator, on cases small enough to work out by hand."""

from brimful.core.forecast import PhasePeak
from brimful.core.tape import Allocation, Category, Phase, Span, Tape
from brimful.forecast.allocator import Replay, Settings, replay, smallest_capacity
from brimful.forecast.allocator_blocks import Allocator

MIB = 1 << 20
EXPANDABLE = Settings(expandable_segments=True)


def tape(*steps: tuple[str, float] | str, spans: tuple[Span, ...] = ()) -> Tape:
    """`("a", 3.5)` allocates 3.5 MiB under the name a, `"a"` frees it."""
    names: dict[str, int] = {}
    allocations: list[Allocation] = []
    events = []
    for step in steps:
        if isinstance(step, str):
            events.append(-names.pop(step))
        else:
            allocations.append(Allocation(int(step[1] * MIB), Category.TEMPORARIES, step[0]))
            names[step[0]] = len(allocations)
            events.append(len(allocations))
    return Tape(allocations, events, spans)


def peaks(result: Replay) -> tuple[float, float]:
    """Allocated and reserved, in MiB."""
    return result.peak_allocated / MIB, result.peak_reserved / MIB


def test_an_empty_tape_takes_nothing() -> None:
    assert replay(tape()) == Replay(0, 0, 0, 0, None, 0, ())
    assert smallest_capacity(tape()) == 0


def test_small_requests_share_2_mib_and_larger_ones_20_mib() -> None:
    assert peaks(replay(tape(("a", 1), ("b", 1)))) == (2, 2)
    assert peaks(replay(tape(("a", 1), ("b", 1.5)))) == (2.5, 22)
    assert peaks(replay(tape(("a", 9), ("b", 9)))) == (18, 20)


def test_a_large_block_keeps_a_rest_of_up_to_1_mib_and_it_counts_as_allocated() -> None:
    # The segment has 12 MiB: of 11 MiB a rest of exactly 1 MiB stays, of 10.5 MiB a rest of 1.5 MiB is split off.
    assert peaks(replay(tape(("a", 11)))) == (12, 12)
    assert peaks(replay(tape(("a", 10.5)))) == (10.5, 12)


def test_a_small_block_keeps_nothing() -> None:
    assert replay(tape(("a", 1 - 512 / MIB))).peak_allocated == MIB - 512


def test_the_smallest_block_that_fits_is_taken() -> None:
    # 30 and 40 are free; 30 goes into the 30, so that 40 still finds the 40.
    steps = (("a", 40), ("b", 30), "a", "b", ("c", 30), ("d", 40))
    assert peaks(replay(tape(*steps))) == (70, 70)


def test_of_blocks_of_equal_size_the_lowest_address_is_taken() -> None:
    allocator = Allocator(Settings(), None)
    first, second, third = (allocator.malloc(30 * MIB) for _ in range(3))
    assert first
    assert second
    assert third
    for block in (third, first, second):
        allocator.free(block, small=False)
    taken = allocator.malloc(30 * MIB)
    assert taken is not None
    assert taken.address == min(block.address for block in (first, second, third))


def test_freed_neighbours_become_one_block() -> None:
    # Three blocks of 6 MiB lie in one segment of 20; freed in any order they hold 18 again.
    for order in (("a", "b", "c"), ("b", "a", "c"), ("a", "c", "b")):
        assert peaks(replay(tape(("a", 6), ("b", 6), ("c", 6), *order, ("d", 9), ("e", 9)))) == (18, 20)


def test_blocks_of_different_segments_do_not_become_one() -> None:
    assert peaks(replay(tape(("a", 10), ("b", 10), "a", "b", ("c", 20)))) == (20, 40)


def test_memory_is_released_and_asked_for_again_when_the_capacity_is_reached() -> None:
    steps = (("a", 10), ("b", 10), "a", "b", ("c", 20))
    assert peaks(replay(tape(*steps), capacity=20 * MIB)) == (20, 20)
    assert replay(tape(*steps), capacity=20 * MIB).retries == 1
    # 30 does not hold 20 + 20, and both segments are whole: both go, though one would have done.
    assert replay(tape(*steps, ("d", 10)), capacity=30 * MIB).retries == 1


def test_a_segment_of_which_a_part_is_live_cannot_be_released() -> None:
    steps = (("a", 9), ("b", 9), "a", ("c", 12))
    dead = replay(tape(*steps), capacity=30 * MIB)
    # PyTorch counts the retry that failed, too.
    assert (dead.died_at, dead.retries) == (3, 1)
    assert replay(tape(*steps), capacity=32 * MIB).died_at is None
    assert smallest_capacity(tape(*steps)) == 32 * MIB


def test_peaks_name_the_first_event_that_reached_them() -> None:
    result = replay(tape(("a", 10), ("b", 20), "b", ("c", 20), "a", ("d", 10)))
    assert (result.peak_allocated_event, result.peak_reserved_event) == (1, 1)


def test_a_phase_peaks_at_what_it_begins_with_or_reaches() -> None:
    spans = (Span(Phase.LOAD, 0, 1), Span(Phase.FIRST_STEP, 1, 4), Span(Phase.STEADY, 4, 5))
    result = replay(tape(("a", 10), ("b", 20), "b", ("c", 12), "c", spans=spans))
    assert result.phases == (
        PhasePeak(Phase.LOAD, 10 * MIB, 10 * MIB),
        PhasePeak(Phase.FIRST_STEP, 30 * MIB, 30 * MIB),
        PhasePeak(Phase.STEADY, 22 * MIB, 30 * MIB),
    )


def test_a_phase_behind_the_death_has_no_peak() -> None:
    spans = (Span(Phase.LOAD, 0, 1), Span(Phase.FIRST_STEP, 1, 2))
    result = replay(tape(("a", 10), ("b", 20), spans=spans), capacity=20 * MIB)
    assert result.phases[1] == PhasePeak(Phase.FIRST_STEP, 0, 0)


def test_a_small_request_leaves_oversize_blocks_alone() -> None:
    steps = (("a", 100), "a", ("b", 50))
    assert peaks(replay(tape(*steps))) == (100, 100)
    assert peaks(replay(tape(*steps), Settings(max_split_size=64 * MIB))) == (100, 150)


def test_an_oversize_block_is_reused_whole_within_20_mib_of_the_request() -> None:
    settings = Settings(max_split_size=64 * MIB)
    # 85 takes the 100 and, not being split, counts as 100; 80 would waste 20 and gets a new segment.
    assert peaks(replay(tape(("a", 100), "a", ("b", 85), ("c", 10)), settings)) == (110, 110)
    assert peaks(replay(tape(("a", 100), "a", ("b", 80)), settings)) == (100, 180)
    wider = Settings(max_split_size=64 * MIB, max_non_split_rounding=32 * MIB)
    assert peaks(replay(tape(("a", 100), "a", ("b", 80)), wider)) == (100, 100)


def test_oversize_blocks_are_released_first_and_only_as_many_as_are_needed() -> None:
    settings = Settings(max_split_size=64 * MIB)
    # 78 is not served by the 70, and the 100 is too large to serve it: the 100 goes and the 70 stays, without a retry.
    one = replay(tape(("a", 70), ("b", 100), "a", "b", ("c", 78)), settings, capacity=170 * MIB)
    assert (one.retries, one.died_at, one.peak_reserved) == (0, None, 170 * MIB)
    again = replay(tape(("a", 70), ("b", 100), "a", "b", ("c", 78), ("d", 70)), settings, capacity=170 * MIB)
    assert again.retries == 0  # the 70 was still there
    # None alone holds 150: the 100 goes, then the 70.
    both = replay(tape(("a", 70), ("b", 100), "a", "b", ("c", 150)), settings, capacity=170 * MIB)
    assert (both.retries, both.died_at) == (0, None)
    # The oversize blocks do not reach 180, so all that is cached goes, as a retry.
    all_three = replay(tape(("a", 70), ("b", 100), ("c", 20), "a", "b", "c", ("d", 180)), settings, capacity=190 * MIB)
    assert (all_three.retries, all_three.died_at) == (1, None)


def test_garbage_is_collected_only_under_a_capacity_and_above_the_threshold() -> None:
    settings = Settings(garbage_collection_threshold=0.5)
    steps = (("a", 40), "a", ("b", 50))
    assert peaks(replay(tape(*steps), settings)) == (50, 90)
    assert peaks(replay(tape(*steps), settings, capacity=100 * MIB)) == (50, 90)  # 40 is not above 50
    assert peaks(replay(tape(*steps), settings, capacity=79 * MIB)) == (50, 50)  # 40 is above 39.5
    assert replay(tape(*steps), settings, capacity=79 * MIB).retries == 0


def test_garbage_of_at_least_average_age_goes_first() -> None:
    settings = Settings(garbage_collection_threshold=0.5)
    # s and t leave 2 MiB of their segment, where x only serves to let time pass. When d is asked for, a was free for
    # 3 searches, b for 2 and c for 1: the average is 2, so a and b go, more than was wanted, and c stays.
    setting = (("s", 9), ("t", 9), ("c", 30), ("b", 20), ("a", 10))
    ageing = ("a", ("x", 1.5), "x", "b", ("x", 1.5), "x", "c")
    at_threshold = replay(tape(*setting, *ageing, ("d", 42)), settings, capacity=160 * MIB)
    assert at_threshold.peak_reserved == (20 + 30 + 20 + 10 + 42) * MIB
    above = replay(tape(*setting, *ageing, ("d", 42), ("e", 30)), settings, capacity=140 * MIB)
    assert (above.retries, above.peak_reserved) == (0, (20 + 30 + 42) * MIB)


def test_a_split_segment_is_no_garbage() -> None:
    settings = Settings(garbage_collection_threshold=0.5)
    result = replay(tape(("a", 9), ("b", 9), "a", ("c", 12)), settings, capacity=36 * MIB)
    assert (result.peak_reserved, result.retries) == (32 * MIB, 0)


def test_an_expandable_segment_grows_by_whole_pages_and_splits_to_the_byte() -> None:
    assert peaks(replay(tape(("a", 30)), EXPANDABLE)) == (30, 40)
    assert peaks(replay(tape(("a", 30), ("b", 10)), EXPANDABLE)) == (40, 40)
    assert peaks(replay(tape(("a", 11)), EXPANDABLE)) == (11, 20)
    assert peaks(replay(tape(("a", 0.5)), EXPANDABLE)) == (0.5, 2)
    assert peaks(replay(tape(("a", 30)), Settings(expandable_segments=True, large_segment_size=64 * MIB))) == (30, 64)


def test_an_expandable_segment_grows_at_its_end_by_what_is_missing() -> None:
    # 30 leaves 10 free at the end; 25 takes them and maps one page more.
    assert peaks(replay(tape(("a", 30), ("b", 25)), EXPANDABLE)) == (55, 60)


def test_neighbours_in_an_expandable_segment_serve_a_larger_request() -> None:
    steps = (("a", 20), ("b", 20), "a", "b", ("c", 40))
    assert peaks(replay(tape(*steps), EXPANDABLE)) == (40, 40)
    assert peaks(replay(tape(*steps))) == (40, 80)


def test_a_free_block_inside_is_preferred_to_the_end_that_could_grow() -> None:
    allocator = Allocator(EXPANDABLE, None)
    inside = allocator.malloc(30 * MIB)
    live = allocator.malloc(5 * MIB)
    assert inside
    assert live
    allocator.free(inside, small=False)
    # The 5 MiB at the end would be the smaller fit for 4 MiB, but it counts with all that can be mapped behind it.
    taken = allocator.malloc(4 * MIB)
    assert taken is not None
    assert taken.address == 0


def test_free_pages_inside_an_expandable_segment_can_be_given_back() -> None:
    # a spans [0, 50), b [50, 55); of a the pages [0, 40) are wholly free, the third is shared with b.
    allocator = Allocator(EXPANDABLE, None)
    a, b = allocator.malloc(50 * MIB), allocator.malloc(5 * MIB)
    assert a
    assert b
    assert allocator.reserved == 60 * MIB
    allocator.free(a, small=False)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    # The gap is filled again from its lowest address: 30 maps two of its pages and nothing at the end.
    again = allocator.malloc(30 * MIB)
    assert again is not None
    assert (again.address, allocator.reserved) == (0, 60 * MIB)
    # 20 more fit into the 10 of the second page and the 10 that were never unmapped.
    assert allocator.malloc(20 * MIB) is not None
    assert allocator.reserved == 60 * MIB


def test_an_expandable_segment_that_is_wholly_free_is_given_back() -> None:
    allocator = Allocator(EXPANDABLE, None)
    block = allocator.malloc(50 * MIB)
    assert block
    allocator.free(block, small=False)
    allocator.empty_cache()
    assert allocator.reserved == 0
    assert not any(pool.keys for pool in allocator.pools)


def test_a_capacity_is_compared_with_the_request_and_not_with_what_is_mapped() -> None:
    # 30 is under the capacity, so two pages are mapped and 40 is not.
    assert peaks(replay(tape(("a", 30)), EXPANDABLE, capacity=30 * MIB)) == (30, 40)
    # Only 5 of the 15 MiB would have to be mapped, but 40 + 16 > 50 is refused, and so is the retry.
    dead = replay(tape(("a", 30), ("b", 15)), EXPANDABLE, capacity=50 * MIB)
    assert (dead.died_at, dead.retries) == (1, 1)
    assert replay(tape(("a", 30), ("b", 15)), EXPANDABLE, capacity=56 * MIB).retries == 0
    assert smallest_capacity(tape(("a", 30), ("b", 15)), EXPANDABLE) == 56 * MIB


def test_oversize_blocks_of_expandable_segments_are_passed_over_but_still_used() -> None:
    # 100 is free and may not serve 50 from the pool; growing then begins at that very block, and maps nothing.
    settings = Settings(expandable_segments=True, max_split_size=64 * MIB)
    assert peaks(replay(tape(("a", 100), "a", ("b", 50)), settings)) == (100, 100)
