"""The radix tree against a model: a dictionary from every stored prefix to its slot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.radix import Node, RadixTree, shared_length

IDS = st.lists(st.integers(0, 2), max_size=9)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def slots(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class RadixMachine(RuleBasedStateMachine):
    """`stored` maps each prefix in the tree to its slot; `locked` are (node, prefix) of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.stored: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[Node, tuple[int, ...]]] = []
        self.next_slot = 1

    def known(self, wanted: list[int]) -> int:
        return next(n for n in range(len(wanted), -1, -1) if n == 0 or tuple(wanted[:n]) in self.stored)

    @rule(wanted=IDS)
    def match(self, wanted: list[int]) -> None:
        length = self.known(wanted)
        assert self.tree.match_length(ids(*wanted)) == length
        match = self.tree.match(ids(*wanted))
        assert match.num == length
        assert match.slots.tolist() == [self.stored[tuple(wanted[: n + 1])] for n in range(length)]

    @rule(wanted=IDS, lock=st.booleans())
    def insert(self, wanted: list[int], lock: bool) -> None:
        fresh = list(range(self.next_slot, self.next_slot + len(wanted)))
        self.next_slot += len(wanted)
        node, present = self.tree.insert(self.tree.root, ids(*wanted), slots(*fresh))
        assert present == self.known(wanted)
        for n in range(present, len(wanted)):
            self.stored[tuple(wanted[: n + 1])] = fresh[n]
        if lock:
            self.tree.lock(node)
            self.locked.append((node, tuple(wanted)))

    @precondition(lambda self: self.locked)
    @rule(data=st.data(), more=IDS)
    def insert_below_a_lock(self, data: st.DataObject, more: list[int]) -> None:
        node, prefix = data.draw(st.sampled_from(self.locked))
        fresh = list(range(self.next_slot, self.next_slot + len(more)))
        self.next_slot += len(more)
        whole = [*prefix, *more]
        present = max(self.known(whole) - len(prefix), 0)
        assert self.tree.insert(node, ids(*more), slots(*fresh))[1] == present
        for n in range(present, len(more)):
            self.stored[tuple(whole[: len(prefix) + n + 1])] = fresh[n]

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1))
        self.tree.unlock(self.locked.pop(index)[0])

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        kept = {prefix[:n] for _, prefix in self.locked for n in range(1, len(prefix) + 1)}
        evicted = self.tree.evict(count).tolist()
        assert len(evicted) == min(count, len(self.stored) - len(kept))
        gone = {prefix for prefix, slot in self.stored.items() if slot in evicted}
        assert len(gone) == len(evicted)
        assert not gone & kept
        for prefix in gone:
            del self.stored[prefix]
        assert all(prefix[:-1] in self.stored for prefix in self.stored if len(prefix) > 1), "a hole in a prefix"

    @invariant()
    def whole(self) -> None:
        holders: dict[Node, int] = {}
        for node, _ in self.locked:
            holders[node] = holders.get(node, 0) + 1
        self.tree.check(holders)
        assert sorted(self.tree.owned().tolist()) == sorted(self.stored.values())
        kept = {prefix[:n] for _, prefix in self.locked for n in range(1, len(prefix) + 1)}
        assert self.tree.num_evictable == len(self.stored) - len(kept)


RadixMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestRadix = RadixMachine.TestCase


def test_shared_length() -> None:
    assert shared_length(ids(), ids(1)) == 0
    assert shared_length(ids(1, 2), ids(1, 2)) == 2
    assert shared_length(ids(1, 2, 3), ids(1, 2)) == 2
    assert shared_length(ids(1, 2, 3), ids(1, 9, 3)) == 1


def test_a_prefix_that_ends_inside_a_node_splits_it_and_keeps_its_holders() -> None:
    tree = RadixTree()
    node, _ = tree.insert(tree.root, ids(1, 2, 3, 4), slots(11, 12, 13, 14))
    tree.lock(node)
    match = tree.match(ids(1, 2, 9))
    assert (match.num, match.slots.tolist()) == (2, [11, 12])
    assert node.ids.tolist() == [3, 4]
    tree.check({node: 1})
    assert tree.evict(10).tolist() == []


def test_eviction_takes_the_least_recently_used_from_its_end() -> None:
    tree = RadixTree()
    tree.insert(tree.root, ids(1, 2, 3), slots(1, 2, 3))
    tree.insert(tree.root, ids(5, 6), slots(5, 6))
    tree.insert(tree.root, ids(1, 2, 9), slots(7, 7, 8))
    tree.match(ids(1, 2, 3))
    assert tree.evict(1).tolist() == [6]
    assert tree.evict(2).tolist() == [5, 8]
    assert tree.match(ids(1, 2, 9)).num == 2
    assert tree.evict(9).tolist() == [3, 1, 2]
    assert tree.num_tokens == 0


def test_unlocking_twice_is_refused() -> None:
    tree = RadixTree()
    with pytest.raises(RuntimeError, match="more often"):
        tree.unlock(tree.root)
