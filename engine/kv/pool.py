"""The slot pool: which KV slots are free. Page size is one token; slot 0 is the dummy for padding and never handed out.

Slots freed while a batch is in flight become available only when it has completed, because that batch still reads them.

They are handed out in rising order, and those of drafts that were wrong come next again: so what a sequence reads lies
one behind the other, and a processor fetches it ahead (3 % of a decode step).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

SlotArray = NDArray[np.int32]
FEW: Final = 24
"""Up to so many slots are handled one by one, which takes less than numpy's calls do."""


class SlotPool:
    """Owns the free slots. Invariant: a slot is free, pending, or taken, and `_taken` says which.

    Args:
        num_slots: Slots on the device, the dummy included.

    Attributes:
        followed: bool (num_slots,): slots for which a model that drafts has computed its own entry, too. Whoever has it
            compute them says so here; a slot that is handed out anew is not among them.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"a pool needs at least 2 slots (one is the dummy), got {num_slots}")
        self.capacity = num_slots - 1
        self.num_free = self.capacity
        self.in_flight = False
        self._stack: SlotArray = np.arange(num_slots - 1, 0, -1, dtype=np.int32)  # the free ones are _stack[:num_free]
        self.followed: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self._taken: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)
        self._pending: list[SlotArray] = []
        self._stack_cells, self._taken_cells = self._stack.data, self._taken.data
        self._followed_cells = self.followed.data

    def allocate(self, count: int) -> SlotArray:
        """Take `count` free slots. Raises RuntimeError when fewer are free."""
        if count > self.num_free:
            raise RuntimeError(f"{count} slots asked for, {self.num_free} free of {self.capacity}")
        slots = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        self._taken[slots] = True
        self.followed[slots] = False
        return slots

    def allocate_few(self, count: int) -> list[int]:
        """The same one by one, for up to `FEW` slots."""
        if count > self.num_free:
            raise RuntimeError(f"{count} slots asked for, {self.num_free} free of {self.capacity}")
        first, self.num_free = self.num_free - count, self.num_free - count
        slots = self._stack_cells[first : first + count].tolist()[::-1]
        taken, followed = self._taken_cells, self._followed_cells
        for slot in slots:
            taken[slot] = True
            followed[slot] = False
        return slots

    def free_few(self, slots: Sequence[int]) -> None:
        """As `free` for up to `FEW` slots."""
        taken = self._taken_cells
        if self.in_flight or not all(taken[slot] for slot in slots):
            self.free(np.array(slots, np.int32))
            return
        stack, num_free = self._stack_cells, self.num_free
        for index, slot in enumerate(reversed(slots), start=num_free):
            taken[slot] = False
            stack[index] = slot
        self.num_free = num_free + len(slots)

    def free(self, slots: SlotArray) -> None:
        """Give slots back: at once, or after the batch in flight. Raises RuntimeError for a slot that is not taken."""
        if not len(slots):
            return
        if not self._taken[slots].all():
            raise RuntimeError(f"slots freed that nobody holds: {slots[~self._taken[slots]].tolist()}")
        self._taken[slots] = False
        if self.in_flight:
            self._pending.append(slots)
        else:
            self._push(slots)

    def batch_started(self) -> None:
        """A batch begins to read and write slots: frees wait from here on."""
        self.in_flight = True

    def batch_finished(self) -> None:
        """The batch has completed: frees that waited take effect."""
        self.in_flight = False
        for slots in self._pending:
            self._push(slots)
        self._pending.clear()

    def check(self, owned: SlotArray) -> None:
        """Prove that free + pending + `owned` are all slots, each exactly once. Raises AssertionError otherwise."""
        parts = [self._stack[: self.num_free], *self._pending, owned]
        count = np.bincount(np.concatenate(parts), minlength=self.capacity + 1)
        wrong = np.flatnonzero(count[1:] != 1) + 1
        if len(wrong) or count[0] or len(count) != self.capacity + 1:
            raise AssertionError(
                f"slots not owned exactly once: {[(int(slot), int(count[slot])) for slot in wrong[:20]]}, "
                f"dummy owned {count[0]} times"
            )
        if int(self._taken.sum()) != len(owned):
            raise AssertionError(f"{int(self._taken.sum())} slots marked taken, {len(owned)} owned")

    def _push(self, slots: SlotArray) -> None:
        self._stack[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)
