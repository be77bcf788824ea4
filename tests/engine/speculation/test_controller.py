"""The controller on made-up machines: it finds the length that pays, costs next to nothing where none does, and notices
when things change.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable

import pytest

from engine.speculation.acceptance import Acceptance, Rates
from engine.speculation.chains import LENGTHS
from engine.speculation.controller import Controller
from engine.speculation.lengths import Candidate
from engine.speculation.step_times import StepTimes
from engine.step_costs import size_class

Machine = Callable[[int, int], float]


def free(rows: int, tokens: int) -> float:
    """Bound by weight traffic: up to 128 tokens cost what one costs."""
    return 4e-3 * max(1.0, tokens / 128)


def dispatch(rows: int, tokens: int) -> float:
    """Two processor cores: as measured with the bundled model, 1.3 ms for one token and 3.5 ms for sixteen."""
    return 0.8e-3 + 0.25e-3 * rows + (0.45e-3 * rows**0.5 + 0.11e-3 * (tokens - rows) if tokens > rows else 0.0)


def dear(rows: int, tokens: int) -> float:
    """Bound by arithmetic: a draft costs a token."""
    return 1e-3 * tokens


def native(rows: int, tokens: int) -> float:
    """One core with the native step: weights are read in the time of three tokens, then products bind."""
    return 0.04e-3 + 0.02e-3 * rows + max(0.15e-3, 0.075e-3 * tokens)


def waiting(rows: int, tokens: int) -> float:
    """A GPU: as measured with a model of two billion parameters; any drafts at all cost waiting for results."""
    plain_s = 1.6e-3 + 0.036e-3 * rows
    return plain_s if tokens == rows else plain_s + 0.4e-3 + 0.006e-3 * (tokens - rows)


class Run:
    """Steps of `rows` sequences whose guesses are right with some rate, and what they took."""

    def __init__(self, machine: Machine, rows: int, *, noise: float = 0.1, seed: int = 0) -> None:
        self.machine, self.rows, self.noise = machine, rows, noise
        self.random = random.Random(seed)
        self.controller = Controller()
        self.acceptance = Acceptance(256)
        self.chosen: list[int] = []

    def steps(self, count: int, rate: float, length: int = 15) -> float:
        """Speed over plain decoding: tokens by what plain steps would have taken for them."""
        spent = tokens_out = 0.0
        for _ in range(count):
            lengths = [0] * self.rows
            if self.controller.may_draft(self.rows, is_expected=False):
                rates = self.acceptance.rates(Rates(0.7, 0.8), 3.0)
                lengths = self.controller.choose(self.rows, [Candidate(length, rates)] * self.rows, 1000)
            gained = 0
            for own in lengths:
                right = next((index for index in range(own) if self.random.random() >= rate), own)
                gained += right
                if own:
                    self.acceptance.add(right, own)
                else:  # what was guessed and not checked is judged by its first token
                    self.acceptance.add(int(self.random.random() < rate), 1)
            tokens = self.rows + sum(lengths)
            elapsed = self.machine(self.rows, tokens) * (1 + self.noise * abs(self.random.gauss(0, 1)))
            self.controller.stepped(self.rows, tokens, gained, elapsed)
            self.chosen.append(max(lengths))
            spent += elapsed / (1 + self.noise * 0.8)
            tokens_out += self.rows + gained
        return tokens_out * self.machine(self.rows, self.rows) / self.rows / spent


@pytest.mark.parametrize("rows", [1, 4, 24])
@pytest.mark.parametrize("machine", [free, dispatch, dear], ids=lambda machine: machine.__name__)
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_it_never_costs_three_percent(machine: Machine, rows: int, rate: float) -> None:
    assert min(Run(machine, rows, seed=seed).steps(1500, rate) for seed in range(3)) > 0.97


class Answers:
    """Sequences that answer with `length` tokens and then, all of them having ended, begin anew: fewer rows towards the
    end, an answer that may repeat an earlier one at the begin. Looking for guesses takes `looking_s` a row, and
    `catching_up` times as long where the step before did not look; one step of ten takes `hiccup_s` more.
    """

    def __init__(self, rows: int, length: int, *, hiccup_s: float = 0.0, seed: int = 0) -> None:
        self.rows, self.length, self.hiccup_s = rows, length, hiccup_s
        self.looking_s = 2e-5
        self.catching_up = 1.0
        self.random = random.Random(seed)
        self.controller = Controller()
        self.acceptance = Acceptance(256)

    def speed(self, count: int, rate: float) -> float:
        """Of so many steps, over plain decoding."""
        spent = plain = 0.0
        left: list[int] = []
        has_looked = False
        for _ in range(count):
            is_new = not left
            left = left or [self.length - self.random.randrange(self.length // 2) for _ in range(self.rows)]
            rows = len(left)
            lengths = [0] * rows
            catching_up, has_looked = 1.0 if has_looked else self.catching_up, False
            if self.controller.may_draft(rows, is_expected=is_new):
                has_looked = True
                rates = self.acceptance.rates(Rates(0.7, 0.8), 3.0)
                lengths = self.controller.choose(
                    rows, [Candidate(min(15, most - 1), rates) if most > 1 else None for most in left], 1000
                )
                self.controller.looked(rows, rows * self.looking_s * catching_up, found=any(lengths))
                spent += rows * self.looking_s * catching_up
                self.acceptance.add(int(self.random.random() < rate), 1)
            gained = 0
            for row, own in enumerate(lengths):
                right = next((index for index in range(own) if self.random.random() >= rate), own)
                if own:
                    self.acceptance.add(right, own)
                gained += right
                left[row] -= 1 + right
            tokens = rows + sum(lengths)
            elapsed = native(rows, tokens) * (1 + 0.1 * abs(self.random.gauss(0, 1)))
            elapsed += self.hiccup_s * (self.random.random() < 0.1)
            self.controller.stepped(rows, tokens, gained, elapsed)
            spent += elapsed
            plain += (rows + gained) / rows * (1.08 * native(rows, rows) + 0.1 * self.hiccup_s)
            left = [most for most in left if most > 0]
        return plain / spent


@pytest.mark.parametrize("length", [12, 40, 400])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.7])
def test_looking_never_costs_three_percent_either(rate: float, rows: int, length: int) -> None:
    """However short answers are, and though looking takes a tenth of a step and steps of several sequences a token of
    each."""
    assert min(Answers(rows, length, seed=seed).speed(3000, rate) for seed in range(3)) > 0.97


@pytest.mark.parametrize("seed", range(3))
def test_a_camera_pays_soon_after_short_answers_in_which_looking_was_dear(seed: int) -> None:
    """Looking into a grammar takes a plain step's time. Neither its price nor what it lost keeps who comes next."""
    answers = Answers(1, 12, seed=seed)
    answers.looking_s, answers.catching_up = 2e-4, 3.0
    answers.speed(3000, 0.0)
    answers.length, answers.looking_s = 32, 7e-5
    answers.acceptance = Acceptance(256)
    answers.speed(800, 0.98)
    assert answers.speed(800, 0.98) > 1.4


@pytest.mark.parametrize(("rows", "least"), [(1, 2.5), (4, 1.4), (16, 1.0)])
def test_hiccups_of_the_machine_keep_nobody_from_what_pays(rows: int, least: float) -> None:
    """One step of ten takes several times as long as it should, the first of a width as likely as any other."""
    for seed in range(5):
        answers = Answers(rows, 200, hiccup_s=2e-3, seed=seed)
        answers.speed(300, 1.0)
        assert answers.speed(600, 1.0) > least


def test_drafts_are_shortened_only_where_that_promises_more() -> None:
    """Where the first draft of a step is the dear one, a few more of them are not waste, though each brings little."""
    controller = Controller()
    for tokens in (1, 2, 4, 8):
        for _ in range(8):
            controller.stepped(1, tokens, tokens - 1, dispatch(1, tokens))
    for _ in range(8):
        controller.stepped(1, 1, 0, dispatch(1, 1))
    rates = Rates(0.9, 0.5)
    speeds = {length: (1 + rates.expected(length)) / dispatch(1, 1 + length) for length in (0, 1, 3, 7)}
    chosen = controller.choose(1, [Candidate(7, rates)], 1000)[0]
    assert speeds[chosen] == max(speeds.values())


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_where_a_draft_costs_a_token_nothing_is_drafted(rows: int) -> None:
    run = Run(dear, rows)
    run.steps(300, 0.9)
    run.chosen.clear()
    run.steps(1000, 0.9)
    assert sum(length > 0 for length in run.chosen) < 30


@pytest.mark.parametrize(
    ("machine", "rows", "rate", "least"),
    [
        (free, 1, 0.98, 10.0),
        (free, 1, 0.8, 3.8),
        (free, 64, 0.8, 1.7),
        (waiting, 1, 0.5, 1.3),
        (waiting, 64, 0.65, 1.25),
        (dispatch, 1, 0.98, 4.0),
        (dispatch, 1, 0.8, 1.6),
        (dispatch, 16, 0.98, 1.85),
        (dispatch, 64, 0.98, 1.7),
    ],
)
def test_it_pays_where_it_can(machine: Machine, rows: int, rate: float, least: float) -> None:
    run = Run(machine, rows)
    run.steps(100, rate)
    assert run.steps(500, rate) > least


def test_what_a_few_wrong_guesses_in_a_row_say_is_not_believed_for_long() -> None:
    """Where guesses are right in two of five cases and pay a third, promises are kept on average alone."""
    speeds = []
    for seed in range(7):
        run = Run(waiting, 1, seed=seed)
        run.steps(100, 0.4)
        speeds.append(run.steps(500, 0.4))
    assert statistics.median(speeds) > 1.2


def test_a_scene_that_becomes_still_is_noticed_and_one_that_begins_to_cut_too() -> None:
    run = Run(dispatch, 1)
    run.steps(2000, 0.05)
    assert sum(run.chosen[-200:]) < 20
    assert run.steps(400, 0.97) > 2.5
    assert run.steps(400, 0.05) > 0.9
    assert run.steps(3000, 0.05) > 0.97


def test_a_machine_that_slows_down_for_drafts_is_noticed() -> None:
    """Such as when a neighbour takes the other core: verifying steps become dear, and plain ones do not."""
    run = Run(free, 4)
    run.steps(300, 0.6)
    assert sum(run.chosen[-20:]) > 20
    run.machine = dear
    run.steps(400, 0.6)
    assert run.steps(2000, 0.6) > 0.96


def test_it_neither_begins_before_plain_steps_are_known_nor_goes_on_without_renewing_them() -> None:
    run = Run(free, 2)
    run.steps(2, 1.0)
    assert run.chosen == [0, 0]
    run.steps(1000, 1.0)
    plain = [index for index, length in enumerate(run.chosen) if not length]
    assert all(later - earlier <= 130 for earlier, later in itertools.pairwise(plain))
    assert len(plain) < 20


def test_room_and_lengths_are_kept_to() -> None:
    controller = Controller()
    for _ in range(3):
        controller.stepped(4, 4, 0, 1e-3)
    sure = Rates(0.99, 0.99)
    candidates = [Candidate(15, sure), None, Candidate(5, sure), Candidate(15, Rates(0.1, 0.99))]
    chosen = controller.choose(4, candidates, 1000)
    assert chosen[1] == chosen[3] == 0
    assert 0 < chosen[2] <= 5
    assert set(chosen) <= {0, *LENGTHS}
    assert sum(controller.choose(4, candidates, 4)) <= 4
    assert controller.choose(4, candidates, 0) == [0] * 4
    assert controller.choose(5, [None] * 5, 1000) == [0] * 5


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    controller = Controller()
    for _ in range(10):
        controller.stepped(1, 1, 0, 0.0)
    assert not controller.may_draft(1, is_expected=False)


def test_looking_in_vain_takes_a_hundredth_of_the_time() -> None:
    controller = Controller()
    for _ in range(10):
        controller.stepped(1, 1, 0, 1e-3)
    looked = 0
    for _ in range(3000):
        if controller.may_draft(1, is_expected=False):
            looked += 1
            controller.looked(1, 5e-4, found=False)
    assert looked * 5e-4 < 0.02 * 3000 * 1e-3, "with what is learnt first of how long it takes"
    assert looked > 30


def test_where_guesses_were_checked_looking_goes_on() -> None:
    controller = Controller()
    for _ in range(10):
        controller.stepped(1, 1, 0, 1e-3)
    for _ in range(300):
        if controller.may_draft(1, is_expected=False):
            controller.looked(1, 5e-4, found=False)
    while not controller.may_draft(1, is_expected=False):
        pass
    for _ in range(50):
        controller.looked(1, 5e-4, found=True)
        controller.stepped(1, 8, 5, 3e-3)
        assert controller.may_draft(1, is_expected=False)
    controller.looked(1, 5e-4, found=False)
    assert controller.may_draft(1, is_expected=False), "a text that departs for one step is looked at in the next"
    for _ in range(3):
        controller.looked(1, 5e-4, found=False)
    assert not controller.may_draft(1, is_expected=False)
    assert controller.may_draft(1, is_expected=True), "an answer that may repeat an earlier one begins"


def test_step_times_between_and_beyond_what_was_measured() -> None:
    times = StepTimes()
    assert times.step_s(4, 8) is None
    for _ in range(3):
        times.add(4, 4, 4e-3)
    assert times.plain_s(4) == pytest.approx(4e-3)
    first_guess = times.step_s(4, 8)
    assert first_guess is not None
    assert first_guess > 4e-3
    for _ in range(3):
        times.add(4, 8, 6e-3)
        times.add(4, 32, 12e-3)
    assert times.step_s(4, 8) == pytest.approx(6e-3)
    assert times.step_s(4, 20) == pytest.approx(7.5e-3)  # hoped
    for _ in range(2):
        times.add(4, 20, 9e-3)
    assert times.step_s(4, 20) == pytest.approx(9e-3)
    beyond = times.step_s(4, 64)
    assert beyond is not None
    assert beyond > 12e-3
    assert times.plain_s(5) is None
    assert len({size_class(rows) for rows in range(1, 65)}) <= 21


def test_what_drafts_cost_other_row_counts_is_believed_until_it_is_measured() -> None:
    times = StepTimes()
    for _ in range(3):
        times.add(1, 1, 1e-3)
        times.add(4, 4, 2e-3)
        times.add(1, 13, 7e-3)
    by_one = times.step_s(4, 16)
    assert by_one is not None
    assert 5e-3 < by_one < 8e-3
    for _ in range(2):
        times.add(4, 16, 3e-3)
    assert times.step_s(4, 16) == pytest.approx(3e-3)


def test_no_step_takes_longer_than_one_that_checks_more() -> None:
    """Whatever a busy machine made of it."""
    times = StepTimes()
    for tokens, elapsed in ((1, 1.0), (2, 5.0), (4, 2.0)):
        for _ in range(3):
            times.add(1, tokens, elapsed)
    assert [times.step_s(1, tokens) for tokens in (1, 2, 4)] == [1.0, 2.0, 2.0]


def test_of_two_measurements_a_hiccup_does_not_count() -> None:
    times = StepTimes()
    for _ in range(3):
        times.add(1, 1, 1e-3)
    times.add(1, 8, 2e-3)
    times.add(1, 8, 9e-3)
    assert times.step_s(1, 8) == pytest.approx(2e-3)
    for _ in range(4):
        times.add(1, 8, 9e-3)
    assert times.step_s(1, 8) == pytest.approx(9e-3)


def test_what_changes_little_leaves_what_was_concluded_and_what_drifts_does_not() -> None:
    times = StepTimes()
    for _ in range(8):
        times.add(1, 1, 1e-3)
    version = times.version
    for _ in range(20):
        times.add(1, 1, 1.001e-3)
    assert times.version == version
    for step in range(30):
        times.add(1, 1, (1.0 + 0.002 * step) * 1e-3)
    assert times.version > version


def test_a_step_is_not_believed_to_be_as_slow_as_its_first_times() -> None:
    """When the processor has not yet run what checking drafts needs."""
    controller = Controller()
    for _ in range(8):
        controller.stepped(1, 1, 0, 2e-4)
    for _ in range(2):
        controller.stepped(1, 2, 1, 3.5e-4)
    assert controller.times.step_s(1, 2) == pytest.approx(3e-4)
    for _ in range(20):
        controller.stepped(1, 2, 1, 3.5e-4)
    assert controller.times.step_s(1, 2) == pytest.approx(3.5e-4)


def test_something_is_risked_on_an_answer_that_repeats_whatever_was_lost() -> None:
    controller = Controller()
    for _ in range(8):
        controller.stepped(1, 1, 0, 1e-3)
    sure = [Candidate(3, Rates(0.95, 0.95))]
    assert controller.may_draft(1, is_expected=False)
    for _ in range(20):
        controller.stepped(1, 4, 0, 2e-3)  # all wrong, beyond what the account bears
    controller.stepped(1, 1, 0, 1e-3)
    controller._watches.clear()  # trust is another matter
    assert controller.choose(1, sure, 100) == [0]
    controller.stake(1)
    assert controller.choose(1, sure, 100) == [3]
    controller.stepped(1, 4, 0, 2e-3)
    controller.stepped(1, 4, 0, 2e-3)
    controller.stepped(1, 1, 0, 1e-3)
    controller._watches.clear()
    controller.stake(1)
    assert controller.choose(1, sure, 100) == [0], "once in so many steps"


@pytest.mark.parametrize("rows", [1, 4])
def test_what_guesses_need_to_bring_is_what_choosing_asks_for(rows: int) -> None:
    """Nothing is kept from being chosen by the look before it."""
    controller = Controller()
    for _ in range(4):
        for tokens in (rows, 2 * rows, 4 * rows, 8 * rows, 16 * rows):
            controller.stepped(rows, tokens, tokens - rows, native(rows, tokens))
    controller.stepped(rows, rows, 0, native(rows, rows))
    controller._watches.clear()
    counts, least = controller.needs(rows)[::2].tolist(), controller.needs(rows)[1::2].tolist()
    chosen = 0
    for first, later, length in itertools.product((0.3, 0.6, 0.9, 0.97), (0.3, 0.9, 0.99), (1, 3, 7, 15)):
        rates = Rates(first, later)
        if any(controller.choose(rows, [Candidate(length, rates)] * rows, 1000)):
            chosen += 1
            promised = [rows * rates.expected(min(length, limit)) for limit in LENGTHS]
            checked = [rows * min(length, limit) for limit in LENGTHS]
            needed = [least[counts.index(count)] for count in checked]
            assert any(right >= need for right, need in zip(promised, needed, strict=True))
        controller._watches.clear()
    assert chosen > 3
