"""The arena is real, shared, anonymous memory; the lease table never hands out a byte twice."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from preprocess.arena import ALIGNMENT, NO_LEASE, Arena, LeaseTable
from preprocess.wire import Lease


def test_an_arena_is_allocated_in_full() -> None:
    with Arena.create(1 << 20) as arena:
        assert arena.size == 1 << 20
        assert os.fstat(arena.fd).st_blocks * 512 >= 1 << 20
        assert bytes(arena.view(0, 16)) == bytes(16)


def test_a_child_writes_what_the_parent_reads() -> None:
    code = (
        "import sys; from preprocess.arena import Arena\n"
        "arena = Arena.attach(int(sys.argv[1]), 4096)\n"
        "view = arena.view(64, 5); view[:] = b'hello'; view.release(); arena.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    with Arena.create(4096) as arena:
        assert os.get_inheritable(arena.fd)
        root = Path(__file__).parents[2]
        subprocess.run([sys.executable, "-c", code, str(arena.fd)], pass_fds=[arena.fd], check=True, cwd=root)
        assert bytes(arena.view(64, 5)) == b"hello"


def test_nothing_of_it_is_left_behind() -> None:
    arena = Arena.create(4096)
    fd = arena.fd
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")  # it has no name that could stay
    arena.close()
    arena.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, 4097), (4096, 1), (5, -1)])
def test_a_view_stays_inside(offset: int, size: int) -> None:
    with Arena.create(4096) as arena, pytest.raises(ValueError, match="outside of the arena of 4096 bytes"):
        arena.view(offset, size)


def test_too_large_an_arena_is_an_error_now_and_no_crash_later() -> None:
    with pytest.raises(OSError, match="bytes are available"):
        Arena.create(1 << 62)
    with pytest.raises(ValueError, match="at least one byte"):
        Arena.create(0)


def test_first_fit_and_full() -> None:
    table = LeaseTable(256)
    first, second, third = table.lease(64), table.lease(1), table.lease(128)
    assert (first, second, third) == (Lease(0, 64), Lease(64, 1), Lease(128, 128))
    assert table.lease(1) == NO_LEASE
    table.release(second)
    assert table.lease(65) == NO_LEASE
    assert table.lease(60) == Lease(64, 60)
    table.release(first)
    assert table.lease(1) == Lease(0, 1)


def test_a_lease_is_held_once() -> None:
    table = LeaseTable(256)
    lease = table.lease(100)
    smaller = table.shrink(lease, 10)
    for wrong in (lease, Lease(64, 10)):
        with pytest.raises(ValueError, match="is not held"):
            table.release(wrong)
    table.release(smaller)
    with pytest.raises(ValueError, match="is not held"):
        table.release(smaller)
    table.release(NO_LEASE)
    assert table.used == 0


class LeaseTableMachine(RuleBasedStateMachine):
    """Against a plain model: a set of blocks."""

    SIZE = 1000

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(self.SIZE)
        self.held: list[Lease] = []

    @rule(size=st.integers(0, 400))
    def lease(self, size: int) -> None:
        lease = self.table.lease(size)
        if lease == NO_LEASE:
            assert size == 0 or not self._fits(size)
        else:
            assert lease.size == size
            self.held.append(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.table.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        smaller = self.table.shrink(lease, data.draw(st.integers(0, lease.size)))
        assert smaller.offset in (lease.offset, 0)
        if smaller != NO_LEASE:
            self.held.append(smaller)

    @invariant()
    def whole(self) -> None:
        self.table.check()
        blocks = sorted((lease.offset, lease.offset + lease.size) for lease in self.held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(blocks))
        assert (self.table.used == 0) == (not self.held)

    def _fits(self, size: int) -> bool:
        starts = range(0, self.SIZE - size + 1, ALIGNMENT)
        return any(
            all(start + size <= held.offset or held.offset + held.size <= start for held in self.held)
            for start in starts
        )


TestLeaseTable = LeaseTableMachine.TestCase
TestLeaseTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
