"""How much a model guesses, on made-up machines where guessing takes time: as much as pays, and next to nothing lost
where it does not, whatever it has to catch up with.
"""

from __future__ import annotations

import random

import pytest

from engine.speculation.acceptance import Acceptance, Rates
from engine.speculation.controller import MODEL_REFRESH, Controller
from engine.speculation.draft_times import FEW, DraftTimes
from engine.speculation.lengths import Always, Candidate
from engine.speculation.model_lengths import HELD, ModelCandidate, ModelLengths
from engine.speculation.step_times import SAMPLES, StepTimes
from tests.engine.speculation.test_controller import Machine, dear, dispatch, free

PRIOR = Rates(0.6, 0.7)
GUESS = 0.25 / 4.06
LATE = 0.01
PROMPT_S = 0.04e-3
ANSWER = 60


class Run:
    """Steps of `rows` sequences, for which a model guesses: a forward takes `cost` of a plain step, and tokens that it
    has missed `cost` of what they cost the target. Answers are `ANSWER` tokens, then comes a prompt of `prompt`.
    """

    answer = ANSWER

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
        self.left = [self.random.randint(1, self.answer) for _ in range(rows)]
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
        late, most_late = sum(self.late[row] for row in drafting), self.controller.most_late
        if late > most_late:  # then that is all
            (row,) = drafting
            by_model[row] = 0
            self.late[row] -= most_late
            late_s = self._late_s(most_late - 1) * self._luck()
            self.controller.guessed(1, most_late - 1, 1, late_s, 0.0)
            return late_s
        forward_s = self.cost * self.machine(len(drafting), len(drafting)) * self._luck()
        first_s, others_s = forward_s + self._late_s(late), (max(by_model) - 1) * forward_s
        self.controller.guessed(len(drafting), late, max(by_model), first_s, others_s)
        return first_s + others_s

    def _late_s(self, late: int) -> float:
        return self.cost * (self.machine(1, 1 + late) - self.machine(1, 1))

    def _next_prompt(self) -> int:
        return self.prompt

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
            self.left[row], self.late[row] = self.answer, self._next_prompt()

    def _luck(self) -> float:
        return 1 + self.noise * abs(self.random.gauss(0, 1))


def large(rows: int, tokens: int) -> float:
    """An H200 with a model of eight billion parameters: any drafts at all cost waiting for results."""
    plain_s = 4.0e-3 + 0.06e-3 * rows
    return plain_s if tokens == rows else plain_s + 0.84e-3 + 0.03e-3 * max(tokens - 8 * rows, 0)


class CatchingUp(Run):
    """On `large`, with answers of 200 tokens to prompts of `prompts` tokens, the first of them `first`. Catching up
    with more tokens than a guess takes in by itself takes `fixed_s` and `token_s` a token, and `cold` times as long the
    first time.
    """

    answer = 200

    def __init__(
        self,
        first: int,
        prompts: range,
        *,
        rows: int = 1,
        fixed_s: float,
        token_s: float = 0.0,
        cold: float = 10.0,
        seed: int = 0,
    ) -> None:
        super().__init__(large, rows, GUESS, seed=seed)
        self.controller = Controller(GUESS, max(token_s / PROMPT_S, LATE), waits=True)
        self.prompts, self.fixed_s, self.token_s, self.cold = prompts, fixed_s, token_s, cold
        self.late = [first] * rows
        self.controller.prompts(1000, 1000 * PROMPT_S)

    def _next_prompt(self) -> int:
        return self.random.choice(self.prompts)

    def _late_s(self, late: int) -> float:
        if late <= FEW:
            return 0.0
        cold, self.cold = self.cold, 1.0
        return cold * (self.fixed_s + self.token_s * late)


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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("first", "prompts"),
    [(30, range(30, 1001)), (30, range(100, 1001)), (30, range(1000, 4001)), (1000, range(30, 1001))],
    ids=str,
)
def test_catching_up_that_takes_a_fixed_time_is_not_taken_to_cost_more_for_more_tokens(
    first: int, prompts: range, seed: int
) -> None:
    run = CatchingUp(first, prompts, fixed_s=2e-3, seed=seed)
    assert run.steps(3000, 0.5) > 1.15


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("token_s", [0.04e-3, 0.4e-3, 4e-3])
@pytest.mark.parametrize(("first", "prompts", "rows"), [(30, range(1000, 4001), 4), (1000, range(30, 1001), 1)])
def test_nor_does_catching_up_cost_three_percent_where_every_token_of_it_is_dear(
    first: int, prompts: range, rows: int, token_s: float, rate: float
) -> None:
    for seed in range(2):
        run = CatchingUp(first, prompts, rows=rows, fixed_s=0.0, token_s=token_s, cold=1.0, seed=seed)
        assert run.steps(1500, rate) > 0.97


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


def test_what_catching_up_takes_is_known_by_how_many_tokens_it_is() -> None:
    """Few may take as long as many, or in proportion; the first time may have made something ready."""
    times = DraftTimes(0.25, 0.25)
    times.add(1, 100, 1, 2e-3, 0.0)
    assert times.late_s(50, 4e-3, 1) == pytest.approx(1e-3)  # until it is tried
    assert times.late_s(200, 4e-3, 1) == pytest.approx(4e-3)
    times.add(1, 30, 1, 20e-3, 0.0)
    assert times.late_s(30, 4e-3, 1) == pytest.approx(2e-3)  # more took less
    times.add(1, 1000, 1, 60e-3, 0.0)
    assert times.late_s(1000, 4e-3, 1) == pytest.approx(60e-3)
    times.add(1, 1000, 1, 6e-3, 0.0)
    assert times.late_s(1000, 4e-3, 1) == pytest.approx(6e-3)
    assert times.late_s(550, 4e-3, 1) == pytest.approx(4e-3)
    for _ in range(4):
        times.add(1, 1000, 1, 60e-3, 0.0)
    assert times.late_s(1000, 4e-3, 1) == pytest.approx(60e-3)
    assert not times.knows_late(100)
    times.add(1, 1000, 1, 60e-3, 0.0)
    assert times.knows_late(100)
    assert not times.knows_late(2000)
    prices = [times.late_s(late, 4e-3, 1) for late in range(2000)]
    assert prices == sorted(prices)


def test_where_catching_up_seems_too_dear_as_much_of_it_is_tried_as_is_borne() -> None:
    """One measurement was wrong; and what is known well is not tried in vain."""

    def tried(measured: int) -> tuple[ModelLengths, list[list[int]]]:
        lengths = lengths_of(1)
        for _ in range(measured):
            lengths.drafts.add(1, 30, 1, 10e-3, 0.0)
        chosen = []
        for _ in range(100):
            chosen.append(lengths.choose(1, [0.0], [0], [ModelCandidate(15, SURE, 1000)], 1000))
            if any(chosen[-1]):
                break
            lengths.stepped(1, 1, 0, 1e-3, 0.0, is_pure=True)
        return lengths, chosen

    lengths, chosen = tried(1)
    assert chosen[-1] == [1]
    assert not lengths.is_drafting
    assert FEW < lengths.most_late < 100
    lengths.drafts.add(1, lengths.most_late - 1, 1, 1e-3, 0.0)
    lengths.stepped(1, 1, 0, 1e-3, 1e-3, is_pure=True)
    lengths.choose(1, [0.0], [0], [ModelCandidate(15, SURE, 30)], 1000)
    assert lengths.is_drafting
    assert lengths.most_late > 1000  # it catches up with all
    _, chosen = tried(SAMPLES)
    assert not any(map(any, chosen))


def test_always_takes_what_there_is() -> None:
    models = [ModelCandidate(3, SURE), None, ModelCandidate(15, SURE), ModelCandidate(15, SURE)]
    assert Always(5).choose_model(4, [None] * 4, [0, 0, 2, 0], models, 9) == [3, 0, 0, 4]
