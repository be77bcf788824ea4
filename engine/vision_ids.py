"""Vision ids: each picture's vision tokens get ids of their own, above every vocabulary, so that the radix tree tells
them apart.

Token k of a picture has the id `base + k`. A base is never used twice, so an id means one picture *and* one position in
it for as long as the process lives. A forgotten digest gets a new base when it comes back: that costs a recomputation,
nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

FIRST_VISION_ID: Final = 1 << 40


@dataclass(slots=True)
class _Interned:
    base: int
    pins: int


class VisionIds:
    """Digest → base id: a least-recently-used table of at most `capacity` digests, not counting those in use.

    A digest names all that changes its tokens; their number is part of the key all the same, so ranges cannot overlap.
    """

    def __init__(self, capacity: int = 8192) -> None:
        self.capacity = capacity
        self._next = FIRST_VISION_ID
        self._table: OrderedDict[tuple[bytes, int], _Interned] = OrderedDict()
        self.num_pinned = 0

    def __len__(self) -> int:
        return len(self._table)

    def pin(self, digest: bytes, num_tokens: int) -> int:
        """The base id of a picture, kept until `unpin`."""
        key = (digest, num_tokens)
        entry = self._table.get(key)
        if entry is None:
            entry = self._table[key] = _Interned(self._next, 0)
            self._next += num_tokens
        self._table.move_to_end(key)
        self.num_pinned += entry.pins == 0
        entry.pins += 1
        self._forget()
        return entry.base

    def unpin(self, digest: bytes, num_tokens: int) -> None:
        """A live sequence with this picture ended. Raises KeyError for what is not pinned."""
        entry = self._table[(digest, num_tokens)]
        entry.pins -= 1
        self.num_pinned -= entry.pins == 0
        self._forget()

    def check(self, pins: dict[tuple[bytes, int], int]) -> None:
        """Prove that the given pins of live sequences are all there are. Raises AssertionError otherwise."""
        noted = {key: entry.pins for key, entry in self._table.items() if entry.pins}
        assert noted == pins, f"{len(noted)} digests pinned, {len(pins)} in use"
        assert self.num_pinned == len(pins)
        assert len(self._table) - self.num_pinned <= self.capacity

    def _forget(self) -> None:
        while len(self._table) - self.num_pinned > self.capacity:
            victim = next(key for key, entry in self._table.items() if not entry.pins)
            del self._table[victim]
