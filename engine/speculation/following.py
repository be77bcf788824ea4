"""Which answers anything is guessed of or remembered, where steps are so short that their begins and ends weigh.

An answer of 13 tokens takes 3 ms on a CPU, and telling the sources of its prompt, looking for its first tokens and
remembering it a tenth of a millisecond or two. So while more was lost than may be only one answer of several is
followed, by which a change is noticed; and first tokens are looked for ever more rarely while none is right.
"""

from __future__ import annotations

from typing import Final

FOLLOWED: Final = (8, 64)
"""While more was lost than may be, one answer of so many is followed all the same: after each that was in vain one of
twice as many.
"""
OPENINGS: Final = 3
MOST_PATIENCE: Final = 4
"""After so many looks for first tokens that bore no fruit they are looked for only in every other answer, after twice
as many in every fourth, and so on up to this power of two.
"""


class Following:
    """Counts answers."""

    def __init__(self) -> None:
        self._num_passed = 0  # answers since one was followed
        self._one_of = FOLLOWED[0]
        self._num_closed = 0  # answers since first tokens were looked for
        self.num_fruitless = 0  # such looks since they bore fruit

    def follows(self, *, is_borne: bool) -> bool:
        """Whether an answer that begins is followed. `is_borne`: no more was lost than may be."""
        if is_borne:
            self._num_passed, self._one_of = 0, FOLLOWED[0]
            return True
        self._num_passed += 1
        if self._num_passed < self._one_of:
            return False
        self._num_passed, self._one_of = 0, min(2 * self._one_of, FOLLOWED[1])
        return True

    def opens(self, *, is_repeating: bool) -> bool:
        """Whether to look for its first tokens. `is_repeating`: it may well repeat an earlier one."""
        patience = 2 ** min(self.num_fruitless // OPENINGS, MOST_PATIENCE) - 1
        if not is_repeating and self._num_closed < patience:
            self._num_closed += 1
            return False
        self._num_closed = 0
        self.num_fruitless += 1
        return True

    def opened(self, num_right: int, num_checked: int) -> None:
        """So many first tokens were right of those that were checked."""
        if 3 * num_right >= num_checked:
            self.num_fruitless = 0
