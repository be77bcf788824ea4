"""What each source guesses, and that what it keeps stays small."""

from __future__ import annotations

import random
from collections.abc import Sequence as Ordered
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import SampledToken
from engine.scheduler import Chunk, Plan
from engine.sequence import Clock, Sequence
from engine.speculation import continuations, echo, habit
from engine.speculation.acceptance import Acceptance
from engine.speculation.continuations import BREAK, Continuations
from engine.speculation.controller import Controller
from engine.speculation.drafting import Drafting, Kind, Proposal, Source
from engine.speculation.echo import Echo
from engine.speculation.habit import Habit
from engine.speculation.lengths import Always
from engine.speculation.ngram import NGrams
from engine.speculation.replay import Replay
from engine.speculation.speculator import Speculator
from engine.speculation.verify import standing
from engine.step_budget import Room
from engine.step_costs import Load
from preprocess.wire import EngineRequest, Pixels, SamplingParams, TextOptions


def sequence(
    output: Ordered[int] = (),
    *,
    prompt: Ordered[int] = (1, 2, 3),
    pictures: Ordered[int] = (),
    session: str = "",
    grammar: str = "",
) -> Sequence:
    """A sequence that has said `output`; positions in `pictures` hold vision tokens."""
    ids = np.array(prompt, dtype=np.int64)
    keys = ids.copy()
    keys[list(pictures)] += 1 << 40
    params = SamplingParams(max_tokens=1000, grammar=grammar)
    request = EngineRequest("r", ids.tobytes(), [], params, TextOptions(), 0.0, session_id=session)
    made = Sequence(request, 0, ids, keys, [], no_pixels, 1000, Clock(0.0))
    made.output_ids = list(output)
    return made


def no_pixels(pixels: Pixels) -> torch.Tensor:
    raise AssertionError("no pictures here")


def say(source: Source, answer: Ordered[int], **options: Any) -> list[tuple[Kind, list[int]] | None]:
    """What is guessed before each token but the first of an answer, which then ends."""
    asked, drafting, guesses = sequence(**options), Drafting(), []
    asked.drafting = drafting
    for token_id in answer:
        asked.output_ids.append(token_id)
        proposal = source.propose(asked, drafting, 15)
        guesses.append(None if proposal is None else (proposal.kind, list(proposal.token_ids)))
    source.ended(asked)
    return guesses


# ---- verifying -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=6), st.data())
def test_what_stands_is_the_right_prefix_and_one_token_more(drafts: list[int], data: st.DataObject) -> None:
    sampled = [SampledToken(data.draw(st.integers(0, 3))) for _ in range(len(drafts) + 1)]
    kept = standing(drafts, sampled)
    assert kept == sampled[: len(kept)]
    assert [token.token_id for token in kept[:-1]] == drafts[: len(kept) - 1]
    assert len(kept) == len(sampled) or sampled[len(kept) - 1].token_id != drafts[len(kept) - 1]


# ---- n-grams ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_match_is_where_the_same_tokens_stood_before(ids: list[int]) -> None:
    known = Continuations()
    known.extend(ids)
    match = known.find(known.ids)
    earlier = [at for at in range(2, len(ids)) if ids[at - 2 : at] == ids[-2:]]
    assert (match is None) == (not earlier)
    if match is not None:
        assert match.at in earlier[-2:]
        assert ids[match.at - match.length : match.at] == ids[len(ids) - match.length :]


def test_a_copy_goes_on_with_itself_and_stops_at_breaks() -> None:
    known = Continuations()
    known.extend([7, 8, 9, BREAK, 5, 6])
    assert known.read(0, 10) == [7, 8, 9]
    assert known.read(4, 5) == [5, 6, 5, 6, 5]


def test_ngrams_quote_prompt_and_answer_but_no_picture() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 50, 50, 50, 7, 8]
    guessed = say(NGrams(), [2, 3, 9, 2, 3, 9, 2], prompt=prompt, pictures=[6, 7, 8])
    assert guessed[0] is None  # 8 2 never stood there
    assert guessed[1] == (Kind.NGRAM_SHORT, [4, 5, 6])  # to the picture
    assert guessed[4] is not None
    assert guessed[4][1][:2] == [9, 2]
    assert guessed[6] is not None
    assert guessed[6][0] is Kind.NGRAM_LONG
    assert guessed[6][1][:4] == [3, 9, 2, 3]


def test_a_long_text_is_forgotten_by_halves() -> None:
    known = Continuations()
    generator = random.Random(0)
    for _ in range(40):
        known.extend(generator.randrange(400) for _ in range(1000))
        assert len(known.ids) <= continuations.MAX_TOKENS
        for match in known.find_all(known.ids):
            assert known.ids[match.at - match.length : match.at] == known.ids[-match.length :]


# ---- echo ------------------------------------------------------------------------------------------------------------

ANSWER = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def test_a_session_that_says_the_same_again_is_guessed_to_the_end() -> None:
    source = Echo()
    assert say(source, ANSWER, session="a") == [None] * 10
    again = say(source, ANSWER, session="a")
    assert again[:9] == [(Kind.ECHO, ANSWER[index + 1 :]) for index in range(9)]
    assert again[9] is None
    assert say(source, ANSWER, session="b") == [None] * 10
    assert say(source, ANSWER) == [None] * 10


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ([10, 11, 99, 13], ANSWER[4:]),  # another word
        ([10, 11, 14], ANSWER[5:]),  # two words left out
        ([10, 11, 90, 91, 92, 15, 16], ANSWER[7:]),  # a piece put in: found again by what follows
    ],
)
def test_a_change_is_stepped_over(changed: list[int], found: list[int]) -> None:
    source = Echo()
    say(source, ANSWER, session="a")
    last = say(source, changed, session="a")[-1]
    assert last is not None
    assert last[1] == found


def test_an_answer_that_follows_another_one_is_believed_anew() -> None:
    """What came of guesses from one earlier answer says nothing of those from another."""
    source, other = Echo(), [10, 11, 30, 31, 32, 33, 34, 35]
    for answer in (other, ANSWER):
        say(source, answer, session="a")
    asked, drafting = sequence(session="a"), Drafting()
    asked.drafting = drafting
    drafting.acceptance[Kind.ECHO] = Acceptance(24)
    for index, token_id in enumerate(other[:6]):
        asked.output_ids.append(token_id)
        proposal = source.propose(asked, drafting, 15)
        assert (Kind.ECHO in drafting.acceptance) == (index < 2)
    assert proposal == Proposal(Kind.ECHO, other[6:])


def test_by_shape_alone_guesses_end_where_answers_have_differed() -> None:
    source = Echo()
    for title in (50, 60):
        say(source, [1, 2, 3, title, 4, 5, 6, title + 1, 7], grammar="form")
    assert [guess and guess[1] for guess in say(source, [1, 2, 3, 70, 4, 5, 6], grammar="form")] == [
        [2, 3],
        [3],
        [60],  # one may be tried where all before it was right
        [4, 5, 6],
        [5, 6],
        [6],
        [61],
    ]
    say(source, [1, 2, 3, 50, 4], session="a", prompt=[9, 9, 9])
    say(source, [1, 2, 3, 60, 4], session="a", prompt=[9, 9, 9])
    guessed = say(source, [1], session="a", prompt=[9, 9, 9])[0]
    assert guessed is not None
    assert guessed[1] == [2, 3, 60, 4], "where the same question was answered, all of it may be said again"


def test_an_answer_that_goes_elsewhere_is_left_alone() -> None:
    source = Echo()
    say(source, ANSWER, session="a")
    guesses = say(source, [10, 90, 91, 92, 93, 94, 95, 96], session="a")
    assert guesses[0] is not None
    assert guesses[1] is not None
    assert guesses[1][0] is Kind.ECHO_ASTRAY
    assert guesses[-1] is None


def test_of_several_answers_the_one_to_the_same_question_comes_first() -> None:
    source = Echo()
    other = [10, 20, 21, 22]
    say(source, ANSWER, session="a", prompt=[1, 1, 1])
    say(source, other, session="a", prompt=[2, 2, 2])
    first = [say(source, [10], session="a", prompt=[question] * 3)[0] for question in (1, 2, 3)]
    assert [guess and guess[1][0] for guess in first[:2]] == [11, 20]


def test_only_the_same_question_in_the_same_session_is_taken_for_repeated_at_once() -> None:
    for session, question, expected in (("a", 1, Kind.ECHO), ("a", 2, Kind.ECHO_ASTRAY), ("", 1, Kind.ECHO_ASTRAY)):
        source = Echo()
        say(source, ANSWER, session=session, prompt=[1, 1, 1], grammar="one")
        guesses = say(source, ANSWER, session=session, prompt=[question] * 3, grammar="one")
        kinds = [guess[0] for guess in guesses if guess is not None]
        assert kinds == [expected] * 2 + [Kind.ECHO] * 7, "until it has repeated for a while"


def test_answers_without_a_session_are_shared_by_grammar_only() -> None:
    source = Echo()
    say(source, ANSWER, grammar="one")
    assert say(source, ANSWER, grammar="one")[0] is not None
    assert say(source, ANSWER, grammar="two")[0] is None


def test_sessions_and_answers_are_few_and_short() -> None:
    source = Echo()
    for number in range(2 * echo.MAX_SESSIONS):
        say(source, ANSWER, session=f"s{number}")
        say(source, [1, 2, 3], session="kept")  # used again and again
        assert len(source) <= echo.MAX_SESSIONS
    assert say(source, ANSWER, session="s0")[0] is None
    assert say(source, [1, 2, 3], session="kept")[0] is not None
    source = Echo()
    for number in range(20):
        source.ended(sequence([number] * 5000, session="a"))
    (kept,) = source._sessions.values()
    assert len(kept.answers) == echo.MAX_ANSWERS
    assert len(kept.agreed) == echo.MAX_AGREED
    assert all(len(answer.token_ids) <= echo.MAX_TOKENS for answer in kept.answers)


# ---- habit -----------------------------------------------------------------------------------------------------------


def test_what_followed_twice_is_guessed_the_third_time() -> None:
    source = Habit()
    assert say(source, ANSWER) == say(source, ANSWER) == [None] * 10
    third = say(source, ANSWER)
    assert all(guess is not None and guess[1][0] == ANSWER[index + 1] for index, guess in enumerate(third[:9]))
    assert max(len(guess[1]) for guess in third if guess) > 2


def test_what_follows_by_chance_is_not_guessed() -> None:
    source, generator = Habit(), random.Random(0)
    for _ in range(50):
        say(source, [generator.randrange(30) for _ in range(30)])
    guesses = say(source, [generator.randrange(30) for _ in range(200)])
    assert sum(guess is not None for guess in guesses) < 60


def test_habits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(habit, "MAX_CONTEXTS", 100)
    source, generator = Habit(), random.Random(0)
    for _ in range(50):
        say(source, [generator.randrange(1000) for _ in range(30)])
        assert len(source) <= 200


# ---- all together ----------------------------------------------------------------------------------------------------


class Slow:
    """Finds nothing, and takes its time."""

    name = "ngram"

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> None:
        self.clock[0] += 5e-3

    def ended(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class Counting:
    """Guesses that numbers go on."""

    name = "replay"

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal:
        first = sequence.output_ids[-1] + 1
        return Proposal(Kind.REPLAY, [first + index for index in range(limit)])

    def ended(self, sequence: Sequence) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_follows_a_right_chain_tells_of_the_guess_that_was_not_checked(*, goes_on: bool) -> None:
    """Else chains of one would be all that is ever known, where longer ones do not pay by what is believed at first."""
    speculator = Speculator("auto", 15, 1000)
    speculator.sources = [Counting()]
    speculator.controller = Always(1)
    asked = sequence([1])
    for _ in range(20):
        (drafts,) = speculator.propose([asked], 100)
        (guess,) = drafts.token_ids
        said = [guess, guess + 1 if goes_on else 5]
        asked.output_ids.extend(said)
        speculator.verified(asked, drafts.token_ids, [SampledToken(token) for token in said], 2)
    asked.drafting = Drafting()
    candidate = speculator._asked(asked)
    assert candidate is not None
    assert candidate.rates.first > 0.8
    assert (candidate.rates.later > 0.8) if goes_on else (candidate.rates.later < 0.2)


@pytest.mark.parametrize("goes_on", [True, False])
def test_later_guesses_are_judged_though_nothing_is_checked(*, goes_on: bool) -> None:
    """Of one proposal at a time. Else what chains promise would hang on what is believed at first."""
    speculator = Speculator("auto", 15, 10_000)
    speculator.sources = [Counting()]
    asked = sequence([1])
    asked.drafting = Drafting()
    for step in range(60):
        assert speculator._asked(asked) is not None
        said = asked.output_ids[-1] + (1 if goes_on or step % 2 else 50)
        asked.output_ids.append(said)
        speculator.verified(asked, (), [SampledToken(said)], 1)
    candidate = speculator._asked(asked)
    assert candidate is not None
    assert (candidate.rates.first > 0.8) if goes_on else (0.4 < candidate.rates.first < 0.6)
    assert (candidate.rates.later > 0.8) if goes_on else (candidate.rates.later < 0.2)


class Looking(Controller):
    """Before every step."""

    def may_draft(self, rows: int, *, is_expected: bool) -> bool:
        return True


def test_looking_is_no_part_of_what_steps_take() -> None:
    """Else plain steps would seem as slow as looking makes them, and drafting to pay that does not."""
    clock = [0.0]
    speculator = Speculator("auto", 15, 100, clock=lambda: clock[0])
    speculator.sources = [Slow(clock)]
    controller = speculator.controller = Looking()
    asked = sequence([5, 6, 7])
    for length in range(64):
        started_s = clock[0]
        speculator.propose([asked], 100)
        clock[0] += 1e-3
        plan = Plan(0, Room(None, Load(1, 1)), [Chunk(asked, length, 1, True)])
        speculator.stepped(plan, clock[0] - started_s)
    assert controller.times.plain_s(1) == pytest.approx(1e-3)


def test_guesses_end_before_max_tokens_and_at_ids_that_cannot_be_said() -> None:
    speculator = Speculator("auto", 15, 100)
    speculator.sources = [Replay({"r": [5, 6, 7, 8, 200, 9]}, 1.0, 100)]
    asked = sequence([5])
    asked.drafting = Drafting()
    candidate = speculator._asked(asked)
    assert candidate is not None
    assert candidate.length == 3
    asked.max_tokens = 3
    candidate = speculator._asked(asked)
    assert candidate is not None
    assert candidate.length == 1
    asked.max_tokens = 2
    assert speculator._asked(asked) is None


@pytest.mark.parametrize("mode", ["none", "auto"])
def test_a_runner_that_cannot_verify_is_sent_no_drafts(mode: Any) -> None:
    assert not Speculator(mode, 0, 100).is_on
    assert Speculator(mode, 15, 100).is_on == (mode == "auto")


def test_a_script_is_right_as_often_as_it_says() -> None:
    answer = list(range(1000))
    source = Replay({"r": answer}, 0.8, 1000)
    right = 0
    for index in range(0, 990, 10):
        proposal = source.propose(sequence(answer[: index + 1]), Drafting(), 9)
        assert proposal is not None
        right += sum(a == b for a, b in zip(proposal.token_ids, answer[index + 1 :], strict=False))
    assert 0.75 < right / 891 < 0.85
