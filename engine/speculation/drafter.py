"""What drafting asks of a model that guesses, a draft model or a trained head. `model_drafting` calls it between steps.

A drafter keeps an entry of its own for each slot of the target's pool: keys and values, found by the same slot table.
The entry of a position hangs on the tokens up to it alone, as the target's does, so whatever is true of a slot (shared
by a prefix, kept by a retraction, taken back with a wrong guess) is true of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from engine.batch import RowSampling
    from engine.speculation.drafting import Kind
    from engine.speculation.torch_drafters import Told

MOST_LATE: Final = 512
"""See `Drafter.most_late`."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Tokens of one sequence that the drafter computes: positions `start`, `start + 1`, …; all before have entries.

    Attributes:
        table_row: Its row of the slot table.
        start: The first position.
        token_ids: Plain ids; of vision tokens, those of their placeholders.
        vision: bool (len(token_ids),): which of them are vision tokens; None: none is.
        positions: int32 (3, len(token_ids)), rotary positions, those of the tokens `Drafter.lag` before these. None:
            all three are `position_delta` more than their place in the sequence.
        position_delta: As in `engine.batch.Row`.
        asks: Whether it is to be guessed what follows the last of them.
    """

    table_row: int
    start: int
    token_ids: Sequence[int]
    vision: NDArray[np.bool_] | None = None
    positions: NDArray[np.int32] | None = None
    position_delta: int = 0
    asks: bool = True

    def parts(self) -> tuple[DraftRow | None, DraftRow]:
        """What comes before the last token of a row that asks, None where nothing does; and that token, which asks."""
        count = len(self.token_ids) - 1
        if not count:
            return None, self
        vision, positions = self.vision, self.positions
        before = replace(
            self,
            token_ids=self.token_ids[:count],
            vision=None if vision is None else vision[:count],
            positions=None if positions is None else positions[:, :count],
            asks=False,
        )
        last = replace(
            self,
            start=self.start + count,
            token_ids=self.token_ids[count:],
            vision=None,  # it was said, or is where an answer begins
            positions=None if positions is None else positions[:, count:],
        )
        return before, last


def split(rows: Sequence[DraftRow]) -> tuple[list[DraftRow], list[DraftRow]]:
    """What comes before the last tokens of rows that ask, and all of the others; and those last tokens, which ask."""
    parts = [row.parts() if row.asks else (row, None) for row in rows]
    return [before for before, _ in parts if before is not None], [last for _, last in parts if last is not None]


class Drafter(Protocol):
    """A model that guesses, on one device.

    Attributes:
        kind: What its guesses are called, and believed at first.
        lag: The entry of a position is made of its token and of what the target made of the position so many before;
            positions below have none. 0 for a model by itself, 1 for a head.
        keeps_guesses: Whether an entry that it made while guessing is that of the text once the guess is right. A
            head's is not: it took its own guess of what the target would make of the position before.
        max_positions: It guesses nothing at or beyond.
        cost: Time of one token, as a part of the target's: what is believed before it is measured.
        late_cost: The same of one of many tokens that it only catches up with.
        most_late: Tokens that all sequences together catch up with before one step, so that streams do not stutter.
        token_bytes: What an entry takes.
        told: What the target has to write down of each step's tokens; None: nothing.
    """

    kind: Kind
    lag: int
    keeps_guesses: bool
    max_positions: int
    cost: float
    late_cost: float
    most_late: int
    token_bytes: int

    @property
    def told(self) -> Told | None:
        """See above."""
        ...

    def forward(self, rows: Sequence[DraftRow], *, guessed: bool) -> torch.Tensor:
        """Computes the entries of all tokens of `rows`, each row another sequence.

        `guessed`: each row is one token, the guess that followed from the row's last token in the call before.

        Returns:
            float32 (rows that ask, the target's vocabulary): logits of what follows, in the order of `rows`. Ids that
            the drafter does not know are -inf. Where no row asks all is done by then, so that its time can be told from
            that of the guesses that follow.
        """
        ...

    def warm_up(self) -> None:
        """Run every kind of work once, while the slot table points at the dummy slot."""
        ...


@runtime_checkable
class ChainDrafter(Drafter, Protocol):
    """One that makes several guesses in a call."""

    def draws(self, how: RowSampling) -> bool:
        """Whether it can draw as the target will."""
        ...

    def guess(
        self, rows: Sequence[DraftRow], lengths: Sequence[int], sampling: Sequence[RowSampling]
    ) -> list[list[int]]:
        """As `forward` of rows that are not guessed, and then one guess after the other: those of the rows that ask, so
        many of each. `sampling`: how the first is drawn, of which `draws` is true; later ones alike, but for what a
        grammar allows.
        """
        ...
