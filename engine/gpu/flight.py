"""A step that has been launched on a GPU: its tokens are copied out of the device behind it, for whoever asks once."""

from __future__ import annotations

from itertools import islice

import torch

from engine.batch import SampledToken
from engine.gpu.staging import Results


class CudaFlight:
    """A step that has been launched. Its tokens: known already, or on their way out of the device.

    Args:
        tokens: int64, of all samples of the step.
        picks: Which of those each row with `sampling` is.
        known: By index among these rows, what the host has drawn already.
        results: Memory for what comes out.
        is_first: See `engine.batch.Flight`.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        picks: list[int],
        known: dict[int, SampledToken],
        results: Results,
        *,
        is_first: bool = False,
    ) -> None:
        self.is_first = is_first
        self._picks = picks
        self._known = known
        self._results = results
        self._is_read = False
        self._pinned, self._copied = results.take(len(tokens))
        self._tokens = self._pinned[: len(tokens)]
        self._tokens.copy_(tokens, non_blocking=True)
        self._copied.record()

    def wait(self) -> None:
        """See `engine.batch.Flight.wait`."""
        self._copied.synchronize()

    def result(self) -> list[SampledToken]:
        """See `engine.batch.Flight.result`."""
        if self._is_read:
            raise RuntimeError("a flight's result was asked for twice: its memory may be another's by now")
        self._is_read = True
        self._copied.synchronize()
        token_ids: list[int] = self._tokens.tolist()
        self._results.give_back(self._pinned, self._copied)
        known = self._known
        return [known.get(index) or SampledToken(token_ids[pick]) for index, pick in enumerate(self._picks)]


class JoinedFlight:
    """Parts of a step that have been launched one after the other.

    Args:
        flights: Of each part.
        parts: Which rows each part has.
        counts: How many tokens each row of the step samples.
    """

    def __init__(self, flights: list[CudaFlight], parts: list[list[int]], counts: list[int]) -> None:
        self.is_first = any(flight.is_first for flight in flights)
        self._flights = flights
        self._parts = parts
        self._counts = counts

    def wait(self) -> None:
        """See `engine.batch.Flight.wait`."""
        for flight in self._flights:
            flight.wait()

    def result(self) -> list[SampledToken]:
        """See `engine.batch.Flight.result`."""
        of_rows: list[list[SampledToken]] = [[] for _ in self._counts]
        for flight, part in zip(self._flights, self._parts, strict=True):
            tokens = iter(flight.result())
            for row in part:
                of_rows[row] = list(islice(tokens, self._counts[row]))
        return [token for own in of_rows for token in own]
