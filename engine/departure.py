"""Batches that have been sent and whose results are not yet taken in.

`engine.core` sends at most one ahead of its results. What counts as computed, and which tokens are still coming, is
settled at departure, so that the next batch can be scheduled; drafts count only once they have been found right.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.scheduler import Chunk, Plan
from engine.sequence import State


class Departed(NamedTuple):
    """A chunk whose batch has been sent. `is_prompt`: it was no decode step. `num_retracted`: of its sequence, then."""

    chunk: Chunk
    is_prompt: bool
    num_retracted: int

    @property
    def is_awaited(self) -> bool:
        """Whether the sequence still runs, and has not started over since."""
        sequence = self.chunk.sequence
        return sequence.state is State.RUNNING and sequence.num_retracted == self.num_retracted


class Batch(NamedTuple):
    """A plan that has been sent. `started_s`: when its scheduling began. `is_usual`: it takes as long as steps like it
    do, not waiting for results only so that guesses could be looked for, nor making something ready for later ones.
    """

    plan: Plan
    departed: list[Departed]
    started_s: float
    is_usual: bool

    @property
    def has_drafts(self) -> bool:
        """Whether a sequence may get more than one token of it."""
        return any(part.chunk.drafts for part in self.departed)

    def drafts_in_flight(self) -> dict[int, int]:
        """How many positions beyond what counts as computed are being checked, by serial of the sequence."""
        return {part.chunk.sequence.serial: len(part.chunk.drafts) for part in self.departed if part.is_awaited}


def depart(plan: Plan, chunks: list[Chunk], started_s: float, *, is_usual: bool = True) -> Batch:
    """The batch of these chunks of a plan. Their positions, but for drafts, count as computed from here on, and one
    token of each that samples as coming.
    """
    departed = []
    for chunk in chunks:
        sequence = chunk.sequence
        departed.append(Departed(chunk, not sequence.is_decoding, sequence.num_retracted))
        sequence.num_computed += chunk.count - len(chunk.drafts)
        sequence.num_pending += chunk.samples
    return Batch(plan, departed, started_s, is_usual)
