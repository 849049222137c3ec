"""Where `cudaMalloc` puts segments: addresses decide between free blocks of equal size, so they have to be followed.

Seen on an H200 (driver 580): the driver takes address space in blocks of a multiple of 32 MiB, each below all others
or in the highest gap that holds it; a segment goes to the lowest address that is free inside an existing block, else
into a new block. A block whose segments are all released is given back.
"""

from bisect import bisect_right, insort

GRANULE = 32 << 20
TOP = 1 << 47


class AddressSpace:
    """The driver's address space as far as one process's segments shape it."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []  # by address

    def take(self, size: int) -> int:
        """The address of a new segment."""
        for block in self._blocks:
            address = block.take(size)
            if address is not None:
                return address
        block = self._new_block(-(-size // GRANULE) * GRANULE)
        address = block.take(size)
        assert address is not None
        return address

    def give_back(self, address: int, size: int) -> None:
        """A segment is released."""
        place = bisect_right(self._blocks, address, key=_start) - 1
        block = self._blocks[place]
        block.give_back(address, size)
        if block.used == 0:
            del self._blocks[place]

    def _new_block(self, size: int) -> "_Block":
        above = TOP
        for block in reversed(self._blocks):
            if above - block.end >= size and above != TOP:
                break
            above = block.start
        block = _Block(above - size, above)
        insort(self._blocks, block, key=_start)
        return block


class _Block:
    __slots__ = ("end", "holes", "most", "start", "used")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.used = start, end, 0
        self.holes = [(start, end)]
        self.most = end - start  # no hole is larger

    def take(self, size: int) -> int | None:
        if size > self.most:
            return None
        for place, (start, end) in enumerate(self.holes):
            if end - start >= size:
                self.holes[place : place + 1] = [(start + size, end)] if end - start > size else []
                self.used += size
                return start
        self.most = max((end - start for start, end in self.holes), default=0)
        return None

    def give_back(self, address: int, size: int) -> None:
        self.used -= size
        insort(self.holes, (address, address + size))
        joined: list[tuple[int, int]] = []
        for start, end in self.holes:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self.holes = joined
        self.most = max(end - start for start, end in joined)


def _start(block: _Block) -> int:
    return block.start
