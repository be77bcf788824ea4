"""The slot table on a device keeps its mirror and the tensor equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.cache import KVCache, KVHold
from engine.kv.pool import FEW
from engine.kv.table import SlotTable


@pytest.mark.parametrize("is_mirrored", [False, True], ids=["host", "device"])
def test_the_tensor_holds_what_was_written(is_mirrored: bool) -> None:
    tensor = torch.zeros((3, 8), dtype=torch.int32)
    table = SlotTable(tensor)
    if is_mirrored:  # as on another device: the tensor's memory is not ours
        table._device, table._host = tensor, np.zeros((3, 8), np.int32)
    table.write_run(1, 2, np.array([5, 6, 7], np.int32))
    table.write_cells(np.array([0, 2]), np.array([7, 0]), np.array([8, 9], np.int32))
    expected = [[0] * 7 + [8], [0, 0, 5, 6, 7, 0, 0, 0], [9] + [0] * 7]
    assert tensor.tolist() == expected
    assert [table.read_run(row, 0, 8).tolist() for row in range(3)] == expected


@pytest.mark.parametrize("tensor", [torch.zeros((3, 8)), torch.zeros(8, dtype=torch.int32)])
def test_another_shape_or_type_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"\(rows, positions\) int32"):
        SlotTable(tensor)


def test_few_slots_are_had_and_given_back_as_many_are() -> None:
    """Those of few tokens are handled one by one, and those of many by numpy."""
    few, many = (KVCache(200, torch.zeros((4, 90), dtype=torch.int32)) for _ in range(2))
    holds = [[cache.open(np.arange(3)) for _ in range(3)] for cache in (few, many)]
    for _ in range(4):
        for hold in holds[0]:
            few.grow_each([hold], [FEW // 3])
        many.grow_each(holds[1], [FEW // 3] * 3)
        many.grow_each(holds[1], [FEW] * 3)  # more than are handled one by one
        for hold in holds[1]:
            many.shrink(hold, hold.num_slots - FEW)
        for cache, own in ((few, holds[0]), (many, holds[1])):
            cache.check(own)
            cache.shrink(own[1], own[1].num_slots - 2)
            cache.check(own)
        assert [hold.num_slots for hold in holds[0]] == [hold.num_slots for hold in holds[1]]
    for cache, own in ((few, holds[0]), (many, holds[1])):
        for hold in own:
            cache.close(hold)
        cache.check([])


def test_slots_ahead_are_written_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write is a launch, for which a step waits."""
    cache = KVCache(1000, torch.zeros((3, 300), dtype=torch.int32), ahead=16)
    writes = []
    write = SlotTable.write_cells
    monkeypatch.setattr(SlotTable, "write_cells", lambda *given: (writes.append(len(given[3])), write(*given)))
    holds = [cache.open(np.arange(3)) for _ in range(3)]
    for step in range(60):
        cache.grow_each(holds, [1, 4, 8])
        for hold, wrong in zip(holds, (0, 3, step % 8), strict=True):
            cache.shrink(hold, hold.num_slots - wrong)
        cache.check(holds)
    assert len(writes) < 60 / 2
    assert sum(writes) < 60 * 8
    for hold in holds:  # what they read is theirs, and nobody else's
        assert len(set(cache.table.read_run(hold.row, 0, hold.num_slots).tolist()) - {0}) == hold.num_slots


def test_slots_ahead_are_written_rarely_where_all_memory_is_cached_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is in every server after a while."""
    cache = KVCache(2001, torch.zeros((4, 600), dtype=torch.int32), ahead=16)
    for text in range(5):
        hold = cache.open(1000 * text + np.arange(500))
        cache.grow(hold, min(400, cache.num_available))
        cache.commit(hold, 1000 * text + np.arange(400))
        cache.close(hold)
    assert cache.pool.num_free < 16
    assert cache.num_available == 2000
    writes = []
    write = SlotTable.write_cells
    monkeypatch.setattr(SlotTable, "write_cells", lambda *given: (writes.append(len(given[3])), write(*given)))
    holds = [cache.open(np.arange(90_000, 90_003)) for _ in range(3)]
    for _ in range(160):
        cache.grow_each(holds, [1, 1, 1])
        cache.check(holds)
        assert cache.num_available == 2000 - sum(hold.num_slots for hold in holds)
    assert len(writes) <= 160 / 8 + 1


def test_no_slots_are_taken_beyond_the_table() -> None:
    cache = KVCache(1000, torch.zeros((2, 20), dtype=torch.int32), ahead=16)
    holds = [cache.open(np.arange(3)) for _ in range(2)]
    for _ in range(20):
        cache.grow_each(holds, [1, 1])
        cache.check(holds)
    assert [hold.num_ready for hold in holds] == [20, 20]
    assert cache.num_available == 999 - 40


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "grow", "each", "shrink", "commit", "close"]), st.integers(0, 3), st.integers(1, 9)
    )
)


@settings(max_examples=300)
@given(ACTIONS)
def test_slots_ahead_are_as_good_as_free(actions: list[Action]) -> None:
    """Whatever happens, there is as much for everybody as where nobody has any, though what is cached may go sooner."""
    caches = [KVCache(60, torch.zeros((4, 40), dtype=torch.int32), share=False, ahead=ahead) for ahead in (0, 8)]
    running: list[list[KVHold]] = [[], []]
    for kind, which, count in actions:
        for cache, holds in zip(caches, running, strict=True):
            _act(cache, holds, kind, which, count)
            cache.check(holds)
        plain, ahead = caches
        assert plain.num_available == ahead.num_available
        assert [hold.num_slots for hold in running[0]] == [hold.num_slots for hold in running[1]]


@settings(max_examples=200)
@given(ACTIONS)
def test_slots_ahead_and_cached_text_are_owned_once(actions: list[Action]) -> None:
    cache = KVCache(60, torch.zeros((4, 40), dtype=torch.int32), ahead=8)
    holds: list[KVHold] = []
    for kind, which, count in actions:
        _act(cache, holds, kind, which, count)
        cache.check(holds)
        own = {id(hold): cache.table.read_run(hold.row, hold.num_committed, hold.num_ready).tolist() for hold in holds}
        assert len({slot for slots in own.values() for slot in slots}) == sum(map(len, own.values()))


def _act(cache: KVCache, holds: list[KVHold], kind: str, which: int, count: int) -> None:
    """Does it, where it can be done."""
    if kind == "open":
        if len(holds) < 4:
            holds.append(cache.open(np.arange(10 * which, 10 * which + 5)))
        return
    if kind == "each":
        total = count * len(holds)
        if holds and total <= cache.num_available and all(hold.num_slots + count <= 40 for hold in holds):
            cache.grow_each(holds, [count] * len(holds))
        return
    if which >= len(holds):
        return
    hold = holds[which]
    if kind == "grow" and count <= cache.num_available and hold.num_slots + count <= 40:
        cache.grow(hold, count)
    elif kind == "shrink":
        cache.shrink(hold, max(hold.num_slots - count, hold.num_committed))
    elif kind == "commit":
        stop = min(hold.num_committed + count, hold.num_slots)
        cache.commit(hold, 10 * hold.row + np.arange(hold.num_committed, stop))
    elif kind == "close":
        cache.close(holds.pop(which))
