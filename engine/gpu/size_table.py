"""Which captured size of a step serves it soonest, by what each took when it was captured.

tokens of chunks   16 … 64 │ … 144 │ … 192 │ …      a step takes the quickest size among those that hold it:
a step takes            1.9 │   2.2 │   2.6 │ …     a larger one may be quicker, by the tiles of its products
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from engine.gpu.step_sizes import Size


class _Choice(NamedTuple):
    """Sizes for some number of rows: those that hold at most so many tokens of chunks, rising, of each the quickest
    that holds as many, and how much longer that takes than the one without chunks.
    """

    prompts: list[int]
    best: list[Size]
    added_s: list[float]


class SizeTable:
    """Sizes that are captured, and their seconds without keys to read.

    Args:
        serves: Whether a captured size may serve chunks whose keys are split, or are not.
    """

    def __init__(self, serves: Callable[[Size, bool], bool]) -> None:
        self._serves = serves
        self._seconds: dict[Size, float] = {}
        self._choices: dict[tuple[int, bool], _Choice] = {}

    def add(self, size: Size, elapsed_s: float) -> None:
        """A size was captured, perhaps anew; a replay takes so long."""
        self._seconds[size] = elapsed_s
        self._choices.clear()

    def choose(self, wanted: Size) -> Size:
        """The quickest size that holds a step of so many rows and tokens, and has no chunks if it has none.

        Raises:
            LookupError: None does.
        """
        choice = self._choice(wanted.decode, wanted.splits)
        at = bisect_left(choice.prompts, wanted.prompt)
        if at == len(choice.best) or bool(choice.prompts[at]) != bool(wanted.prompt):
            raise LookupError(f"no step of {wanted.decode} + {wanted.prompt} tokens is captured")
        return choice.best[at]

    def added_s(self, rows: int, tokens: int) -> float:
        """What so many tokens of chunks add to a step of so many rows; never falls as tokens grow. More than any size
        holds take as many times as long.

        Raises:
            LookupError: No size holds so many rows, alone or with chunks.
        """
        if not tokens:
            return 0.0
        prompts, _, added_s = self._choice(rows, False)
        if not added_s:
            raise LookupError(f"no steps of {rows} rows, alone and with chunks, are captured")
        at = bisect_left(prompts, tokens)
        return added_s[at] if at < len(prompts) else added_s[-1] * tokens / prompts[-1]

    def _choice(self, rows: int, splits: bool) -> _Choice:
        choice = self._choices.get((rows, splits))
        if choice is None:
            choice = self._choices[rows, splits] = self._make(rows, splits)
        return choice

    def _make(self, rows: int, splits: bool) -> _Choice:
        holding = [size for size in self._seconds if size.decode >= rows]
        alone = [size for size in holding if not size.prompt]
        with_chunks = [size for size in holding if size.prompt and self._serves(size, splits)]
        choice = _Choice([], [], [])
        for size in sorted(with_chunks, key=lambda size: size.prompt, reverse=True):
            best = min([size, *choice.best[-1:]], key=self._rank)
            if choice.prompts[-1:] == [size.prompt]:
                choice.best[-1] = best
            else:
                choice.prompts.append(size.prompt)
                choice.best.append(best)
        if alone:
            choice.prompts.append(0)
            choice.best.append(min(alone, key=self._rank))
        choice.prompts.reverse()
        choice.best.reverse()
        if with_chunks and (alone or not rows):
            alone_s = self._seconds[choice.best[0]] if rows else 0.0
            choice.added_s.extend(max(self._seconds[size] - alone_s, 0.0) for size in choice.best)
        return choice

    def _rank(self, size: Size) -> tuple[float, int, int]:
        return self._seconds[size], size.prompt, size.decode
