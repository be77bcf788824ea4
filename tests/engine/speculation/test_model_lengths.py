"""How much a model guesses, on made-up machines where guessing takes time: as much as pays, and next to nothing lost
where it does not, whatever it has to catch up with.
"""

from __future__ import annotations

import random

import pytest

from engine.speculation.acceptance import Acceptance, Rates
from engine.speculation.controller import MODEL_REFRESH, Controller
from engine.speculation.draft_times import DraftTimes
from engine.speculation.lengths import Always, Candidate
from engine.speculation.model_lengths import HELD, ModelCandidate, ModelLengths
from engine.speculation.step_times import StepTimes
from tests.engine.speculation.test_controller import Machine, dear, dispatch, free

PRIOR = Rates(0.6, 0.7)
ANSWER = 60


class Run:
    """Steps of `rows` sequences, for which a model guesses: a forward takes `cost` of a plain step, and tokens that it
    has missed `cost` of what they cost the target. Answers are `ANSWER` tokens, then comes a prompt of `prompt`.
    """

    def __init__(
        self, machine: Machine, rows: int, cost: float, *, prompt: int = 0, noise: float = 0.1, seed: int = 0
    ) -> None:
        self.machine, self.rows, self.cost, self.prompt, self.noise = machine, rows, cost, prompt, noise
        self.random = random.Random(seed)
        self.controller = Controller(cost)
        self.acceptance = Acceptance(256)
        if prompt:
            self.controller.prompts(prompt, machine(1, prompt))
        self.late = [prompt] * rows
        self.left = [self.random.randint(1, ANSWER) for _ in range(rows)]
        self.chosen: list[int] = []

    def steps(self, count: int, rate: float, free_rate: float = 0.0) -> float:
        """Speed over plain decoding. `rate`: how probably a guess of the model is right; `free_rate`: one that costs
        nothing.
        """
        plain_s = self.machine(self.rows, self.rows)
        spent = tokens_out = 0.0
        for _ in range(count):
            lengths, by_model = self._choose(free_rate)
            drafting_s = self._drafting_s(by_model)
            gained = tokens = 0
            for row, (own, drafted) in enumerate(zip(lengths, by_model, strict=True)):
                right = self._right(drafted, rate) if drafted else self._right(own, free_rate)
                if drafted:
                    self.acceptance.add(right, drafted)
                gained += right
                tokens += 1 + (drafted or own)
                self._take(row, 1 + right, drafted=drafted > 0)
            step_s = self.machine(self.rows, tokens) * self._luck()
            self.controller.stepped(self.rows, tokens, gained, step_s, drafting_s)
            self.chosen.append(max(by_model))
            spent += (step_s + drafting_s) / (1 + self.noise * 0.8)
            tokens_out += self.rows + gained
        return tokens_out * plain_s / self.rows / spent

    def _choose(self, free_rate: float) -> tuple[list[int], list[int]]:
        none = [0] * self.rows
        if not self.controller.may_draft(self.rows, is_expected=False):
            return none, none
        guess = Candidate(15, Rates(free_rate, free_rate)) if free_rate else None
        free_guesses: list[Candidate | None] = [guess] * self.rows
        lengths = self.controller.choose(self.rows, free_guesses, 1000)
        rates = self.acceptance.rates(PRIOR, 3.0)
        if not self.controller.may_ask_model(self.rows, rates):
            return lengths, none
        models = [ModelCandidate(15, rates, late) for late in self.late]
        return lengths, self.controller.choose_model(self.rows, free_guesses, lengths, models, 1000)

    def _drafting_s(self, by_model: list[int]) -> float:
        drafting = [row for row, length in enumerate(by_model) if length]
        if not drafting:
            return 0.0
        forward_s = self.cost * self.machine(len(drafting), len(drafting)) * self._luck()
        late = sum(self.late[row] for row in drafting)
        first_s, others_s = (
            forward_s + self.cost * (self.machine(1, 1 + late) - self.machine(1, 1)),
            (max(by_model) - 1) * forward_s,
        )
        self.controller.guessed(len(drafting), late, max(by_model), first_s, others_s)
        return first_s + others_s

    def _right(self, count: int, rate: float) -> int:
        """How many of so many guesses are right before one is not."""
        right = 0
        while right < count and self.random.random() < rate:
            right += 1
        return right

    def _take(self, row: int, count: int, *, drafted: bool) -> None:
        self.late[row] = count if drafted else self.late[row] + count
        self.left[row] -= count
        if self.left[row] <= 0:
            self.left[row], self.late[row] = ANSWER, self.prompt

    def _luck(self) -> float:
        return 1 + self.noise * abs(self.random.gauss(0, 1))


@pytest.mark.parametrize("prompt", [0, 1000])
@pytest.mark.parametrize("rows", [1, 4, 24])
@pytest.mark.parametrize("cost", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("machine", [free, dispatch, dear], ids=lambda machine: machine.__name__)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6])
def test_it_never_costs_three_percent(machine: Machine, cost: float, rows: int, rate: float, prompt: int) -> None:
    assert min(Run(machine, rows, cost, prompt=prompt, seed=seed).steps(1500, rate) for seed in range(3)) > 0.97


@pytest.mark.parametrize(
    ("machine", "rows", "cost", "prompt", "rate", "least"),
    [
        (free, 1, 0.05, 0, 0.9, 4.0),
        (free, 1, 0.1, 300, 0.8, 2.2),
        (free, 16, 0.1, 300, 0.8, 1.5),
        (dispatch, 1, 0.15, 100, 0.8, 1.08),
        (dispatch, 1, 0.1, 0, 0.95, 1.8),
        (free, 4, 0.5, 0, 0.95, 1.1),
    ],
)
def test_it_pays_where_it_can(machine: Machine, rows: int, cost: float, prompt: int, rate: float, least: float) -> None:
    run = Run(machine, rows, cost, prompt=prompt)
    run.steps(300, rate)
    assert run.steps(600, rate) > least


@pytest.mark.parametrize("rows", [1, 8])
def test_a_model_that_costs_as_much_as_it_brings_is_let_alone(rows: int) -> None:
    run = Run(dear, rows, 0.2)
    run.steps(300, 0.9)
    run.chosen.clear()
    run.steps(1000, 0.9)
    assert sum(length > 0 for length in run.chosen) < 50


def test_one_that_becomes_good_is_noticed_and_one_that_becomes_bad_too() -> None:
    run = Run(free, 1, 0.1)
    run.steps(2000, 0.0)
    assert sum(length > 0 for length in run.chosen[-300:]) < 10
    run.steps(6000, 0.9)  # looked at ever more rarely before
    assert run.steps(300, 0.9) > 2.0
    assert run.steps(400, 0.0) > 0.8
    assert run.steps(3000, 0.0) > 0.97


def test_guesses_that_cost_nothing_come_first_where_they_promise_enough() -> None:
    run = Run(dispatch, 2, 0.3)
    run.steps(200, 0.8, free_rate=0.95)
    run.chosen.clear()
    both = run.steps(500, 0.8, free_rate=0.95)
    assert sum(length > 0 for length in run.chosen) < 60
    alone = Run(dispatch, 2, 0.3)
    alone.steps(200, 0.8)
    assert both > alone.steps(500, 0.8)


def lengths_of(rows: int = 4, plain_s: float = 1e-3) -> ModelLengths:
    times = StepTimes()
    for _ in range(3):
        times.add(rows, rows, plain_s)
    return ModelLengths(times, 0.02, 0.02)


SURE = Rates(0.95, 0.95)


def test_room_limits_and_what_is_there_already_are_kept_to() -> None:
    lengths = lengths_of()
    models = [ModelCandidate(15, SURE), None, ModelCandidate(2, SURE), ModelCandidate(15, Rates(0.3, 0.3))]
    chosen = lengths.choose(4, [0.0, 0.0, 0.0, 2.0], [0, 0, 0, 3], models, 1000)
    assert chosen[0] > chosen[2] == 2
    assert chosen[1] == chosen[3] == 0  # nobody there, and something better
    for room in range(3, 20):
        chosen = lengths.choose(4, [0.0, 0.0, 0.0, 2.0], [0, 0, 0, 3], models, room)
        assert sum(chosen) + 3 <= room
    assert lengths.choose(5, [0.0] * 5, [0] * 5, [None] * 5, 1000) == [0] * 5  # plain steps of five are not known


def test_what_the_account_cannot_bear_is_not_begun() -> None:
    """Rows whose text the model knows come first; a long prompt waits until others have earned it."""
    lengths = lengths_of()
    models = [ModelCandidate(15, SURE, 3000), ModelCandidate(15, SURE, 1)]
    first = lengths.choose(4, [0.0, 0.0], [0, 0], models, 1000)
    assert first[0] == 0 < first[1]
    assert lengths.choose(4, [0.0], [0], models[:1], 1000) == [0]
    for _ in range(200):
        lengths.stepped(4, 24, 18, 1.2e-3, 0.2e-3, is_pure=True)
    assert lengths.choose(4, [0.0], [0], models[:1], 1000) != [0]
    for _ in range(200):
        lengths.stepped(4, 24, 0, 1.2e-3, 0.2e-3, is_pure=True)
    assert lengths.choose(4, [0.0], [0], [ModelCandidate(15, SURE)], 1000) == [0]


def test_a_decision_holds_for_a_few_steps_while_all_is_as_it_was() -> None:
    hopeless = Rates(0.0, 0.0)

    def decided() -> ModelLengths:
        lengths = lengths_of(1)
        assert lengths.choose(1, [0.0], [0], [ModelCandidate(15, SURE)], 1000) != [0]
        return lengths

    lengths = decided()
    assert [lengths.choose(1, [0.0], [0], [ModelCandidate(1, hopeless)], 1000) for _ in range(HELD + 1)] == [
        *[[1]] * HELD,
        [0],
    ]
    for models, others, room in (
        ([ModelCandidate(15, hopeless, 100)], [0], 1000),  # it has to catch up first
        ([None], [0], 1000),
        ([ModelCandidate(15, hopeless)], [3], 1000),  # another source guesses
        ([ModelCandidate(15, hopeless)], [0], 0),
    ):
        assert decided().choose(1, [0.0], others, models, room) == [0]
    lengths = decided()
    for _ in range(100):
        lengths.stepped(1, 16, 0, 4e-3, 1e-3, is_pure=True)  # what is lost ends it at once
    assert lengths.choose(1, [0.0], [0], [ModelCandidate(15, SURE)], 1000) == [0]


def test_late_tokens_have_a_price_of_their_own_before_it_is_measured() -> None:
    times = DraftTimes(0.25, 0.01)
    assert times.forward_s(1, 1e-3) == pytest.approx(0.25e-3)
    assert times.late_s(100, 1e-3, 1) == pytest.approx(1e-3)
    assert times.late_s(0, 1e-3, 1) == 0.0


def test_a_plain_step_is_taken_for_its_time_now_and_then() -> None:
    """While a model guesses, and nobody looks for guesses before it."""
    controller = Controller(0.02)
    for _ in range(3):
        controller.stepped(1, 1, 0, 1e-3)
    chosen = []
    for _ in range(100):
        if controller.may_draft(1, is_expected=False) and controller.may_ask_model(1, SURE):
            chosen.append(controller.choose_model(1, [None], [0], [ModelCandidate(15, SURE)], 1000)[0])
        else:
            chosen.append(0)
        controller.stepped(1, 1 + chosen[-1], chosen[-1], 1.1e-3, 0.1e-3 if chosen[-1] else 0.0)
    assert 100 // (MODEL_REFRESH + 1) <= chosen.count(0) <= 100 // MODEL_REFRESH


def test_beside_prompts_what_guessing_took_counts_though_the_step_tells_nothing() -> None:
    lengths = lengths_of()
    for _ in range(300):
        lengths.stepped(4, 24, 0, 5.0, 1e-3, is_pure=False)
    assert lengths.choose(4, [0.0], [0], [ModelCandidate(15, SURE)], 1000) == [0]


def test_times_of_forwards_and_of_catching_up_are_told_apart() -> None:
    times = DraftTimes(0.25, 0.25)
    assert times.late_s(10, 4e-3, 2) == pytest.approx(5e-3)
    times.add_prompt(100, 40e-3)
    assert times.late_s(10, 4e-3, 2) == pytest.approx(1e-3)
    assert times.forward_s(2, 4e-3) == pytest.approx(1e-3)
    for _ in range(3):
        times.add(2, 0, 4, 1e-3, 3e-3 * 0.5)
    assert times.forward_s(2, 4e-3) == pytest.approx(2.5e-3 / 4)
    times.add(1, 1000, 1, 20e-3, 0.0)  # nothing but a prompt
    assert times.late_s(500, 4e-3, 1) == pytest.approx(10e-3)
    assert times.forward_s(1, 4e-3) == pytest.approx(1e-3)
    for _ in range(3):
        times.add(1, 1000, 3, 41e-3, 2e-3)
    assert times.forward_s(1, 4e-3) == pytest.approx(1e-3)
    assert times.late_s(1000, 4e-3, 1) == pytest.approx(40e-3)


def test_always_takes_what_there_is() -> None:
    models = [ModelCandidate(3, SURE), None, ModelCandidate(15, SURE), ModelCandidate(15, SURE)]
    assert Always(5).choose_model(4, [None] * 4, [0, 0, 2, 0], models, 9) == [3, 0, 0, 4]
