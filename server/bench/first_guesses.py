"""What guesses of first tokens take, which are checked beside prompts: no time between tokens tells of it.

`server.bench.speculation` puts it around a runner. Each step with such guesses is computed once more without them, with
the clock at rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.batch import Row, Runner, SampledToken
    from engine.sequence import Sequence
    from engine.speculation.speculator import Speculator


class FirstGuesses:
    """A runner and a clock for an engine.

    Args:
        runner: What computes.
        clock: Seconds, monotonic.

    Attributes:
        runner: The same, measured where it checks guesses beside prompts.
        taken_s: What looking for such guesses and checking them took so far.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self.runner: Any = _Measured(runner, self) if runner.max_first_drafts else runner
        self.taken_s = 0.0
        self._clock = clock
        self._hidden_s = 0.0

    def clock(self) -> float:
        """Seconds without those of steps that are computed once more."""
        return self._clock() - self._hidden_s

    def watch(self, speculator: Speculator) -> None:
        """Measure what looking for such guesses takes."""
        look = speculator.open

        def looked(sequence: Sequence, rows: int, prompt: int, room: int) -> tuple[int, ...]:
            started_s = self._clock()
            found = look(sequence, rows, prompt, room)
            self.taken_s += self._clock() - started_s
            return found

        speculator.open = looked  # type: ignore[method-assign]

    def step(self, runner: Runner, rows: Ordered[Row]) -> list[SampledToken]:
        """As `Runner.step`."""
        if not any(map(_guesses_first, rows)):
            return runner.step(rows)
        started_s = self._clock()
        sampled = runner.step(rows)
        between_s = self._clock()
        runner.step([_without(row) if _guesses_first(row) else row for row in rows])
        alone_s = self._clock() - between_s
        self._hidden_s += alone_s
        self.taken_s += between_s - started_s - alone_s
        return sampled


class _Measured:
    """The runner in a `FirstGuesses`."""

    def __init__(self, runner: Runner, guesses: FirstGuesses) -> None:
        self._runner = runner
        self._guesses = guesses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, rows: Ordered[Row]) -> list[SampledToken]:
        """See `Runner.step`."""
        return self._guesses.step(self._runner, rows)


def _guesses_first(row: Row) -> bool:
    """Whether it checks guesses of an answer's first tokens."""
    return bool(row.drafted) and row.sampling is not None and row.sampling.output_index == 0


def _without(row: Row) -> Row:
    """The same without guesses."""
    count = len(row.token_ids) - len(row.drafted)
    positions = None if row.positions is None else row.positions[:, :count]
    return dataclasses.replace(row, token_ids=row.token_ids[:count], positions=positions, drafted=(), masks=None)
