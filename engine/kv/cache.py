"""The KV cache of all sequences: slot pool, radix tree and slot table, and each sequence's hold on them.

The scheduler opens a hold at admission, lets it grow before each step, commits what finished steps computed, and closes
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from engine.kv.pool import FEW, SlotArray, SlotPool
from engine.kv.radix import IdArray, Node, RadixTree
from engine.kv.table import SlotTable

AHEAD: Final = 64
"""Positions for which a sequence that decodes has slots ahead, where writing the table takes a launch."""
MOST_AHEAD: Final = 4
"""No more are given ahead at once than one in so many of the slots that could be had."""


@dataclass(slots=True, eq=False)
class KVHold:
    """What one running sequence holds.

        position   0 ──────────────────── num_committed ──────────── num_slots ──────────── num_ready
                   │ in the tree, locked    │ private: being          │ ahead: in the table, │
                   │ (or a duplicate)       │ computed, or decoded    │ nobody's as yet      │

    Slots ahead are as good as free: whoever needs them gets them.

    `duplicates`: own slots for positions that somebody else put into the tree first. The sequence goes on reading its
    own (they are never remapped under a running batch); they are freed when it ends.
    """

    row: int
    node: Node
    num_committed: int
    num_slots: int
    num_ready: int
    duplicates: list[SlotArray] = field(default_factory=list)


class KVCache:
    """Invariant (`check`): free + pending + tree + private slots are all slots, each exactly once; those ahead are
    private.

    Args:
        num_slots: Slots on the device, the dummy included.
        slot_table: (rows, positions) int32, the runner's.
        share: Whether prefixes stay in the tree for others; if not, every sequence is alone.
        ahead: For so many positions more sequences that decode are given slots in one write; 0: as they need them.
    """

    def __init__(self, num_slots: int, slot_table: torch.Tensor, *, share: bool = True, ahead: int = 0) -> None:
        self.pool = SlotPool(num_slots)
        self.tree = RadixTree()
        self.table = SlotTable(slot_table)
        self.share = share
        self._rows = list(range(slot_table.shape[0] - 1, -1, -1))
        self._ahead = ahead
        self._num_ahead = 0
        self._open: dict[int, KVHold] = {}  # by row

    @property
    def num_available(self) -> int:
        """Slots that could be had now: free ones, those ahead, and those that eviction would give."""
        return self.pool.num_free + self._num_ahead + self.tree.num_evictable

    def cached_length(self, ids: IdArray) -> int:
        """How many leading ids a hold opened now would find computed. The last id is always computed anew."""
        return self.tree.match_length(ids[:-1]) if self.share else 0

    def open(self, ids: IdArray) -> KVHold:
        """Take a row and lock the longest known prefix of `ids` (never all: one token must run to give logits)."""
        row = self._rows.pop()
        if not self.share:
            node, num = self.tree.root, 0
        else:
            match = self.tree.match(ids[:-1])
            node, num = match.node, match.num
            self.table.write_run(row, 0, match.slots)
        self.tree.lock(node)
        hold = self._open[row] = KVHold(row, node, num, num, num)
        return hold

    def grow(self, hold: KVHold, count: int) -> None:
        """Give the next `count` positions slots; evicts where needed. Raises RuntimeError beyond `num_available`."""
        self._give_back(hold)
        self.table.write_run(hold.row, hold.num_slots, self._allocate(count))
        hold.num_slots = hold.num_ready = hold.num_slots + count

    def grow_each(self, holds: Sequence[KVHold], counts: Sequence[int]) -> None:
        """Give each hold so many positions more, in one write, or none where all have them ahead."""
        if self._ahead:
            self._grow_ahead(holds, counts)
            return
        num, cells = sum(counts), self.table.cells
        if num <= FEW and cells is not None:
            self._make_room(num)
            taken = iter(self.pool.allocate_few(num))
            for hold, count in zip(holds, counts, strict=True):
                row, first = hold.row, hold.num_slots
                hold.num_slots = hold.num_ready = first + count
                for position in range(first, first + count):
                    cells[row, position] = next(taken)
            return
        self._extend(holds, counts)
        for hold, count in zip(holds, counts, strict=True):
            hold.num_slots += count

    def _grow_ahead(self, holds: Sequence[KVHold], counts: Sequence[int]) -> None:
        """As `grow_each`. Once one lacks a slot all that have few ahead are given more. What is cached longest goes for
        that, as it would some steps later.
        """
        stops = [hold.num_slots + count for hold, count in zip(holds, counts, strict=True)]
        lacking = [max(stop - hold.num_ready, 0) for hold, stop in zip(holds, stops, strict=True)]
        if any(lacking):
            if sum(lacking) > self.pool.num_free + self.tree.num_evictable:
                self._take_back()
                lacking = list(counts)
            spare = ((self.pool.num_free + self.tree.num_evictable) // MOST_AHEAD - sum(lacking)) // len(holds)
            for index, (hold, stop) in enumerate(zip(holds, stops, strict=True)):
                if 2 * (hold.num_ready - stop) < self._ahead:
                    most = min(stop + min(self._ahead, spare), self.table.width)
                    lacking[index] = max(most - hold.num_ready, lacking[index])
            self._extend(holds, lacking)
            self._num_ahead += sum(lacking)
        for hold, stop in zip(holds, stops, strict=True):
            self._num_ahead -= stop - hold.num_slots
            hold.num_slots = stop

    def _extend(self, holds: Sequence[KVHold], counts: Sequence[int]) -> None:
        """Slots for so many positions behind those that have one, in one write."""
        slots = self._allocate(sum(counts))
        firsts = [hold.num_ready for hold in holds]
        for hold, count in zip(holds, counts, strict=True):
            hold.num_ready += count
        rows, offset = np.repeat([hold.row for hold in holds], counts), np.cumsum(counts) - counts
        self.table.write_cells(rows, np.arange(len(slots)) + np.repeat(np.array(firsts) - offset, counts), slots)

    def reorder(self, hold: KVHold, first: int, chosen: Sequence[int]) -> None:
        """Let positions `first` … be those of slots that stood `chosen` places behind it, in that order: of a tree of
        drafts, those that stand. The other slots from there on come behind them. Nobody may have committed any of them.
        """
        assert hold.num_committed <= first
        slots = self.table.read_run(hold.row, first, hold.num_slots)
        order = np.array([*chosen, *sorted(set(range(len(slots))).difference(chosen))], dtype=np.intp)
        self.table.write_run(hold.row, first, slots[order])

    def shrink(self, hold: KVHold, num_slots: int) -> None:
        """The drafts of positions from `num_slots` on were wrong; nobody may have committed any of them. Their slots
        are free, or ahead.
        """
        assert hold.num_committed <= num_slots <= hold.num_slots
        if num_slots == hold.num_slots:
            return
        if self._ahead:
            self._num_ahead += hold.num_slots - num_slots
            hold.num_slots = num_slots
            return
        cells = self.table.cells
        if hold.num_slots - num_slots <= FEW and cells is not None:
            self.pool.free_few([cells[hold.row, position] for position in range(num_slots, hold.num_slots)])
        else:
            self.pool.free(self.table.read_run(hold.row, num_slots, hold.num_slots).copy())
        hold.num_slots = hold.num_ready = num_slots

    def commit(self, hold: KVHold, ids: IdArray) -> None:
        """Put computed positions `num_committed` … into the tree; `ids` are theirs. Call only when their batch is
        done.
        """
        if not self.share or not len(ids):
            return
        start, stop = hold.num_committed, hold.num_committed + len(ids)
        assert stop <= hold.num_slots
        slots = self.table.read_run(hold.row, start, stop)
        node, present = self.tree.insert(hold.node, ids, slots)
        if present:
            hold.duplicates.append(slots[:present].copy())
        self.tree.lock(node)
        self.tree.unlock(hold.node)
        hold.node = node
        hold.num_committed = stop

    def close(self, hold: KVHold) -> None:
        """The sequence ends or is retracted: unlock its prefix, free what is private, give the row back."""
        self._give_back(hold)
        for slots in self._private(hold):
            self.pool.free(slots)
        del self._open[hold.row]
        self.tree.unlock(hold.node)
        self._rows.append(hold.row)

    def check(self, holds: Iterable[KVHold]) -> None:
        """Prove the invariant for the given live holds. Raises AssertionError otherwise."""
        holders: dict[Node, int] = {}
        owned = [self.tree.owned()]
        rows = list(self._rows)
        for hold in holds:
            holders[hold.node] = holders.get(hold.node, 0) + 1
            owned.extend(self._private(hold))
            rows.append(hold.row)
            assert hold.num_committed <= hold.num_slots <= hold.num_ready
            assert self._open[hold.row] is hold
        assert self._num_ahead == sum(hold.num_ready - hold.num_slots for hold in self._open.values())
        self.tree.check(holders)
        self.pool.check(np.concatenate(owned))
        assert sorted(rows) == list(range(self.table.num_rows)), f"rows not owned exactly once: {sorted(rows)}"

    def _private(self, hold: KVHold) -> list[SlotArray]:
        return [*hold.duplicates, self.table.read_run(hold.row, hold.num_committed, hold.num_ready).copy()]

    def _allocate(self, count: int) -> SlotArray:
        self._make_room(count)
        return self.pool.allocate(count)

    def _give_back(self, hold: KVHold) -> None:
        """A hold's slots ahead are free again."""
        if hold.num_ready > hold.num_slots:
            self.pool.free(self.table.read_run(hold.row, hold.num_slots, hold.num_ready).copy())
            self._num_ahead -= hold.num_ready - hold.num_slots
            hold.num_ready = hold.num_slots

    def _take_back(self) -> None:
        """Those of all holds are."""
        for hold in self._open.values():
            self._give_back(hold)

    def _make_room(self, count: int) -> None:
        """Evict what is missing; slots ahead come last, as they would soon be asked for again."""
        missing = count - self.pool.num_free
        if missing > self.tree.num_evictable:
            self._take_back()
            missing = count - self.pool.num_free
        if missing > 0:
            self.pool.free(self.tree.evict(missing))
