"""Guesses of first tokens, checked beside prompts, on made-up machines: as many as pay, and never dear."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.speculation.controller import Controller
from engine.speculation.echo import Echo
from engine.speculation.opening import Openings, worth
from engine.speculation.step_times import StepTimes
from tests.engine.speculation.test_controller import native
from tests.engine.speculation.test_sources import sequence

PROMPT = 90
LENGTH = 32
TOKEN_S = 0.065e-3
"""Of a prompt."""


class Camera:
    """One session whose answers agree with the one before for as many tokens as `agreed` draws.

    Args:
        agreed: Called with a random generator.
        draft_s: What a guess beside a prompt takes.
        hiccup_s: What one prompt of ten takes longer.
    """

    def __init__(
        self, agreed: Callable[[random.Random], int], draft_s: float = 0.075e-3, hiccup_s: float = 0.0, seed: int = 0
    ) -> None:
        self.agreed, self.draft_s, self.hiccup_s = agreed, draft_s, hiccup_s
        self.random = random.Random(seed)
        self.controller = Controller()
        self.echo = Echo()
        self.answer = list(range(LENGTH))
        self.chosen: list[int] = []

    def speed(self, count: int) -> float:
        """Of so many answers, prompts included, over those without guesses."""
        spent = plain = 0.0
        for _ in range(count):
            agreed = min(self.agreed(self.random), LENGTH)
            self.answer = [*self.answer[:agreed], *(self.random.randrange(1000, 10**6) for _ in range(LENGTH - agreed))]
            asked = sequence(session="a")
            guesses, looking_s = 0, 2e-5
            if self.controller.may_open(1):
                prior = [0.8 * 0.9**index for index in range(LENGTH)] if self.echo.resembles(asked) else []
                guesses = self.controller.open(1, PROMPT, self.echo.survival(asked, prior), looking_s)
                spent += looking_s
            self.chosen.append(guesses)
            right = min(guesses, agreed, LENGTH - 1)
            extra_s = self.hiccup_s * (self.random.random() < 0.1)
            noise = 1 + 0.02 * self.random.gauss(0, 1)
            elapsed_s = (PROMPT * TOKEN_S + guesses * self.draft_s) * noise + extra_s
            self.controller.opened(1, PROMPT, guesses, right, elapsed_s)
            spent += elapsed_s
            plain += PROMPT * TOKEN_S * noise + extra_s
            for _ in range(LENGTH - 1 - right):
                step_s = native(1, 1) * (1 + 0.05 * abs(self.random.gauss(0, 1)))
                self.controller.passed(1)
                self.controller.stepped(1, 1, 0, step_s)
                spent += step_s
            plain += (LENGTH - 1) * native(1, 1) * 1.04
            asked.output_ids = list(self.answer)
            self.echo.ended(asked)
        return plain / spent


@pytest.mark.parametrize("draft_s", [0.03e-3, 0.075e-3, 0.3e-3, 1e-3])
@pytest.mark.parametrize("hiccup_s", [0.0, 10e-3])
@pytest.mark.parametrize(
    "agreed",
    [
        lambda chance: 0,
        lambda chance: chance.randrange(3),
        lambda chance: chance.choice([0, LENGTH]),
        lambda chance: chance.randrange(LENGTH + 1),
        lambda chance: LENGTH,
    ],
    ids=["never", "hardly", "all or nothing", "somehow", "always"],
)
def test_it_never_costs_three_percent(agreed: Callable[[random.Random], int], hiccup_s: float, draft_s: float) -> None:
    assert min(Camera(agreed, draft_s, hiccup_s, seed).speed(400) for seed in range(3)) > 0.97


@pytest.mark.parametrize("hiccup_s", [0.0, 10e-3])
def test_a_scene_that_stands_still_is_answered_beside_its_prompt(hiccup_s: float) -> None:
    camera = Camera(lambda chance: LENGTH, hiccup_s=hiccup_s)
    camera.speed(12)
    camera.chosen.clear()
    assert camera.speed(100) > 1.4
    assert sum(length == LENGTH for length in camera.chosen) > 90


def test_it_is_guessed_no_further_than_answers_agree() -> None:
    """As in a form, whose begin is always the same."""
    camera = Camera(lambda chance: 5)
    camera.speed(20)
    camera.chosen.clear()
    camera.speed(50)
    assert set(camera.chosen) == {5}


def test_a_scene_that_begins_to_move_is_noticed_and_one_that_stops_too() -> None:
    camera = Camera(lambda chance: LENGTH)
    camera.speed(30)
    camera.agreed = lambda chance: 0
    camera.speed(30)
    camera.chosen.clear()
    camera.speed(50)
    assert not any(camera.chosen)
    camera.agreed = lambda chance: LENGTH
    camera.speed(12)
    assert camera.speed(20) > 1.4


def test_nothing_is_guessed_before_it_is_known_what_prompts_and_steps_take() -> None:
    controller = Controller()
    assert not controller.may_open(1)
    for _ in range(4):
        controller.stepped(1, 1, 0, 2e-4)
    assert controller.may_open(1)
    assert controller.open(1, PROMPT, [1.0] * 30, 0.0) == 0
    controller.opened(1, PROMPT, 0, 0, PROMPT * TOKEN_S)
    assert controller.open(1, PROMPT, [1.0] * 30, 0.0) == 30
    assert controller.open(3, PROMPT, [1.0] * 30, 0.0) == 30, "as one, until it is known what three take"
    assert controller.open(1, PROMPT, [], 0.0) == 0


def test_what_guesses_took_counts_once_it_was_seen_several_times() -> None:
    """One step that took long says little: its prompt may have been what was slow."""
    openings = Openings(StepTimes())
    for _ in range(5):
        openings.add_prompt(100, 100 * TOKEN_S)
    assert openings.draft_s(100) == pytest.approx(TOKEN_S)
    openings.add(100, 3, 120 * TOKEN_S)
    once = openings.draft_s(100)
    assert once is not None
    assert once < 1.4 * TOKEN_S
    for _ in range(20):
        openings.add(100, 30, (100 + 3 * 30) * TOKEN_S)
    often = openings.draft_s(100)
    assert often is not None
    assert often > 2.5 * TOKEN_S
    for _ in range(600):
        openings.add_prompt(100, 100 * TOKEN_S)
    later = openings.draft_s(100)
    assert later is not None
    assert later < 1.3 * TOKEN_S, "so that it is tried again"


def test_guesses_are_worth_their_price_while_they_probably_stand() -> None:
    assert worth([0.9, 0.8, 0.3, 0.2], 1.0, 2.0) == 2
    assert worth([0.9, 0.8], 1.0, 2.0) == 2
    assert worth([0.4], 1.0, 2.0) == 0
    assert worth([], 1.0, 2.0) == 0


def test_how_far_answers_agree_is_known_for_each_session_and_by_its_newest() -> None:
    source = Echo()
    for number in range(12):
        for session, agreed in (("a", 4), ("b", 10)):
            source.ended(sequence([*range(agreed), *[100 + number] * (10 - agreed)], session=session))
    survival = {name: source.survival(sequence(session=name), [0.5] * 10) for name in ("a", "b", "c")}
    assert survival["a"] == pytest.approx([8.25 / 8.5] * 4 + [0.25 / 8.5] * 6)
    assert survival["b"] == pytest.approx([8.25 / 8.5] * 10)
    assert survival["c"] == [0.5] * 10
