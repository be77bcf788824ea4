"""A drafter over a fake runner whose entries must be what the runner's KV is: a hash of all that came before.

Before each forward it looks at every entry that it is told to rely on. An entry that is missing, was made for another
text, or of a wrong guess, differs from the KV of its position; `complaints` of the runner keeps what it finds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from engine.speculation.drafter import DraftRow
from engine.speculation.drafting import Kind
from tests.engine.fake_runner import SEED, VOCAB_SIZE, FakeRunner, fold

UNKNOWN = -1


class FakeDrafter:
    """See `engine.speculation.drafter.Drafter`.

    Args:
        runner: Whose slots it shares.
        kind: What it is.
        accuracy: How probably it guesses what `answers` say.

    Attributes:
        answers: By the hash of a text, the token that follows it.
    """

    cost = late_cost = 0.1
    told = None
    most_late = 512
    token_bytes = 8

    def __init__(self, runner: FakeRunner, kind: Kind, accuracy: float, seed: int = 0) -> None:
        self.kind = kind
        self.lag = int(kind is Kind.HEAD)
        self.keeps_guesses = kind is Kind.DRAFT_MODEL
        self.max_positions = runner.max_positions
        self.accuracy = accuracy
        self.answers: dict[int, int] = {}
        self.entries = [UNKNOWN] * runner.num_slots
        self.num_forwards = 0
        self._known: dict[int, int] = {}  # positions that the runner has computed, by table row
        self._runner = runner
        self._random = random.Random(seed)

    def forward(self, rows: Sequence[DraftRow], *, guessed: bool) -> torch.Tensor:
        """Hash all rows; guesses are sure."""
        try:
            return self._forward(rows, guessed)
        except AssertionError as error:
            self._runner.complaints.append(error)
            raise

    def warm_up(self) -> None:
        """Nothing to warm."""

    def _forward(self, rows: Sequence[DraftRow], guessed: bool) -> torch.Tensor:
        self.num_forwards += 1
        assert len({row.table_row for row in rows}) == len(rows), "two rows of one sequence"
        for row in rows:  # all are written before anybody reads, as in a layer
            self._write(row, guessed)
        asking = [row for row in rows if row.asks]
        logits = torch.zeros(len(asking), VOCAB_SIZE)
        for own, row in zip(logits, asking, strict=True):
            token = self.answers.get(fold(SEED, *self._text(row)), 0)
            own[token if self._random.random() < self.accuracy else self._random.randrange(VOCAB_SIZE)] = 1e6
        return logits

    def _write(self, row: DraftRow, guessed: bool) -> None:
        slots = self._slots(row)
        assert self.lag <= row.start < len(slots)
        assert 0 not in slots, "a position without a slot"
        if guessed:
            assert len(row.token_ids) == 1
        else:
            self._known[row.table_row] = len(slots) - row.asks
        known = self._known[row.table_row]
        for position in range(row.start, len(slots)):
            if position < known:
                entry = self._runner.kv[slots[position]]
                assert entry != UNKNOWN, "the text is not known so far"
            else:
                axes = (position + row.position_delta,) * 3
                entry = fold(fold(SEED, *self._text(row, position)), position, *axes, row.token_ids[-1])
            self.entries[slots[position]] = entry

    def _text(self, row: DraftRow, stop: int | None = None) -> list[int]:
        """What the entries of positions below `stop` are; those of what the runner has computed must be the same."""
        slots, known = self._slots(row)[:stop], self._known[row.table_row]
        if stop is None:
            assert [self.entries[slot] for slot in slots[self.lag : known]] == [
                self._runner.kv[slot] for slot in slots[self.lag : known]
            ], "an entry that is not of this text"
        return [self._runner.kv[slot] for slot in slots[:known]] + [self.entries[slot] for slot in slots[known:]]

    def _slots(self, row: DraftRow) -> list[int]:
        slots: list[int] = self._runner.slot_table[row.table_row, : row.start + len(row.token_ids)].tolist()
        return slots
