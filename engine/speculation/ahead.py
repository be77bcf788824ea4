"""Where steps run ahead of their results: how often to look at what would be guessed, and when a wait is worth it.

    host     │ look │ launch n + 1 │ waits │ takes results of n │ look │ launch n + 2 │ …
    device   │ step n ─────────────────────│ step n + 1 ────────────────────────────────

A look is at the text that is known while a step is in flight, so it costs the device nothing; and the host nothing that
anybody notices while that would wait for the device anyway. It judges what was guessed at the look before and says what
would be guessed now. Drafts need a text whose every token is known. So where they promise enough, the results in flight
are waited for; what the text says then is looked at anew.

A model's guesses cannot be looked at: waits for them in vain are made ever more rarely.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from engine.speculation.account import SURPRISE

SHARE: Final = 0.003
"""Part of the time of steps that looks may take of a host that has none to spare."""
SAVED: Final = 64
DEBT: Final = 256
"""Of so many steps at most that share is saved, and owed."""
LOOKS: Final = 5
"""The median of so many of the newest looks counts, the lesser of two."""
FORGETTING: Final = 1 / 2048
FORGETTING_FIRST: Final = 1 / 128
"""What one step without a look takes from what looks are taken for: a busy machine may have made them dear. The latter
while a median is none.
"""
FIRST_LOOKS: Final = 8
APART: Final = 32
"""So many looks, with so many steps between two of them, are made whatever they cost: once, to learn by."""
CALL_S: Final = 1e-5
"""Asking a device whether it is done takes about so long, and is no waiting."""
LEARNING: Final = 0.2
"""What one step, or look, counts in what the next is taken for."""
KEPT: Final = 0.8
"""How many waits are taken to find what was promised before any was made."""
KEEPING: Final = 0.15
"""What one wait counts in that."""
RUN: Final = 3
"""Where guesses are right in one step, they mostly are in so many."""
FORGIVING: Final = 1 / 2048
"""What one step that runs ahead gives back of it."""
LONGEST_REST: Final = 64
"""A model is waited for at least once in so many steps, if it asks for that."""


class Ahead:
    """See above."""

    def __init__(self) -> None:
        self._spare_s = 0.0  # which the host waits for the device in a step, were there no look
        self._looks: deque[float] = deque(maxlen=LOOKS)
        self._look_s = 0.0  # what a look takes
        self._judged_s = 0.0  # what seeing how right the last one's guesses were took
        self._behind_s = 0.0  # that of the step whose results came last: the next one's wait is so much shorter
        self._num_looks = self._num_unlooked = 0
        self._has_looked = False  # since the last step's results
        self._saved_s = 0.0
        self._looked_s = 0.0  # what looks and judging took that the next step's wait is shorter for
        self._kept = KEPT
        self._rest = 0
        self._next_rest = 1

    def may_look(self) -> bool:
        """Whether a look before the next step is free, or was saved for."""
        cost_s = self._cost_s
        if not cost_s or cost_s <= self._saved_s:
            return True
        return self._num_looks < FIRST_LOOKS and self._num_unlooked >= APART

    def looked(self, elapsed_s: float) -> None:
        """A look took so long."""
        self._looked_s += elapsed_s
        elapsed_s, self._judged_s = elapsed_s + self._judged_s, 0.0
        self._looks.append(elapsed_s)
        self._look_s = sorted(self._looks)[(len(self._looks) - 1) // 2]
        self._saved_s -= max(min(elapsed_s, SURPRISE * self._look_s) - self._spare_s, 0.0)
        self._num_looks += 1
        self._num_unlooked = 0
        self._has_looked = True

    def judged(self, elapsed_s: float) -> None:
        """To see whether what was guessed at the last look is right took so long."""
        self._judged_s += elapsed_s
        self._behind_s += elapsed_s

    def paid(self) -> None:
        """A step that did not run ahead has its results: what was judged with them is part of what that took."""
        self._judged_s = self._behind_s = 0.0

    def expect(self) -> None:
        """An answer begins that may repeat an earlier one: the next look is worth what it takes."""
        self._saved_s = max(self._saved_s, self._cost_s)

    def is_worth(self, promise: float, waiting: float) -> bool:
        """Whether results should be waited for. `promise`: tokens a second with drafts by those without; `waiting`: how
        long the device stands idle for that, in plain steps.
        """
        return promise > 1.0 and self._kept * RUN * (promise - 1.0) > (1.0 - self._kept) * waiting

    def may_ask(self) -> bool:
        """Whether a model may be waited for, if it promises something."""
        return not self._rest

    def waited(self, *, found: bool) -> None:
        """Results were waited for, and drafts are checked now, or none are."""
        self._kept += KEEPING * (found - self._kept)
        self._next_rest = 1 if found else min(2 * self._next_rest, LONGEST_REST)
        self._rest = 0 if found else self._next_rest

    def stepped(self, elapsed_s: float, waited_s: float | None) -> None:
        """A step that ran ahead took so long, while the host had nothing to do for `waited_s`; None: that tells nothing
        of other steps.
        """
        if not self._has_looked:
            self._look_s -= (FORGETTING_FIRST if len(self._looks) < 3 else FORGETTING) * self._look_s
            self._num_unlooked += 1
        if waited_s is not None:
            spare_s = max(waited_s - CALL_S, 0.0)
            if spare_s:
                spare_s += self._looked_s
            self._spare_s += LEARNING * (spare_s - self._spare_s)
        self._looked_s, self._behind_s, self._has_looked = self._behind_s, 0.0, False
        share_s = SHARE * elapsed_s
        saved_s = min(self._saved_s + share_s, max(SAVED * share_s, self._cost_s))
        self._saved_s = max(saved_s, -DEBT * share_s)
        self._kept += FORGIVING * max(KEPT - self._kept, 0.0)
        self._rest = max(self._rest - 1, 0)

    @property
    def _cost_s(self) -> float:
        return max(self._look_s - self._spare_s, 0.0)
