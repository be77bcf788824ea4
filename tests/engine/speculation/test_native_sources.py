"""Native sources guess, believe and learn as those in Python do."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import SampledToken
from engine.scheduler import Plan
from engine.sequence import Sequence
from engine.speculation import habit
from engine.speculation.acceptance import Rates
from engine.speculation.beliefs import MAX_BRANCHES
from engine.speculation.chains import DOUBT, LEAST_DOUBT, LEAST_RATE, LENGTHS
from engine.speculation.choosing import SOURCES
from engine.speculation.controller import Controller
from engine.speculation.drafting import Kind
from engine.speculation.lengths import NO_NEEDS, NUM_NEEDS, Always, Candidate, Offer
from engine.speculation.prices import PRICED
from engine.speculation.speculator import Speculator
from engine.speculation.step_times import StepTimes
from engine.speculation.told import BRANCHES, KINDS, library
from engine.speculation.tree import Drafts
from engine.step_budget import Room
from engine.step_costs import Load, size_class
from tests.engine.driving import Driver, Told, request
from tests.engine.fake_runner import FakeRunner
from tests.engine.speculation.test_sources import sequence


def test_what_the_library_counts_on_stands_in_python_as_well() -> None:
    """Lengths of chains, pairs of what they need, branches: constants of `guesses.cpp`."""
    assert LENGTHS == (1, 3, 7, 15)
    assert len(PRICED) + 2 == NUM_NEEDS == 9
    assert BRANCHES == 1 + MAX_BRANCHES == 4


pytestmark = pytest.mark.skipif(library() is None, reason="guesses.cpp was not built: there is no C++ compiler")

VOCAB = 6
BREAK_PICTURE = 0
"""An id where a picture stands."""


class Moody(Always):
    """Checks some of what there is or nothing, and makes trees of it now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__(15)
        self._random = random.Random(seed)
        self.seen: list[list[Candidate | None]] = []
        self.opened_with: list[list[float]] = []

    def may_draft(self, rows: int, *, is_expected: bool) -> bool:
        return True

    def may_branch(self, rows: int) -> bool:
        return self._random.random() < 0.4

    def open(self, rows: int, prompt: int, gains: Ordered[float], looking_s: float) -> int:
        self.opened_with.append(list(gains))
        return self._random.randint(0, len(gains))

    def choose(self, rows: int, candidates: Ordered[Candidate | None], room: int) -> list[int]:
        if any(candidates):
            self.seen.append(list(candidates))
        return [
            0 if candidate is None else self._random.randint(0, min(candidate.length, room // rows))
            for candidate in candidates
        ]


class Shape:
    """A grammar that forces a text at times, and allows whatever is asked."""

    def __init__(self, forced: Ordered[int]) -> None:
        self.forced = list(forced)

    def forced_tokens(self) -> list[int]:
        return self.forced

    def count_allowed(self, token_ids: Ordered[int]) -> int:
        return len(token_ids)


def speculators(seed: int) -> list[Speculator]:
    native, python = (Speculator("auto", 15, VOCAB - 1, max_first_drafts=40) for _ in range(2))
    python.sources = [source() for source in SOURCES.values()]
    assert native._native is not None
    assert python._native is None
    for one in (native, python):
        one.controller = Moody(seed)
    return [native, python]


def begin(speculator: Speculator, running: Ordered[Sequence], said: Ordered[int], right: float, seed: int) -> Any:
    """The step behind which each sequence says the first of its tokens."""
    chance = random.Random(seed)
    guessed = []
    for asked in running:
        speculator.following.num_fruitless = 0  # never at rest
        guessed.append(speculator.open(asked, len(running), 5, 40))
    for asked, own, token_id in zip(running, guessed, said, strict=True):
        num_right = next((index for index in range(len(own)) if chance.random() >= right), len(own))
        others = range(VOCAB) if num_right == len(own) else [other for other in range(VOCAB) if other != own[num_right]]
        tokens = [*own[:num_right], token_id if token_id in others else others[0]]
        asked.output_ids.extend(tokens)
        speculator.verified(asked, own, [SampledToken(token) for token in tokens], len(tokens))
    return guessed


def step(
    speculator: Speculator, running: Ordered[Sequence], said: Ordered[int], right: float, seed: int
) -> list[Drafts]:
    """A step in which each sequence says some of its drafts, and then another token."""
    speculator._num_fruitless = 0  # never at rest
    drafts = speculator.propose(running, 64)
    chance = random.Random(seed)
    for asked, own, token_id in zip(running, drafts, said, strict=True):
        tokens, node = [], 0
        follows = range(len(own.token_ids)) if own.parents is None else own.parents
        while chance.random() < right:
            children = [index for index, parent in enumerate(follows) if parent == node]
            if not children:
                break
            chosen = chance.choice(children)
            tokens.append(own.token_ids[chosen])
            node = chosen + 1
        others = {own.token_ids[index] for index, parent in enumerate(follows) if parent == node}
        tokens.append(next(other for other in (token_id, *range(VOCAB)) if other not in others or other == VOCAB - 1))
        asked.output_ids.extend(tokens)
        if asked.drafting is not None:
            standing = [SampledToken(token) for token in tokens]
            speculator.verified(asked, own.token_ids, standing, len(standing))
    return drafts


@given(st.integers(0, 10**6), st.integers(1, 3), st.floats(0.0, 1.0))
def test_the_same_answers_are_guessed_alike(seed: int, rows: int, right: float) -> None:
    """Whatever was checked of it, in chains or trees, for sequences beside each other and one after the other."""
    both = speculators(seed)
    chance = random.Random(seed)
    for answer in range(4):
        prompts = [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 12))] for _ in range(rows)]
        running = [
            [
                sequence([], prompt=prompt, pictures=[0] if answer % 2 else [], session=f"s{index % 2}")
                for index, prompt in enumerate(prompts)
            ]
            for _ in both
        ]
        said = [chance.randrange(VOCAB) for _ in range(rows)]
        key = chance.random()
        opened = [
            begin(speculator, own, said, right, int(key * 1e6)) for speculator, own in zip(both, running, strict=True)
        ]
        assert opened[0] == opened[1]
        for number in range(chance.randrange(1, 25)):
            said = [chance.choice([number % 3, chance.randrange(VOCAB)]) for _ in range(rows)]
            forced = [chance.randrange(VOCAB - 1) for _ in range(chance.choice([0, 0, 2]))]
            for own in running:
                own[0].grammar = Shape(forced)  # type: ignore[assignment]
            key = chance.random()
            made = [
                step(speculator, own, said, right, int(key * 1e6))
                for speculator, own in zip(both, running, strict=True)
            ]
            assert made[0] == made[1]
            assert [own.output_ids for own in running[0]] == [own.output_ids for own in running[1]]
        for speculator, own in zip(both, running, strict=True):
            for ended in own:
                speculator.ended(ended)
    assert both[0].controller.seen == both[1].controller.seen  # type: ignore[attr-defined]
    assert both[0].controller.opened_with == both[1].controller.opened_with  # type: ignore[attr-defined]
    assert both[0].drafted == both[1].drafted
    assert both[0].accepted == both[1].accepted


@pytest.mark.parametrize("names", [["echo"], ["ngram"], ["grammar"], ["habit"]])
def test_only_those_guess_who_shall(names: list[Any]) -> None:
    speculator = Speculator(names[0], 15, 100)
    speculator.controller = Always(15)
    kinds = set()
    for _ in range(4):
        asked = sequence([5], prompt=[5, 6, 7, 5], session="a")
        asked.grammar = Shape([9])  # type: ignore[assignment]
        for token_id in (6, 7, 8, 5, 6, 7, 8):
            speculator.propose([asked], 100)
            assert asked.drafting is not None
            kinds |= {made.kind.source for made in asked.drafting.proposed}
            speculator.verified(asked, (), [SampledToken(token_id)], 1)
            asked.output_ids.append(token_id)
        speculator.ended(asked)
    assert kinds == set(names)


def test_what_a_grammar_does_not_allow_is_cut_and_another_guess_may_be_the_best() -> None:
    class Strict(Shape):
        def count_allowed(self, token_ids: Ordered[int]) -> int:
            return next((index for index, token_id in enumerate(token_ids) if token_id == 8), len(token_ids))

    class Chains(Always):
        def may_branch(self, rows: int) -> bool:
            return False

    speculator = Speculator("auto", 15, 100)
    speculator.controller = Chains(15)
    asked = sequence([5], prompt=[4, 5, 6, 7, 8, 4])
    for forced, expected in (([], (6, 7)), ([3, 4], (3, 4))):
        asked.grammar = Strict(forced)  # type: ignore[assignment]
        assert speculator.propose([replace(asked, output_ids=[5], drafting=None)], 100)[0].token_ids == expected
    asked.grammar = Strict([])  # type: ignore[assignment]
    assert speculator.propose([replace(asked, output_ids=[6, 7], drafting=None)], 100)[0].token_ids == ()


def test_nobody_is_kept_busy_by_guesses_that_are_not_worth_it() -> None:
    class Choosy(Always):
        def needs(self, rows: int) -> array[float]:
            return array("d", [1, 0.5, 1, 0.5, 3, 1.5, 7, 3.5, 15, 7.5])

    speculator = Speculator("ngram", 15, 100)
    asked = sequence([5], prompt=[1, 5, 6, 7, 1])
    assert Kind.NGRAM_SHORT.prior.first < 0.5
    for controller, number in ((Choosy(15), 0), (Always(15), 1)):
        speculator.controller = controller
        drafts = speculator.propose([replace(asked, output_ids=[5], drafting=None)], 100)
        assert (len(drafts[0].token_ids) > 0) == bool(number)


def test_habits_are_bounded_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generations, as in Python: what was forgotten is not guessed."""
    monkeypatch.setattr(habit, "MAX_CONTEXTS", 40)
    monkeypatch.setattr("engine.speculation.speculator.PATIENCE", 10**6)  # before each step, whatever comes of it
    native = Speculator("habit", 15, 10_000)
    native.controller = Always(15)

    def guessed(answer: Ordered[int]) -> int:
        asked = sequence(answer[:1])
        found = 0
        for token_id in answer[1:]:
            drafts = native.propose([asked], 100)[0].token_ids
            found += bool(drafts)
            native.verified(asked, (), [SampledToken(token_id)], 1)
            asked.output_ids.append(token_id)
        native.ended(asked)
        return found

    known = list(range(10, 20))
    guessed(known)
    guessed(known)
    assert guessed(known) > 6
    for number in range(20):
        guessed(range(100 + 100 * number, 130 + 100 * number))
    assert guessed(known) == 0


def test_kinds_are_those_that_guess_without_a_model() -> None:
    assert {kind.source for kind in KINDS} == set(SOURCES)
    assert {kind for kind in Kind if kind.source in SOURCES} == set(KINDS)


# ---- how much is checked, and how often anybody looks ----------------------------------------------------------------


@given(
    st.lists(st.floats(0.0, 2.0), min_size=NUM_NEEDS, max_size=NUM_NEEDS),
    st.floats(0.0, 1.0),
    st.floats(0.0, 0.5),
    st.integers(0, 15),
    st.integers(1, 12),
    st.booleans(),
)
def test_as_many_guesses_are_checked_as_save_most(
    extra: list[float], credit: float, looking: float, limit: int, length: int, is_long: bool
) -> None:
    speculator = Speculator("ngram", 15, 100)
    native = speculator._native
    assert native is not None
    text = list(range(10, 11 + length))
    begin = [3, 4, 5, 6] if is_long else [5, 6]  # two kinds of guesses, of which one is rather right
    asked = sequence(begin, prompt=[*begin, *text, BREAK_PICTURE], pictures=[len(text) + len(begin)])
    speculator.controller = Always(15)
    speculator.propose([asked], 100)
    (candidate,) = native.candidates(1)
    assert candidate is not None
    counts, times = [1, 1, *PRICED], list(itertools.accumulate(extra, initial=1.0))[1:]
    times[0] = times[1] = times[2]
    steps = array("d", itertools.chain.from_iterable(zip(counts, times, strict=True)))
    best, best_rate, most = 0, 1.1, 0.0
    rates = candidate.rates
    lengths = range(1, min(candidate.length, limit) + 1)
    steps_s = {number: float(np.interp(number, counts[2:], times[2:])) for number in lengths}
    behind = Rates(rates.later, rates.later)  # a guess that was right
    after_s = min([1.0, *((steps_s[number] + looking) / (1.0 + behind.expected(number)) for number in lengths)])
    for number in lengths:
        right = rates.expected(number)
        rate = (1.0 + right) / (steps_s[number] + looking)
        risk = min(max(DOUBT * (1.0 - right / number), LEAST_DOUBT), 1.0) * (steps_s[number] - 1.0)
        saved = rates.first + (right - rates.first) * after_s - (steps_s[number] - 1.0)
        if risk <= credit and rate > 1.1 and rates.first >= LEAST_RATE and (not best or saved > most):
            best, best_rate, most = number, rate, saved
    chosen, rate = native.choose(1, Offer(NO_NEEDS, steps, 1.0, looking, credit, 1.1), limit)
    assert rate == pytest.approx(best_rate)
    assert chosen == best == native.lengths(1)[0]


class PricedTimes(StepTimes):
    """Steps that take what straight lines say between the numbers of guesses that have a price."""

    def __init__(self, rows: int, extra: list[float]) -> None:
        super().__init__()
        self.add(rows, rows, float(rows))
        self.add(rows, rows, float(rows))
        self._counts = [0, 1, max(rows // 2, 1), *(rows * count for count in PRICED)]
        self._times = list(itertools.accumulate(extra, initial=float(rows)))
        self._times[2] = self._times[2 if self._counts[2] > 1 else 1]

    def step_s(self, rows: int, tokens: int) -> float:
        return float(np.interp(tokens - rows, self._counts, self._times))


@given(st.data())
def test_as_many_guesses_of_several_sequences_are_checked_as_the_controller_chooses(data: st.DataObject) -> None:
    native = Speculator("ngram", 15, 100)._native
    assert native is not None
    rows = data.draw(st.integers(2, 12))
    rates = st.builds(Rates, st.floats(0.05, 0.99), st.floats(0.05, 0.99))
    candidates = data.draw(st.lists(st.builds(Candidate, st.integers(0, 15), rates), min_size=rows, max_size=rows))
    native._reserve(rows)
    for found, own in zip(native._found, candidates, strict=True):
        found.length, found.first, found.later = own.length, own.rates.first, own.rates.later
    extra = data.draw(st.lists(st.floats(0.0, 0.5 * rows), min_size=NUM_NEEDS, max_size=NUM_NEEDS))
    room = data.draw(st.integers(0, 15 * rows))
    controllers = [Controller(), Controller()]
    for controller in controllers:
        controller.times = PricedTimes(rows, extra)
    chosen = controllers[0].choose(rows, [own if own.length else None for own in candidates], room)
    assert controllers[1].choose_by(native.choose, rows, room) is any(chosen)
    assert native.lengths(rows) == chosen
    assert controllers[1]._watches[size_class(rows)].promise == pytest.approx(
        controllers[0]._watches[size_class(rows)].promise
    )


def test_looks_that_bear_no_fruit_become_rare_until_a_session_answers_again() -> None:
    speculator = Speculator("auto", 15, 100)
    native = speculator._native
    assert native is not None
    looks = []
    decide = native.decide
    native.decide = lambda *args: looks.append(1) or decide(*args)  # type: ignore[func-returns-value, method-assign]

    def looked(asked: Sequence, steps: int) -> int:
        looks.clear()
        for _ in range(steps):
            speculator.propose([asked], 100)
            asked.output_ids.append(len(asked.output_ids) % 97)
        return len(looks)

    asked = sequence([1], session="a")
    assert looked(asked, 6) == 6
    assert 20 < looked(asked, 160) < 30
    speculator.ended(asked)
    assert looked(sequence([1], session="a"), 6) == 6
    assert looked(sequence([1], session="b"), 8) <= 4
    assert looked(sequence([1], session="a", prompt=(1, 2, 4)), 8) <= 4  # another question


@pytest.mark.parametrize("waits", [False, True])
def test_what_may_be_risked_on_an_answer_that_repeats_is_not_used_up_before_it_is_known_what_steps_take(
    *, waits: bool
) -> None:
    speculator = Speculator("auto", 15, 1000, waits=waits, clock=lambda: 0.0)
    controller, answer = speculator.controller, range(100, 120)

    def goes_on(asked: Sequence, stop: int) -> int:
        """Guesses that are checked before it has said so much."""
        checked = 0
        for token_id in answer[len(asked.output_ids) : stop]:
            (drafts,) = speculator.propose([asked], 100)
            checked += len(drafts.token_ids)
            speculator.verified(asked, (), [SampledToken(token_id)], 1)
            asked.output_ids.append(token_id)
        return checked

    first, second = (sequence([answer[0]], session="a") for _ in range(2))
    assert goes_on(first, len(answer)) == 0
    speculator.ended(first)
    assert goes_on(second, 4) == 0
    for _ in range(4):
        controller.stepped(1, 1, 0, 1e-3)
    controller.spent(1, 1.0)  # nothing is borne
    assert goes_on(second, 6) > 0


def test_an_engine_that_waited_for_results_is_never_refused_a_look() -> None:
    """However rarely one has borne fruit: the wait is what was dear."""
    speculator = Speculator("ngram", 15, 100, waits=True, clock=lambda: 0.0)
    native = speculator._native
    assert native is not None
    speculator.controller = Controller(waits=True)
    speculator.controller.may_wait = lambda *args, **options: True  # type: ignore[method-assign]
    speculator.controller.promised_by = lambda *args: 3.0  # type: ignore[method-assign]
    looks = []
    look = native.look
    native.look = lambda *args: looks.append(1) or look(*args)  # type: ignore[func-returns-value, method-assign]
    asked, waits = sequence([1], prompt=[1, 2, 3]), 0
    asked.num_pending = 1
    for step in range(1000):
        if speculator.is_due([asked]):
            waits += 1
            looked = len(looks)
            speculator.propose([asked], 100)
            assert len(looks) == looked + 1
        asked.output_ids.append([1, 2, 3 + step % 97][step % 3])
        speculator.stepped(Plan(512, Room(None, Load())), 1e-3, waited_s=1e-3, is_usual=False)
    assert waits > 20


def test_what_was_guessed_for_a_step_that_was_lost_is_not_guessed_again() -> None:
    """A sequence was retracted while its tree of drafts was in flight."""
    native, python = (Speculator("ngram", 15, 100) for _ in range(2))
    python.sources = [SOURCES["ngram"]()]
    made = []
    for speculator in (native, python):
        speculator.controller = Always(6)
        asked = sequence([1, 2], prompt=[1, 2, 7, 4, 5, 1, 2, 8, 6, 9, 1, 2])
        (lost,) = speculator.propose([asked], 100)
        assert lost.parents is not None
        asked.output_ids.append(7)
        made.append((lost, *speculator.propose([asked], 100)))
    assert made[0] == made[1]
    assert made[0][0] != made[0][1]


def test_an_answer_that_a_stop_string_cuts_ends_as_any_other() -> None:
    """What was said behind the cut was told already."""
    native, python = (Speculator("auto", 15, 100) for _ in range(2))
    python._native = None
    assert native._native is not None
    for speculator in (native, python):
        for cut in (0, 3, 11, 12):
            asked = sequence([], session="a", prompt=[1, 2, 3])
            for token_id in [5, 6, 7, 8] * 3:
                asked.output_ids.append(token_id)
                speculator.propose([asked], 100)
            del asked.output_ids[cut:]
            speculator.ended(asked)
        asked = sequence([5, 6], session="a", prompt=[1, 2, 3])
        (guesses,) = speculator.propose([asked], 100)
        assert guesses.token_ids[:2] in ((), (7,), (7, 8))


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_an_engine_goes_on_after_a_stop_behind_what_sources_were_told(cut: int) -> None:
    driver = Driver(FakeRunner(num_slots=2000, max_positions=400), speculation="auto")
    for number in range(4):
        wanted = request(f"r{number}", [1, 2, 3, 4], max_tokens=60)
        driver.submit(wanted)
        while len(driver.told.get(wanted.request_id, Told()).ids) < 9:
            driver.step()
        driver.engine.stop(wanted.request_id, cut)
        driver.finish()
    assert driver.engine.stats().kv_slots_used == 0
