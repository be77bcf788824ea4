"""The vision embedding cache: encoder output by picture, bounded in bytes.

The scheduler holds a picture from the step that first needs it until prefill has passed it, so what a batch reads is
never evicted. A picture that is being encoded is an entry without embeddings yet: whoever else needs it shares that one
encoding, and what the encoding keeps from step to step goes with the entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from engine.batch import PictureEncoding

LEAST_VISION_CACHE: Final = 64 << 20
"""Bytes of a cache that nobody gave a size."""

Holder = tuple[int, int]
"""(serial of a sequence, index of the picture in it)."""


@dataclass(slots=True, eq=False)
class VisionEntry:
    """One picture's embeddings (tokens, hidden), or None until they are computed; `holders` are live users.

    It is encoded in `num_slices`, of which steps up to the one that is being planned run `num_planned`; `encoding` is
    where that stands between steps.
    """

    key: int
    num_tokens: int
    num_bytes: int
    embeddings: torch.Tensor | None = None
    holders: dict[Holder, None] = field(default_factory=dict)
    num_slices: int = 0
    num_planned: int = 0
    encoding: PictureEncoding | None = None

    @property
    def is_encoded(self) -> bool:
        """Whether a batch can read it once the planned step has run its encodings."""
        return self.embeddings is not None or (self.num_slices > 0 and self.num_planned == self.num_slices)


class VisionCache:
    """Invariant: bytes of all entries <= `max_bytes`; an entry without holders has embeddings and can be evicted.
    Between steps at most one entry lacks its embeddings, and that one has an encoding under way.

    Args:
        max_bytes: The bound.
        bytes_per_token: Size of one vision token's embedding.
    """

    def __init__(self, max_bytes: int, bytes_per_token: int) -> None:
        self.max_bytes = max_bytes
        self.bytes_per_token = bytes_per_token
        self.num_bytes = 0
        self.num_queries = 0
        self.num_hits = 0
        self._entries: dict[int, VisionEntry] = {}
        self._idle: OrderedDict[int, VisionEntry] = OrderedDict()  # no holders, least recently used first

    def fits(self, num_tokens: int) -> bool:
        """Whether a picture of that many tokens can ever be held."""
        return num_tokens * self.bytes_per_token <= self.max_bytes

    def contains(self, key: int) -> bool:
        """Whether the picture is encoded, or being encoded."""
        return key in self._entries

    def find(self, key: int) -> VisionEntry | None:
        """The picture's entry, held or not."""
        return self._entries.get(key)

    @property
    def is_encoding(self) -> bool:
        """Whether a picture is under way that the planned step leaves unfinished."""
        return any(not entry.is_encoded for entry in self._entries.values())

    @property
    def encoding_bytes(self) -> int:
        """What the picture under way keeps between steps."""
        return sum(entry.encoding.num_bytes for entry in self._entries.values() if entry.encoding is not None)

    def hold(self, key: int, num_tokens: int, holder: Holder) -> VisionEntry | None:
        """Keep a picture for `holder`; a new entry has no embeddings and must be encoded. None: no room beside what is
        held.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = self._reserve(key, num_tokens)
            if entry is None:
                return None
        else:
            self._idle.pop(key, None)
            self.num_hits += 1
        self.num_queries += 1
        entry.holders[holder] = None
        return entry

    def drop(self, key: int, holder: Holder) -> None:
        """`holder` needs the picture no more. Raises KeyError when it did not hold it."""
        entry = self._entries[key]
        del entry.holders[holder]
        if entry.holders:
            return
        if entry.embeddings is None:
            self._remove(entry)
        else:
            self._idle[key] = entry

    def get(self, key: int) -> VisionEntry:
        """A held entry."""
        return self._entries[key]

    def check(self, holders: Iterable[tuple[int, Holder]]) -> None:
        """Prove the invariants for the given holds of live sequences, between steps. Raises AssertionError
        otherwise.
        """
        noted = {(key, holder) for key, entry in self._entries.items() for holder in entry.holders}
        assert noted == set(holders), "holds of pictures differ from what live sequences need"
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self.max_bytes
        assert set(self._idle) == {key for key, entry in self._entries.items() if not entry.holders}
        open_entries = [entry for entry in self._entries.values() if entry.embeddings is None]
        assert len(open_entries) <= 1, "more than one picture under way"
        assert all(entry.encoding is not None for entry in open_entries), "an entry nobody encodes"
        assert all(0 < entry.num_planned < entry.num_slices for entry in open_entries)
        assert all(entry in open_entries for entry in self._entries.values() if entry.encoding), "an encoding of nobody"

    def _reserve(self, key: int, num_tokens: int) -> VisionEntry | None:
        num_bytes = num_tokens * self.bytes_per_token
        idle_bytes = sum(entry.num_bytes for entry in self._idle.values())
        if self.num_bytes - idle_bytes + num_bytes > self.max_bytes:
            return None
        while self.num_bytes + num_bytes > self.max_bytes:
            self._remove(next(iter(self._idle.values())))
        entry = self._entries[key] = VisionEntry(key, num_tokens, num_bytes)
        self.num_bytes += num_bytes
        return entry

    def _remove(self, entry: VisionEntry) -> None:
        del self._entries[entry.key]
        self._idle.pop(entry.key, None)
        self.num_bytes -= entry.num_bytes
        entry.encoding = None
