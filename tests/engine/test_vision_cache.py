"""The embedding cache and the vision ids against models: bounded, never evicting what is held, never using an id
twice.
"""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.vision_cache import VisionCache
from engine.vision_ids import FIRST_VISION_ID, VisionIds


class VisionCacheMachine(RuleBasedStateMachine):
    """Picture k has k + 1 tokens of 4 bytes; `held` are the holds of live sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = VisionCache(40, 4)
        self.held: dict[tuple[int, tuple[int, int]], None] = {}
        self.next_serial = 0

    @rule(key=st.integers(0, 7), fails=st.booleans())
    def hold(self, key: int, fails: bool) -> None:
        holder = (self.next_serial, 0)
        self.next_serial += 1
        was_known = self.cache.contains(key)
        held_bytes = sum((other + 1) * 4 for other in {other for other, _ in self.held})
        entry = self.cache.hold(key, key + 1, holder)
        if entry is None:
            assert not was_known
            assert held_bytes + (key + 1) * 4 > 40, "refused although there was room"
            return
        assert (entry.embeddings is None) == (not was_known)
        if entry.embeddings is None and fails:
            self.cache.drop(key, holder)
            assert not self.cache.contains(key), "an entry that nobody encodes stayed"
            return
        entry.embeddings = torch.full((key + 1,), key)
        self.held[(key, holder)] = None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        key, holder = data.draw(st.sampled_from(list(self.held)))
        del self.held[(key, holder)]
        self.cache.drop(key, holder)
        assert self.cache.contains(key), "released, not forgotten"

    @invariant()
    def whole(self) -> None:
        self.cache.check(self.held)
        for key, _ in self.held:
            embeddings = self.cache.get(key).embeddings
            assert embeddings is not None
            assert embeddings.tolist() == [key] * (key + 1)


VisionCacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestVisionCache = VisionCacheMachine.TestCase


class VisionIdsMachine(RuleBasedStateMachine):
    """`pins` counts the live users of each picture, `ranges` the ids ever given to one."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = VisionIds(capacity=3)
        self.pins: dict[tuple[bytes, int], int] = {}
        self.bases: dict[tuple[bytes, int], int] = {}
        self.owner: dict[int, tuple[bytes, int]] = {}

    @rule(name=st.integers(0, 6), num_tokens=st.integers(1, 2))
    def pin(self, name: int, num_tokens: int) -> None:
        key = (bytes([name]), num_tokens)
        base = self.ids.pin(*key)
        assert base >= FIRST_VISION_ID
        assert self.pins.get(key, 0) == 0 or self.bases[key] == base, "a picture in use changed its ids"
        for token_id in range(base, base + num_tokens):
            assert self.owner.setdefault(token_id, key) == key, "an id of two pictures"
        self.pins[key] = self.pins.get(key, 0) + 1
        self.bases[key] = base

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.ids.unpin(*key)
        self.pins[key] -= 1
        if not self.pins[key]:
            del self.pins[key]

    @invariant()
    def whole(self) -> None:
        self.ids.check(self.pins)
        assert len(self.ids) <= 3 + len(self.pins)


VisionIdsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestVisionIds = VisionIdsMachine.TestCase


def test_a_picture_keeps_its_ids_while_remembered_and_gets_new_ones_when_forgotten() -> None:
    ids = VisionIds(capacity=1)
    first = ids.pin(b"a", 5)
    ids.unpin(b"a", 5)
    assert ids.pin(b"a", 5) == first
    ids.unpin(b"a", 5)
    assert ids.pin(b"b", 5) == first + 5
    ids.unpin(b"b", 5)
    assert ids.pin(b"a", 5) == first + 10


def test_the_least_recently_used_picture_is_evicted() -> None:
    cache = VisionCache(8, 4)
    for key in (1, 2):
        entry = cache.hold(key, 1, (key, 0))
        assert entry is not None
        entry.embeddings = torch.zeros(1)
        cache.drop(key, (key, 0))
    cache.hold(1, 1, (3, 0))
    cache.drop(1, (3, 0))
    cache.hold(9, 1, (4, 0))
    assert cache.contains(1)
    assert not cache.contains(2)
    assert (cache.num_queries, cache.num_hits) == (4, 1)
