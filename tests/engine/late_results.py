"""Makes any runner one that launches: batches are computed in order, as a device does, and told when asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from engine.batch import FUTURE_TOKEN, Row, Runner, SampledToken

UNKNOWN: Final = -1
Step = Callable[[Sequence[Row]], list[SampledToken]]


class LateFlight:
    """See `engine.batch.Flight`."""

    is_first = False

    def __init__(self, owner: LateResults, tokens: list[SampledToken]) -> None:
        self._owner = owner
        self._tokens = tokens

    def wait(self) -> None:
        """Until they may be told."""
        self._owner.before_result()

    def result(self) -> list[SampledToken]:
        """The tokens."""
        flights = self._owner.in_flight
        del flights[: flights.index(self)]  # those before were given up
        flights.remove(self)
        return self._tokens


class LateResults:
    """Keeps the tokens of batches back. What drafts end with only the host can say, so it is no `FUTURE_TOKEN`.

    `num_launches` batches were sent, `num_ahead` of them before the results of the one before had been asked for.
    """

    def __init__(self, step: Step, max_rows: int) -> None:
        self.in_flight: list[LateFlight] = []
        self.most_in_flight = 0
        self.num_launches = 0
        self.num_ahead = 0
        self.before_result: Callable[[], None] = lambda: None
        self._step = step
        self._future = [UNKNOWN] * max_rows

    def launch(self, rows: Sequence[Row]) -> LateFlight:
        """Compute all rows now."""
        tokens = self._step([self._with_future(row) for row in rows])
        drawn = iter(tokens)
        for row in rows:
            if row.sampling is not None:
                own = [next(drawn).token_id for _ in (row.sampling, *row.drafted)]
                self._future[row.table_row] = UNKNOWN if row.drafted else own[0]
        self.num_launches += 1
        self.num_ahead += bool(self.in_flight)
        flight = LateFlight(self, tokens)
        self.in_flight.append(flight)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return flight

    def _with_future(self, row: Row) -> Row:
        if list(row.token_ids) != [FUTURE_TOKEN]:
            return row
        known = self._future[row.table_row]
        assert known != UNKNOWN, "a token asked for that nobody has drawn"
        return dataclasses.replace(row, token_ids=[known])


class Late:
    """A loaded runner, as one that launches. Everything else is the runner's own."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.results = LateResults(runner.step, runner.max_rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, rows: Sequence[Row]) -> LateFlight:
        """See `engine.batch.OverlappedRunner.launch`."""
        return self.results.launch(rows)
