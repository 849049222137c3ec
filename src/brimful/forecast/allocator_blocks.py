"""The caching allocator itself: segments cut into blocks, two pools of free blocks, and what happens when none fits."""

from bisect import bisect_left, insort
from itertools import islice
from typing import Protocol

from brimful.forecast.addresses import AddressSpace
from brimful.forecast.allocator_settings import BLOCK, SMALL_REQUEST, SMALL_SEGMENT, Settings

NO_LIMIT = 1 << 62
ADDRESS_BITS = 56
RESERVATION_PAGES = 1 << 20
LIVE, FREE, UNMAPPED = range(3)


class Block:
    """A piece of a segment: live, free in its pool, or (in an expandable segment) address space without memory."""

    __slots__ = ("address", "born", "next", "prev", "size", "state")

    def __init__(self, address: int, size: int, state: int, prev: "Block | None", next: "Block | None") -> None:
        self.address = address
        self.size = size
        self.state = state
        self.born = 0
        self.prev = prev
        self.next = next
        if prev is not None:
            prev.next = self
        if next is not None:
            next.prev = self

    def absorb(self, neighbour: "Block") -> None:
        """Take over a neighbour, which must no longer be in any pool."""
        self.size += neighbour.size
        if neighbour is self.prev:
            self.address = neighbour.address
            self.prev = neighbour.prev
            if self.prev is not None:
                self.prev.next = self
        else:
            self.next = neighbour.next
            if self.next is not None:
                self.next.prev = self

    @property
    def whole(self) -> bool:
        """Whether this is all of its segment."""
        return self.prev is None and self.next is None


class Pool:
    """Free blocks, ordered by size and then by address; `searches` is the clock by which they age."""

    __slots__ = ("blocks", "keys", "searches", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.searches = 0

    def add(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        block.state = FREE
        block.born = self.searches
        self.blocks[key] = block
        insort(self.keys, key)

    def remove(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        del self.blocks[key]
        del self.keys[bisect_left(self.keys, key)]

    def in_order(self) -> list[Block]:
        return [self.blocks[key] for key in self.keys]


class Source(Protocol):
    """Where a pool's memory comes from. Each call says by how much it changed what is reserved."""

    def pick(self, pool: Pool, index: int) -> Block:
        """The best of the free blocks from `index` on, all of which are large enough."""

    def grow(self, pool: Pool, size: int, segment: int) -> tuple[Block, int]:
        """A block outside the pool with room for `size`, and the bytes that were added."""

    def shrink(self, pool: Pool) -> int:
        """Give back all memory that no live block needs."""


class Segments:
    """One `cudaMalloc` for each segment."""

    def __init__(self) -> None:
        self._addresses = AddressSpace()

    def pick(self, pool: Pool, index: int) -> Block:
        return pool.blocks[pool.keys[index]]

    def grow(self, pool: Pool, size: int, segment: int) -> tuple[Block, int]:
        return Block(self._addresses.take(segment), segment, LIVE, None, None), segment

    def shrink(self, pool: Pool) -> int:
        whole = [block for block in pool.in_order() if block.whole]
        for block in whole:
            pool.remove(block)
            self.give_back(block)
        return sum(block.size for block in whole)

    def give_back(self, block: Block) -> None:
        """Return one whole segment's addresses."""
        self._addresses.give_back(block.address, block.size)


class Expandable:
    """One range of addresses for each pool, into which pages are mapped and out of which they are unmapped."""

    def __init__(self, settings: Settings) -> None:
        self._page = {True: SMALL_SEGMENT, False: settings.large_segment_size}
        self._unmapped: dict[bool, list[Block]] = {True: [], False: []}

    def pick(self, pool: Pool, index: int) -> Block:
        """A block counts as large as it could grow, so one in the middle is preferred to one at the end."""
        best = pool.blocks[pool.keys[index]]
        for key in islice(pool.keys, index + 1, None):
            other = pool.blocks[key]
            if _room(other) >= _room(best):
                break
            best = other
        return best

    def grow(self, pool: Pool, size: int, segment: int) -> tuple[Block, int]:
        block, added = self._find(pool, size), 0
        if block.state == UNMAPPED:
            added += self._map(pool, block, min(block.size, size))
        while block.size < size:
            unmapped = block.next
            assert unmapped is not None  # _find looked at all of the way
            added += self._map(pool, unmapped, min(unmapped.size, size - block.size))
            block = unmapped
        pool.remove(block)
        return block, added

    def shrink(self, pool: Pool) -> int:
        return sum(self._unmap(pool, block) for block in pool.in_order())

    def _find(self, pool: Pool, size: int) -> Block:
        """The lowest stretch of free and unmapped blocks that holds `size` and includes an unmapped one."""
        unmapped = self._unmapped[pool.small]
        for block in unmapped:
            start = block.prev if block.prev is not None and block.prev.state != LIVE else block
            if _stretch(start, size) >= size:
                return start
        reservation = Block(0, self._page[pool.small] * RESERVATION_PAGES, UNMAPPED, None, None)
        unmapped.append(reservation)
        return reservation

    def _map(self, pool: Pool, block: Block, size: int) -> int:
        page = self._page[pool.small]
        mapped = -(-size // page) * page
        unmapped = self._unmapped[pool.small]
        unmapped.remove(block)
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, UNMAPPED, block, block.next)
            insort(unmapped, rest, key=_address)
            block.size = mapped
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == FREE:
                pool.remove(neighbour)
                block.absorb(neighbour)
        pool.add(block)
        return mapped

    def _unmap(self, pool: Pool, block: Block) -> int:
        page, unmapped = self._page[pool.small], self._unmapped[pool.small]
        start = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if start >= end:
            return 0
        pool.remove(block)
        before, after = start - block.address, block.address + block.size - end
        block.address, block.size, block.state = start, end - start, UNMAPPED
        if before:
            pool.add(Block(start - before, before, FREE, block.prev, block))
        if after:
            pool.add(Block(end, after, FREE, block, block.next))
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == UNMAPPED:
                unmapped.remove(neighbour)
                block.absorb(neighbour)
        if not block.whole:
            insort(unmapped, block, key=_address)
        return end - start


class Allocator:
    """`malloc` and `free` as PyTorch does them; sizes come rounded."""

    def __init__(self, settings: Settings, capacity: int | None) -> None:
        self.allocated = 0
        self.reserved = 0
        self.retries = 0
        self.granted = 0
        self.refused = NO_LIMIT
        self.pools = (Pool(small=False), Pool(small=True))
        self._settings = settings
        self._capacity = NO_LIMIT if capacity is None else capacity
        self._source: Source = Expandable(settings) if settings.expandable_segments else Segments()
        self._max_split = settings.max_split_size or NO_LIMIT
        self._max_rounding = settings.max_non_split_rounding or settings.large_segment_size
        # The large pool of cudaMalloc'ed segments keeps a rest of up to 1 MiB with the block.
        rest = BLOCK if settings.expandable_segments else SMALL_REQUEST + 1
        self._least_rest = (rest, BLOCK)
        self._split_below = (NO_LIMIT if settings.expandable_segments else self._max_split, NO_LIMIT)
        threshold = settings.garbage_collection_threshold
        self._collect_above = int(threshold * capacity) if capacity is not None and threshold else NO_LIMIT

    def malloc(self, size: int) -> Block | None:
        """A live block, or None when memory has run out."""
        small = size <= SMALL_REQUEST
        pool = self.pools[small]
        block = self._cached(pool, size) or self._new(pool, size)
        if block is None:
            return None
        rest = block.size - size
        if rest >= self._least_rest[small] and size < self._split_below[small]:
            block.size = size
            pool.add(Block(block.address + size, rest, FREE, block, block.next))
        block.state = LIVE
        self.allocated += block.size
        return block

    def free(self, block: Block, small: bool) -> None:
        pool = self.pools[small]
        self.allocated -= block.size
        neighbour = block.prev
        if neighbour is not None and neighbour.state == FREE:
            pool.remove(neighbour)
            block.absorb(neighbour)
        neighbour = block.next
        if neighbour is not None and neighbour.state == FREE:
            pool.remove(neighbour)
            block.absorb(neighbour)
        pool.add(block)

    def empty_cache(self) -> None:
        for pool in self.pools:
            self.reserved -= self._source.shrink(pool)

    def _cached(self, pool: Pool, size: int) -> Block | None:
        pool.searches += 1
        index = bisect_left(pool.keys, size << ADDRESS_BITS)
        if index == len(pool.keys):
            return None
        block = self._source.pick(pool, index)
        if size < self._max_split:
            if block.size >= self._max_split:
                return None
        elif block.size >= size + self._max_rounding:
            return None
        pool.remove(block)
        return block

    def _new(self, pool: Pool, size: int) -> Block | None:
        if self.reserved > self._collect_above:
            self._collect_garbage()
        block = self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._grow(pool, size)
        return block

    def _grow(self, pool: Pool, size: int) -> Block | None:
        segment = self._settings.segment(size)
        asked = self.reserved + segment
        if asked > self._capacity:
            self.refused = min(self.refused, asked)
            return None
        self.granted = max(self.granted, asked)
        block, added = self._source.grow(pool, size, segment)
        self.reserved += added
        return block

    def _release(self, pool: Pool, block: Block) -> None:
        pool.remove(block)
        if isinstance(self._source, Segments):
            self._source.give_back(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back the cached block that is just large enough and may not be split, or several, the largest first."""
        if self._settings.max_split_size is None or self._settings.expandable_segments:
            return False
        wanted = max(size, self._max_split)
        index = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if index < len(pool.keys):
            self._release(pool, pool.blocks[pool.keys[index]])
            return True
        released = 0
        for block in reversed(pool.in_order()):
            if released >= wanted or block.size < self._max_split:
                break
            self._release(pool, block)
            released += block.size
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back whole segments of the large pool, those of average age and above first, until under the limit."""
        pool = self.pools[False]
        wanted = self.reserved - self._collect_above
        idle = [block for block in pool.in_order() if block.whole]
        reclaimed, going_on = 0, True
        while reclaimed < wanted and idle and going_on:
            average = sum(pool.searches - block.born for block in idle) / len(idle)
            old = [block for block in idle if pool.searches - block.born >= average]
            idle = [block for block in idle if pool.searches - block.born < average]
            going_on = bool(old)
            for block in old:
                self._release(pool, block)
                reclaimed += block.size


def _address(block: Block) -> int:
    return block.address


def _stretch(block: Block | None, wanted: int) -> int:
    """How far blocks that are not live reach from here; beyond `wanted` it does not look."""
    room = 0
    while room < wanted and block is not None and block.state != LIVE:
        room += block.size
        block = block.next
    return room


def _room(block: Block) -> int:
    after = block.next
    return block.size + after.size if after is not None and after.state == UNMAPPED else block.size
