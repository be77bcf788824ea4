"""The slot pool: no slot is handed out twice, and what a batch still reads is not free before it has completed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.pool import FEW, SlotPool


class PoolMachine(RuleBasedStateMachine):
    """`held` are slots that we were given; `late` those freed during a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(20)
        self.held: list[int] = []
        self.late: list[int] = []

    @rule(count=st.integers(0, 8), one_by_one=st.booleans())
    def allocate(self, count: int, *, one_by_one: bool) -> None:
        allocate = self.pool.allocate_few if one_by_one else self.pool.allocate
        if count > self.pool.num_free:
            with pytest.raises(RuntimeError, match="free of 19"):
                allocate(count)
            return
        given = list(map(int, allocate(count)))
        assert not self.pool.followed[given].any()
        self.pool.followed[given] = True
        assert 0 not in given
        assert not set(given) & {*self.held, *self.late}
        self.held.extend(given)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), one_by_one=st.booleans())
    def free(self, data: st.DataObject, *, one_by_one: bool) -> None:
        count = data.draw(st.integers(1, len(self.held)))
        gone, self.held = self.held[:count], self.held[count:]
        before = self.pool.num_free
        if one_by_one:
            self.pool.free_few(gone)
        else:
            self.pool.free(np.array(gone, dtype=np.int32))
        if self.pool.in_flight:
            assert self.pool.num_free == before
            self.late.extend(gone)

    @rule()
    def batch(self) -> None:
        if self.pool.in_flight:
            self.pool.batch_finished()
            self.late.clear()
        else:
            self.pool.batch_started()

    @invariant()
    def whole(self) -> None:
        self.pool.check(np.array(self.held, dtype=np.int32))
        assert self.pool.num_free == 19 - len(self.held) - len(self.late)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_freeing_what_is_free_is_refused() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(2)
    pool.free(slots)
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.free(slots)


def test_freeing_one_by_one_what_is_free_is_refused() -> None:
    pool = SlotPool(5)
    slots = pool.allocate_few(2)
    pool.free_few(slots)
    with pytest.raises(RuntimeError, match="nobody holds"):
        pool.free_few(slots)


def test_check_names_a_lost_and_a_doubled_slot() -> None:
    pool = SlotPool(4)
    one, two = pool.allocate(2).tolist()
    with pytest.raises(AssertionError, match=rf"\({two}, 0\)"):
        pool.check(np.array([one], dtype=np.int32))
    with pytest.raises(AssertionError, match=rf"\({two}, 2\)"):
        pool.check(np.array([one, two, two], dtype=np.int32))


def test_a_pool_needs_a_slot_beside_the_dummy() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        SlotPool(1)


def test_slots_rise_with_positions_though_drafts_were_wrong() -> None:
    """A processor reads ahead what lies one behind the other."""
    pool = SlotPool(200)
    slots = pool.allocate(90).tolist()
    for count, num_right in ((1, 1), (4, 2), (30, 3), (8, 1), (1, 1)):
        drafted = pool.allocate_few(count) if count <= FEW else pool.allocate(count).tolist()
        wrong = drafted[num_right:]
        pool.free_few(wrong) if len(wrong) <= FEW else pool.free(np.array(wrong, np.int32))
        slots += drafted[:num_right]
    assert slots == list(range(slots[0], slots[0] + 98))
