"""The radix tree: prefixes of int64 ids whose keys and values are already in slots, shared by all sequences.

A node holds a run of ids and one slot for each. Vision tokens have ids of their own (`engine.vision_ids`), so equal ids
mean equal content and the tree is exact. A sequence locks the deepest node that it uses; locks count along the path to
the root. Unlocked leaves are evicted, least recently used first. Knows nothing of sequences, of the pool, or of what an
id stands for.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kv.pool import SlotArray

IdArray = NDArray[np.int64]


class Node:
    """A run of ids below `parent`. `locks` counts the holders of this node and of every node below it."""

    __slots__ = ("children", "ids", "last_access", "locks", "parent", "queued", "slots")

    def __init__(self, ids: IdArray, slots: SlotArray, parent: Node | None, last_access: int) -> None:
        self.ids = ids
        self.slots = slots
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.last_access = last_access
        self.queued = False  # whether the eviction heap has an entry for it


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known prefix: `num` ids in `slots`, ending exactly at the end of `node`."""

    num: int
    slots: SlotArray
    node: Node


def shared_length(a: IdArray, b: IdArray) -> int:
    """How many leading ids two arrays share."""
    length = min(len(a), len(b))
    equal = a[:length] == b[:length]
    return length if equal.all() else int(equal.argmin())


class RadixTree:
    """Invariants: no node but the root is empty; siblings differ in their first id; `num_evictable` counts unlocked
    nodes' ids.

    `version` changes whenever the answer of `match` may have changed.
    """

    def __init__(self) -> None:
        self.root = Node(np.empty(0, np.int64), np.empty(0, np.int32), None, 0)
        self.num_tokens = 0
        self.num_evictable = 0
        self.version = 0
        self._clock = 0
        self._pushes = 0
        self._heap: list[tuple[int, int, Node]] = []  # (last access, tie, node): candidates, checked when popped

    def match(self, ids: IdArray) -> Match:
        """The longest known prefix of `ids`. Splits a node where the prefix ends inside it, and marks the path as
        used.
        """
        self._clock += 1
        node, num, parts = self._walk(self.root, ids)
        slots = np.concatenate(parts) if parts else self.root.slots
        return Match(num, slots, node)

    def match_length(self, ids: IdArray) -> int:
        """The length that `match` would find; changes nothing."""
        node, num = self.root, 0
        while num < len(ids):
            child = node.children.get(int(ids[num]))
            if child is None:
                break
            shared = shared_length(child.ids, ids[num:])
            num += shared
            if shared < len(child.ids):
                break
            node = child
        return num

    def insert(self, node: Node, ids: IdArray, slots: SlotArray) -> tuple[Node, int]:
        """Add `ids` in `slots` below `node`. Returns the node where they end, and how many were there already.

        The slots of those stay the caller's; the tree owns the others from now on.
        """
        self._clock += 1
        node, present, _ = self._walk(node, ids)
        if present == len(ids):
            return node, present
        leaf = Node(ids[present:].copy(), slots[present:].copy(), node, self._clock)
        node.children[int(leaf.ids[0])] = leaf
        self.num_tokens += len(leaf.ids)
        self.num_evictable += len(leaf.ids)
        self.version += 1
        self._offer(leaf)
        return leaf, present

    def lock(self, node: Node) -> None:
        """Keep `node` and everything above it until `unlock`."""
        walk: Node | None = node
        while walk is not None:
            if walk.locks == 0:
                self.num_evictable -= len(walk.ids)
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises RuntimeError when the node is not locked."""
        if node.locks == 0:
            raise RuntimeError("a node was unlocked more often than it was locked")
        walk: Node | None = node
        while walk is not None:
            walk.locks -= 1
            if walk.locks == 0:
                self.num_evictable += len(walk.ids)
                self._offer(walk)
            walk = walk.parent

    def evict(self, count: int) -> SlotArray:
        """Forget up to `count` ids from the ends of unlocked leaves, least recently used first. Returns their slots."""
        parts: list[SlotArray] = []
        missing = count
        while missing > 0 and self._heap:
            access, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not self._is_evictable(node):
                continue
            if access != node.last_access:
                self._offer(node)
                continue
            taken = min(missing, len(node.ids))
            parts.append(node.slots[len(node.slots) - taken :])
            missing -= taken
            self._trim(node, taken)
        if not parts:
            return self.root.slots
        self.version += 1
        return np.concatenate(parts)

    def owned(self) -> SlotArray:
        """Every slot in the tree."""
        return np.concatenate([node.slots for node in self._nodes()])

    def check(self, holders: dict[Node, int]) -> None:
        """Prove the invariants, given how many live holders each node has. Raises AssertionError otherwise."""
        nodes = self._nodes()
        tokens = evictable = 0
        for node in nodes:
            length, locks = len(node.ids), holders.get(node, 0)
            assert length == len(node.slots), "ids and slots differ in length"
            assert length or node is self.root, "an empty node"
            for first, child in node.children.items():
                locks += child.locks
                assert child.parent is node, "a child that does not know its parent"
                assert first == int(child.ids[0]), "a child under a wrong key"
            assert node.locks == locks, f"{node.locks} locks, {holders.get(node, 0)} holders"
            assert node.queued or locks or not self._is_evictable(node), "an evictable leaf that eviction cannot find"
            tokens += length
            evictable += 0 if locks else length
        assert holders.keys() <= set(nodes), "a holder of a node that left the tree"
        assert (tokens, evictable) == (self.num_tokens, self.num_evictable), (
            f"counted {tokens} tokens, {evictable} evictable; noted {self.num_tokens}, {self.num_evictable}"
        )

    def _walk(self, node: Node, ids: IdArray) -> tuple[Node, int, list[SlotArray]]:
        """Go down from `node` as far as `ids` lead; split where they end inside a node."""
        node.last_access = self._clock
        num = 0
        parts: list[SlotArray] = []
        while num < len(ids):
            child = node.children.get(int(ids[num]))
            if child is None:
                break
            shared = shared_length(child.ids, ids[num:])
            node = child if shared == len(child.ids) else self._split(child, shared)
            node.last_access = self._clock
            num += shared
            parts.append(node.slots)
            if node is not child:
                break
        return node, num, parts

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` ids. The lower part keeps its identity, so that holders stay right; returns the
        upper.
        """
        assert node.parent is not None
        upper = Node(node.ids[:length], node.slots[:length], node.parent, node.last_access)
        upper.locks = node.locks
        node.parent.children[int(upper.ids[0])] = upper
        node.ids, node.slots, node.parent = node.ids[length:], node.slots[length:], upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _trim(self, node: Node, count: int) -> None:
        """Drop the last `count` ids of an evictable leaf; an emptied leaf leaves the tree."""
        self.num_tokens -= count
        self.num_evictable -= count
        if count < len(node.ids):
            keep = len(node.ids) - count
            node.ids, node.slots = node.ids[:keep], node.slots[:keep]
            self._offer(node)
            return
        assert node.parent is not None
        del node.parent.children[int(node.ids[0])]
        self._offer(node.parent)

    def _is_evictable(self, node: Node) -> bool:
        return node.locks == 0 and not node.children and node is not self.root

    def _offer(self, node: Node) -> None:
        """Let eviction find `node`, if it may take it."""
        if not node.queued and self._is_evictable(node):
            node.queued = True
            self._pushes += 1
            heapq.heappush(self._heap, (node.last_access, self._pushes, node))

    def _nodes(self) -> list[Node]:
        nodes = [self.root]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes
