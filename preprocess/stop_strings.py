"""Finds the first of several strings in text that arrives in pieces; knows how much of the end might become one.

The automaton of Aho and Corasick (1975): one step a character, however many strings there are. Its state is the longest
end of the text that begins a stop string, so what must be held back is exactly as long as the state is deep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string that ends at character `end` of the text that was fed last; it may begin before that text."""

    stop: str
    end: int


class StopMatcher:
    """Follows one text. Of several matches the one that ends first counts; of those that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str, *, ignore: bool = False) -> Match | None:
        """Read more text, up to the first match. With `ignore`, matches that end in it count as ordinary text."""
        for index, character in enumerate(text):
            state = self._state
            while state and character not in self._next[state]:
                state = self._fallback[state]
            self._state = state = self._next[state].get(character, 0)
            stop = self._found[state]
            if stop is not None:
                if not ignore:
                    return Match(stop, index + 1)
                while state and not self._next[state]:  # complete and ignored: it cannot become a longer one
                    self._state = state = self._fallback[state]
        return None

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fallback.append(0)
                self._found.append(None)
            state = following
        self._found[state] = stop

    def _link(self) -> None:
        """Breadth first: where to go on when the next character does not fit, and what has been found there."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                fallback = self._fallback[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[following] = self._next[fallback].get(character, 0)
                if self._found[following] is None:
                    self._found[following] = self._found[self._fallback[following]]
                queue.append(following)
