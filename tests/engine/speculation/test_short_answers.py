"""Answers of 13 tokens that come and go, on a made-up machine whose clock counts what guessing takes beside checking:
begins and ends of answers, looks, and what is learnt of steps. Nothing of it may cost 3 %.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, Final

import pytest

from engine.batch import SampledToken
from engine.scheduler import Chunk, Plan
from engine.sequence import Sequence
from engine.speculation.speculator import Speculator
from engine.speculation.told import library
from engine.speculation.tree import Drafts, path
from engine.step_budget import Room
from engine.step_costs import Load
from tests.engine.speculation.test_controller import native
from tests.engine.speculation.test_sources import sequence

pytestmark = pytest.mark.skipif(library() is None, reason="guesses.cpp was not built: there is no C++ compiler")

LENGTH: Final = 13
PROMPT: Final = 40
TOKEN_S: Final = 0.065e-3
"""Of a prompt."""
US: Final = 1e-6
WORK: Final = {"begin": 60 * US, "first": 90 * US, "decide": 25 * US, "ended": 60 * US}
"""Of native sources, as their callers wait for it with the caches that a step leaves: a third of a plain step."""
LEARNING_S: Final = 15 * US
DEAR: Final = 2.0
"""So many times as long on a machine whose processor is slow beside its memory."""

Answer = Callable[[random.Random, list[int]], list[int]]


def new(chance: random.Random, before: list[int]) -> list[int]:
    """Nothing like the one before."""
    return [chance.randrange(1000) for _ in range(LENGTH)]


def turns(chance: random.Random, before: list[int]) -> list[int]:
    """Begins like the one before, and then does not go on like it."""
    return [*before[: LENGTH // 3], *new(chance, before)[LENGTH // 3 :]]


def worse(chance: random.Random, before: list[int]) -> list[int]:
    """Every second word is as it was: what follows a right guess is wrong."""
    return [own if index % 2 else chance.randrange(1000) for index, own in enumerate(before)]


def same(chance: random.Random, before: list[int]) -> list[int]:
    """As before."""
    return before


class Chat:
    """Streams that ask one thing after the other, each as soon as its last answer is complete."""

    def __init__(self, rows: int, answer: Answer, *, session: bool, dear: float = 1.0, seed: int = 0) -> None:
        self.rows, self.answer, self.session = rows, answer, session
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.speculator = Speculator("auto", 15, 1000, max_first_drafts=40, clock=lambda: self.now_s)
        for name, work_s in WORK.items():
            self._takes(self.speculator._native, name, dear * work_s)
        self._takes(self.speculator.controller, "stepped", dear * LEARNING_S)
        self.numbers = itertools.count()
        self.said = [new(self.random, []) for _ in range(rows)]

    def speed(self, count: int) -> float:
        """Of so many answers of each stream, over plain steps."""
        plain_s, begun_s = 0.0, self.now_s
        running: list[Sequence | None] = [None] * self.rows
        left = [count] * self.rows
        while any(left) or any(running):
            for row in range(self.rows):
                if running[row] is None and left[row]:
                    left[row] -= 1
                    plain_s += self._ask(row, running)
            decoding = [asked for asked in running if asked is not None]
            plain_s += self._decode(decoding)
            running = [None if asked is None or len(asked.output_ids) == LENGTH else asked for asked in running]
        return plain_s / (self.now_s - begun_s)

    def _ask(self, row: int, running: list[Sequence | None]) -> float:
        """A prompt, alone in its step. What it takes without guesses."""
        said = self.said[row] = self.answer(self.random, self.said[row])
        name = f"{row}" if self.session else ""
        prompt = [row, *(self.random.randrange(1000) for _ in range(PROMPT - 25)), *range(24)]
        asked = running[row] = sequence(prompt=prompt, session=name)
        asked.max_tokens = LENGTH
        started_s = self.now_s
        drafts = self.speculator.open(asked, 1 + sum(other is not None for other in running), PROMPT, 40)
        chunk = Chunk(asked, 0, PROMPT + len(drafts), True, drafts)
        prompt_s = PROMPT * TOKEN_S * self._noise()
        self.now_s += prompt_s + 0.075e-3 * len(drafts)
        saved_s = (self._say(asked, Drafts(drafts), said) - 1) * native(self.rows, self.rows) / self.rows
        load = Load(0, 0)
        load.prompt_tokens = chunk.count
        self.speculator.stepped(Plan(0, Room(None, load), [chunk]), self.now_s - started_s)
        return prompt_s + saved_s

    def _decode(self, decoding: list[Sequence]) -> float:
        """A step. What plain ones take for as many tokens."""
        if not decoding:
            return 0.0
        rows, started_s = len(decoding), self.now_s
        drafts = self.speculator.propose(decoding, 100)
        chunks = [
            Chunk(asked, asked.num_tokens - 1, 1 + len(own.token_ids), True, *own)
            for asked, own in zip(decoding, drafts, strict=True)
        ]
        tokens = sum(chunk.count for chunk in chunks)
        noise = self._noise()
        self.now_s += native(rows, tokens) * noise
        gained = 0
        for asked, own in zip(decoding, drafts, strict=True):
            gained += self._say(asked, own, self.said[int(asked.prompt_ids[0])]) - 1
        self.speculator.stepped(Plan(0, Room(None, Load(rows, tokens)), chunks), self.now_s - started_s)
        return (rows + gained) / rows * native(rows, rows) * 1.02

    def _say(self, asked: Sequence, drafts: Drafts, said: list[int]) -> int:
        """The next of what it says, and as much more as was guessed rightly; how many that are."""
        first = len(asked.output_ids)
        count = 1 + len(path(*drafts, said[first : LENGTH - 1]))
        tokens = said[first : first + count]
        asked.output_ids.extend(tokens)
        if asked.drafting is not None:
            self.speculator.verified(asked, drafts.token_ids, [SampledToken(token) for token in tokens], count)
        if len(asked.output_ids) == LENGTH:
            self.speculator.ended(asked)
        return count

    def _noise(self) -> float:
        return 1.0 + 0.02 * abs(self.random.gauss(0, 1))

    def _takes(self, owner: Any, name: str, work_s: float) -> None:
        work = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self.now_s += work_s
            return work(*args, **options)

        setattr(owner, name, timed)


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("dear", [1.0, DEAR])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("answer", [new, turns, worse], ids=lambda answer: answer.__name__)
def test_answers_that_come_and_go_never_cost_three_percent(
    answer: Answer, rows: int, dear: float, *, session: bool
) -> None:
    chat = Chat(rows, answer, session=session, dear=dear)
    assert chat.speed(150) > 0.97
    assert chat.speed(100) > 0.97


@pytest.mark.parametrize(("rows", "least"), [(1, 1.25), (4, 1.0)])
def test_answers_that_repeat_pay_all_the_same(rows: int, least: float) -> None:
    chat = Chat(rows, same, session=True)
    chat.speed(30)
    assert chat.speed(100) > least


def test_what_was_lost_on_short_answers_keeps_nobody_from_noticing_that_they_repeat() -> None:
    chat = Chat(1, worse, session=True, dear=DEAR)
    chat.speed(100)
    chat.answer = same
    chat.speed(60)
    assert chat.speed(100) > 1.0
