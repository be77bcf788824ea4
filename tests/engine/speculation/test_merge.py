"""Proposals that differ become a tree of the likeliest guesses, and what came of each is learnt by who made it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import SampledToken
from engine.sequence import Sequence
from engine.speculation.acceptance import Rates
from engine.speculation.drafting import Drafting, Kind, Proposal, Source, agreement
from engine.speculation.lengths import Always
from engine.speculation.merge import Branch, DraftTree
from engine.speculation.ngram import NGrams
from engine.speculation.speculator import Speculator
from engine.speculation.tree import NO_DRAFTS, Drafts, lineages
from tests.engine.speculation.test_sources import sequence

RATES = Rates(0.6, 0.8)


def tree_of(*texts: Ordered[int], rates: Ordered[Rates] = (RATES, Rates(0.5, 0.7), Rates(0.4, 0.7))) -> DraftTree:
    return DraftTree([Branch(Proposal(Kind.REPLAY, text), own) for text, own in zip(texts, rates, strict=False)])


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=3)


@given(texts, st.integers(1, 30))
def test_the_best_guesses_are_a_tree_of_what_was_proposed(proposed: list[list[int]], count: int) -> None:
    tree = tree_of(*proposed)
    prefixes = {tuple(text[:length]) for text in proposed for length in range(1, len(text) + 1)}
    assert len(tree.gains) == len(prefixes)
    assert tree.gains == sorted(tree.gains, reverse=True)
    assert all(0 < gain < 1 for gain in tree.gains)
    drafts = tree.best(count)
    ways = lineages(*drafts)
    assert len(ways) == len(set(ways)) == min(count, len(prefixes))
    assert set(ways) <= prefixes
    assert drafts.parents is None or all(parent <= index for index, parent in enumerate(drafts.parents))
    assert (drafts.parents is None) == (tuple(drafts.token_ids) in ways)
    assert all(list(tree.owner(way).token_ids[: len(way)]) == list(way) for way in ways)


@given(st.floats(0.05, 0.95), st.floats(0.05, 0.95), st.integers(1, 15))
def test_a_lone_proposal_yields_what_its_rates_say(first: float, later: float, length: int) -> None:
    tree = tree_of(range(length), rates=[Rates(first, later)])
    assert sum(tree.gains) == pytest.approx(Rates(first, later).expected(length))
    assert tree.best(99) == Drafts(tuple(range(length)), None)


def test_what_is_shared_is_checked_once_and_branches_stand_in_for_the_trunk() -> None:
    tree = tree_of([1, 2, 3], [1, 5, 6], [1, 2, 3, 4])
    assert tree.best(99) == Drafts((1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 1, 5))
    likely = dict(zip([*lineages(*tree.best(99))], [0.6, 0.48, 0.384, 0.2688, 0.06, 0.042], strict=True))
    assert sorted(tree.gains, reverse=True) == pytest.approx(sorted(likely.values(), reverse=True))


def test_branches_of_one_place_share_what_the_others_leave() -> None:
    tree = tree_of([1], [2], [3], rates=[Rates(0.9, 0.5), Rates(0.8, 0.5), Rates(0.9, 0.5)])
    assert tree.gains == pytest.approx([0.9, 0.08, 0.018])


# ---- the speculator --------------------------------------------------------------------------------------------------


class Says:
    """A source that guesses a text by the number of tokens that are out."""

    def __init__(self, name: str, kind: Kind, texts: Mapping[int, Ordered[int]]) -> None:
        self.name, self.kind, self.texts = name, kind, texts

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        guesses = self.texts.get(len(sequence.output_ids), ())[:limit]
        return Proposal(self.kind, guesses) if guesses else None

    def ended(self, sequence: Sequence) -> None:
        """See `Source.ended`."""


def speculator_of(*sources: Source, length: int = 15) -> Speculator:
    made = Speculator("auto", 15, 1000)
    made.sources = list(sources)
    made.controller = Always(length)
    return made


def verify(speculator: Speculator, asked: Sequence, said: Ordered[int]) -> Drafts:
    """A step that says these tokens, all of which are kept."""
    (drafts,) = speculator.propose([asked], 100)
    tokens = [SampledToken(token_id) for token_id in said]
    speculator.verified(asked, drafts.token_ids, tokens, len(tokens))
    asked.output_ids.extend(said)
    return drafts


ECHO = Says("echo", Kind.ECHO, {1: [10, 11, 12, 13]})
HABIT = Says("habit", Kind.HABIT, {1: [10, 20, 21]})


def test_sources_that_differ_share_a_row_and_each_is_paid_for_its_own() -> None:
    speculator = speculator_of(ECHO, HABIT)
    drafts = verify(speculator, sequence([5]), [10, 20, 21, 99])
    assert drafts == Drafts((10, 11, 12, 13, 20, 21), (0, 1, 2, 3, 1, 5))
    assert {name: count for name, count in speculator.drafted.items() if count} == {"echo": 4, "habit": 2}
    assert {name: count for name, count in speculator.accepted.items() if count} == {"echo": 1, "habit": 2}


def test_sources_that_agree_make_a_chain() -> None:
    agreeing = Says("habit", Kind.HABIT, {1: [10, 11]})
    assert verify(speculator_of(ECHO, agreeing), sequence([5]), [10]) == Drafts((10, 11, 12, 13), None)
    longer = Says("echo", Kind.ECHO_ASTRAY, {1: [10, 11, 12, 13, 14, 15]})
    assert verify(speculator_of(ECHO, longer), sequence([5]), [10]).parents is None


@pytest.mark.parametrize("length", [0, 15], ids=["unchecked", "checked"])
def test_how_often_the_second_guess_is_right_is_learnt(length: int) -> None:
    """Even while nothing is checked; and only where the first was wrong."""
    first, second = {n: [1, 2] for n in range(1, 400)}, {n: [3, 4] for n in range(1, 400)}
    speculator = speculator_of(Says("echo", Kind.ECHO, first), Says("habit", Kind.HABIT, second), length=length)
    speculator.controller = Always(length) if length else Idle(1)
    asked = sequence([5])
    before = speculator.beliefs.rescue_rates(Kind.HABIT).first
    for _ in range(30):
        verify(speculator, asked, [1, 2, 9] if length else [1])
    assert speculator.beliefs.rescue_rates(Kind.HABIT).first == before
    for number in range(90):
        right = [3, 4, 9] if length else [3]
        verify(speculator, asked, right if number % 3 else [9])
    assert speculator.beliefs.rescue_rates(Kind.HABIT).first == pytest.approx(2 / 3, abs=0.05)
    assert (speculator.beliefs.rescue_rates(Kind.HABIT).later > 0.9) == bool(length)


class Idle(Always):
    """Looks, and checks nothing."""

    def choose(self, rows: int, candidates: Ordered[object], room: int) -> list[int]:
        """See `Lengths.choose`."""
        return [0] * rows


def test_a_tree_ends_before_max_tokens() -> None:
    """However many branches there are: the step's places must fit the context."""
    asked = sequence([5])
    for left, most in ((1, 0), (2, 1), (4, 3), (99, 6)):
        asked.max_tokens = 1 + left
        (drafts,) = speculator_of(ECHO, HABIT).propose([asked], 100)
        assert len(drafts.token_ids) <= most
    (drafts,) = speculator_of(ECHO, HABIT).propose([asked], 5)
    assert len(drafts.token_ids) == 5
    assert speculator_of(ECHO, HABIT).propose([replace(asked, max_tokens=2)], 100) == [NO_DRAFTS]


def test_ngrams_offer_the_last_two_different_continuations() -> None:
    asked = sequence([2, 3, 8, 8, 2, 3, 9, 9, 2, 3], prompt=[0, 0, 0])
    proposal = NGrams().propose(asked, Drafting(), 4)
    assert proposal is not None
    assert list(proposal.token_ids) == [9, 9, 2, 3]
    assert [(other.kind, list(other.token_ids)) for other in proposal.others] == [(Kind.NGRAM_OLDER, [8, 8, 2, 3])]
    alike = NGrams().propose(sequence([2, 3, 8, 8, 2, 3, 8, 9, 2, 3], prompt=[0, 0, 0]), Drafting(), 4)
    assert alike is not None
    assert alike.others == ()


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_agreement_is_the_length_of_the_shared_begin(one: list[int], other: list[int]) -> None:
    length = agreement(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]
