"""Where segments lie, against what `cudaMalloc` answered on an H200."""

from brimful.forecast.addresses import GRANULE, AddressSpace

MIB = 1 << 20
# sizes and offsets from the first, as seen on an H200 with driver 580, in MiB
SEEN = [
    (20, 0), (100, -128), (2, -28), (20, -26), (256, -384), (22, -416), (2, -394), (512, -928), (20, -960), (20, -992),
    (2, -972), (1000, -2016), (20, -1016),
]  # fmt: skip


def test_segments_lie_where_the_driver_put_them() -> None:
    space = AddressSpace()
    addresses = [space.take(size * MIB) for size, _ in SEEN]
    assert [(address - addresses[0]) // MIB for address in addresses] == [offset for _, offset in SEEN]


def test_a_released_segment_leaves_a_hole_that_the_next_one_of_its_block_takes() -> None:
    space = AddressSpace()
    first = space.take(2 * MIB)
    space.take(2 * MIB)
    space.give_back(first, 2 * MIB)
    assert space.take(2 * MIB) == first


def test_a_block_without_segments_is_given_back_and_its_place_taken_by_a_block_that_fits() -> None:
    space = AddressSpace()
    top, middle, low = (space.take(GRANULE) for _ in range(3))
    assert top > middle > low
    space.give_back(middle, GRANULE)
    assert space.take(2 * GRANULE) < low
    assert space.take(GRANULE) == middle


def test_holes_of_neighbouring_blocks_are_not_one_hole() -> None:
    space = AddressSpace()
    segments = [space.take(20 * MIB) for _ in range(2)]
    assert space.take(14 * MIB) < min(segments)
