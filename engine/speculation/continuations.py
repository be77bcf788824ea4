"""A text that is searched: where its last few tokens stood before, and what followed there. Microseconds, and little
memory.

There is no index: most texts are looked into a few times, and to index one takes longer than to search it as often.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import islice
from typing import Final

MAX_TOKENS: Final = 4096
"""A text longer than this forgets its first half."""
MAX_MATCH: Final = 8
"""A match of so many tokens is as good as a longer one."""
BREAK: Final = -1
"""An id that matches nothing and that nothing follows: stands between parts of the text that do not belong together."""


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens before position `at` equal the text looked for: what stands at `at` may come next."""

    at: int
    length: int


class Continuations:
    """A text that grows."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._packed = bytearray()  # the same, in 32 bits each

    def extend(self, ids: Iterable[int]) -> None:
        """Add tokens at the end."""
        new = array("i", ids)
        self.ids.extend(new)
        self._packed += new.tobytes()
        while len(self.ids) > MAX_TOKENS:
            half = len(self.ids) // 2
            self.ids = self.ids[half:]
            del self._packed[: half * new.itemsize]

    def find(self, text: Ordered[int], least: int = 2) -> Match | None:
        """Where the end of `text` stood before: the longest match of at least `least` tokens, the newest of equals."""
        found = self.find_all(text, least)
        return found[0] if found else None

    def find_all(self, text: Ordered[int], least: int = 2) -> list[Match]:
        """Up to two places where the end of `text` stood before, the one that `find` gives first."""
        if len(text) < 2 or BREAK in (text[-2], text[-1]):
            return []
        found = []
        for at in islice(self._places(text[-2], text[-1]), 2):
            length = self._match(at, text)
            if length >= least:
                found.append(Match(at, length))
        return found[::-1] if len(found) > 1 and found[1].length > found[0].length else found

    def read(self, at: int, count: int) -> list[int]:
        """Up to `count` tokens from `at`, to the next break; a copy that reaches the end goes on with itself, as text
        that repeats does.
        """
        taken = self.ids[at : at + count]
        if BREAK in taken:
            return taken[: taken.index(BREAK)]
        period = len(self.ids) - at
        while taken and len(taken) < count:
            taken.append(taken[len(taken) - period])
        return taken

    def _places(self, first: int, second: int) -> Iterator[int]:
        """What followed these two tokens, the newest first."""
        wanted = array("i", (first, second))
        pattern, size = wanted.tobytes(), wanted.itemsize
        end = len(self._packed)
        while (at := self._packed.rfind(pattern, 0, end)) >= 0:
            end = at + len(pattern) - 1
            place = at // size + 2
            if at % size == 0 and place < len(self.ids) and self.ids[place] != BREAK:
                yield place

    def _match(self, at: int, text: Ordered[int]) -> int:
        """How many tokens before `at` equal the end of `text`."""
        limit = min(at, len(text), MAX_MATCH)
        length = 0
        while length < limit and self.ids[at - 1 - length] == text[-1 - length]:
            length += 1
        return length
