"""An index of a text: where its last few tokens stood before, and what followed there. Microseconds, bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
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
    """A text that grows. For each pair of tokens it knows where the two newest occurrences went on."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        # Two 32-bit halves each, since plain integers cost the garbage collector nothing: the pair → its newest place
        # and one more than the place before that (0: none).
        self._places: dict[int, int] = {}

    def extend(self, ids: Iterable[int]) -> None:
        """Add tokens at the end."""
        own, places = self.ids, self._places
        for token_id in ids:
            if len(own) > 1 and token_id != BREAK:
                first, second = own[-2], own[-1]
                if first != BREAK and second != BREAK:
                    pair = first << 32 | second
                    before = places.get(pair)
                    places[pair] = len(own) << 32 | (0 if before is None else (before >> 32) + 1)
            own.append(token_id)
        if len(own) > MAX_TOKENS:
            kept = own[len(own) // 2 :]
            self.ids, self._places = [], {}
            self.extend(kept)

    def find(self, text: Ordered[int], least: int = 2) -> Match | None:
        """Where the end of `text` stood before: the longest match of at least `least` tokens, the newest of equals."""
        found = self.find_all(text, least)
        return found[0] if found else None

    def find_all(self, text: Ordered[int], least: int = 2) -> list[Match]:
        """Up to two places where the end of `text` stood before, the one that `find` gives first."""
        if len(text) < 2 or BREAK in (text[-2], text[-1]):
            return []
        places = self._places.get(text[-2] << 32 | text[-1])
        if places is None:
            return []
        found = []
        for at in (places >> 32, (places & 0xFFFFFFFF) - 1):
            length = self._match(at, text) if at >= 0 else 0
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

    def _match(self, at: int, text: Ordered[int]) -> int:
        """How many tokens before `at` equal the end of `text`."""
        limit = min(at, len(text), MAX_MATCH)
        length = 0
        while length < limit and self.ids[at - 1 - length] == text[-1 - length]:
            length += 1
        return length
