"""Where a device computes one step while the host makes the next: guesses are looked for meanwhile, and what that and
waiting for results may cost.

On a device in made-up time for which the host needs about as long as it takes, with guesses that are right as often as
a script says; a look takes the host some µs a row.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from typing import Final

import pytest

from engine.batch import SampledToken
from engine.sequence import Sequence
from engine.speculation.ahead import Ahead
from engine.speculation.beliefs import Beliefs
from engine.speculation.controller import Controller
from engine.speculation.drafting import Drafting, Proposal
from engine.speculation.lengths import Always, Lengths
from engine.speculation.replay import Replay
from tests.engine.timed_device import MS, QWEN3_VL_2B, TOLD, Server, Time, TimedRunner

SHORT: Final = dataclasses.replace(QWEN3_VL_2B, context_s=0.001 * MS)
LOOK_S: Final = 0.008 * MS
DRAFT_S: Final = 0.017 * MS
"""With 7 for each of 64 rows a step takes five times as long."""
TOKENS: Final = 600
FEW_TOKENS: Final = 96
END: Final = 7
"""A stop id."""


class Script(Replay):
    """Guesses that take time to find."""

    def __init__(self, time: Time, names: list[str], accuracy: float, tokens: int, seed: int) -> None:
        super().__init__({name: [TOLD] * tokens for name in names}, accuracy, TimedRunner.vocab_size, seed)
        self._time = time

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        self._time.now_s += LOOK_S
        return super().propose(sequence, drafting, limit)


class Random(TimedRunner):
    """Says anything: no source is right for long, though most find something to guess by."""

    def says(self, count: int) -> list[SampledToken]:
        """See `TimedRunner.says`."""
        return [SampledToken(self._random.randrange(self.vocab_size)) for _ in range(count)]


@dataclasses.dataclass
class Machine:
    """A device with its host, and what was learnt there; `waits` counts."""

    draft_s: float = DRAFT_S
    host: float = 1.0
    tokens: int = TOKENS
    controller: Lengths | None = None
    beliefs: Beliefs | None = None
    ahead: Ahead | None = None
    waits: int = 0

    def decode_s(self, rows: int, accuracy: float | None, seed: int = 0) -> float:
        """How long so many streams take. `accuracy`: of guesses; None: nobody guesses."""
        server = self._server(TimedRunner, accuracy is not None)
        names = [f"s{index}" for index in range(rows)]
        if accuracy is not None:
            server.engine.speculator.sources = [Script(server.time, names, accuracy, self.tokens, seed)]
        return self._run(server, names)

    def random_s(self, rows: int, *, guesses: bool) -> float:
        """The same of text that nobody knows, with the sources that there are."""
        return self._run(self._server(Random, guesses), [f"s{index}" for index in range(rows)])

    def _server(self, kind: type[TimedRunner], guesses: bool) -> Server:
        time = Time()
        runner = kind(SHORT, time, noise=0.01, draft_s=self.draft_s, max_drafts=15, host=self.host)
        runner.drafts_beside_prompts = True
        server = Server(runner, time, {"speculation": "auto" if guesses else "none"})  # type: ignore[dict-item]
        speculator = server.engine.speculator
        speculator.controller = self.controller or speculator.controller
        speculator.beliefs = self.beliefs or speculator.beliefs
        speculator.ahead = self.ahead or speculator.ahead
        is_due = speculator.is_due

        def counted(running: list[Sequence]) -> bool:
            due = is_due(running)
            self.waits += due
            return due

        speculator.is_due = counted  # type: ignore[method-assign, assignment]
        return server

    def _run(self, server: Server, names: list[str]) -> float:
        for name in names:
            server.send(name, self.tokens, text=60)
        server.run_until()
        return max(seen.events_s[-1] for seen in server.seen.values()) - server.seen[names[0]].events_s[0]


def decode_s(rows: int, accuracy: float | None, controller: Lengths | None = None, draft_s: float = DRAFT_S) -> float:
    """On a new machine, of which `controller` may know something."""
    return Machine(draft_s, controller=controller).decode_s(rows, accuracy)


@cache
def plain_decode_s(rows: int, host: float = 1.0, tokens: int = TOKENS) -> float:
    """How long they take where nobody guesses: the same every time, for time is made up."""
    return Machine(host=host, tokens=tokens).decode_s(rows, None)


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.8, 1.0])
def test_where_checks_are_dear_next_to_nothing_is_lost(rows: int, accuracy: float) -> None:
    """Once it is known what they cost; and what was gained while it was not may be lost again."""
    plain_s = plain_decode_s(rows)
    controller = Controller(waits=True)
    decode_s(rows, accuracy, controller)
    taken = [decode_s(rows, accuracy, controller) / plain_s for _ in range(3)]
    assert max(taken) < 1.03
    if accuracy < 1.0:
        assert sum(taken) < 3 * 1.013


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_where_checks_are_cheap_they_gain(rows: int) -> None:
    plain_s = plain_decode_s(rows)
    assert decode_s(rows, 0.0) < 1.03 * plain_s
    assert decode_s(rows, 0.8) < 0.8 * plain_s
    assert decode_s(rows, 1.0) < 0.4 * plain_s


def test_where_no_check_can_pay_nothing_is_waited_for() -> None:
    """However often guesses are right."""
    plain_s = plain_decode_s(64)
    machine = Machine(0.05 * MS, controller=Controller(waits=True))  # a draft costs more than a token of 64 rows
    for accuracy in (1.0, 0.0):
        machine.decode_s(64, accuracy)
    machine.waits = 0
    for accuracy in (0.0, 0.5, 0.8, 1.0):
        assert machine.decode_s(64, accuracy) < 1.01 * plain_s
    assert machine.waits == 0


@pytest.mark.parametrize("host", [1.0, 2.6])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_where_nothing_is_right_hardly_anything_is_lost_from_the_first_answer_on(rows: int, host: float) -> None:
    """Looks take half a millisecond with 64 rows, which the slow host has not to spare."""
    plain_s = plain_decode_s(rows, host)
    assert Machine(host=host).decode_s(rows, 0.0) < 1.005 * plain_s


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_text_that_nobody_knows_costs_next_to_nothing(rows: int) -> None:
    plain_s = Machine().random_s(rows, guesses=False)
    machine = Machine(controller=Controller(waits=True))
    taken = [machine.random_s(rows, guesses=True) / plain_s for _ in range(4)]
    assert max(taken) < 1.03
    assert sum(taken) < 4 * 1.01


@pytest.mark.parametrize("host", [1.0, 1.9, 2.6])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("accuracy", [0.5, 0.8, 1.0])
def test_in_short_answers_most_is_gained_that_checking_always_would_gain(
    accuracy: float, rows: int, host: float
) -> None:
    """Once it is known what checks cost, in answers of which each must be decided anew."""
    machine = Machine(host=host, tokens=FEW_TOKENS)
    plain_s = plain_decode_s(rows, host, FEW_TOKENS)
    always = dataclasses.replace(machine, controller=Always(7))
    most_s = sum(always.decode_s(rows, accuracy, seed) for seed in range(6))
    machine.controller, machine.beliefs = Controller(waits=True), Beliefs()
    for seed in range(3):
        machine.decode_s(rows, accuracy, 100 + seed)
    taken_s = sum(machine.decode_s(rows, accuracy, seed) for seed in range(6))
    if most_s < 0.9 * 6 * plain_s:
        assert taken_s < 1.2 * most_s
    assert taken_s < 1.03 * 6 * plain_s


def test_guesses_that_become_right_are_noticed_at_once() -> None:
    """Although none was for long, and none was checked."""
    machine = Machine(controller=Controller(waits=True), beliefs=Beliefs())
    for accuracy in (1.0, 0.0, 0.0):
        machine.decode_s(4, accuracy)
    machine.waits, machine.tokens = 0, FEW_TOKENS
    plain_s = machine.decode_s(4, None)
    assert machine.decode_s(4, 1.0) < 0.9 * plain_s
    assert machine.decode_s(4, 1.0) < 0.4 * plain_s
    assert machine.waits > 0


def test_while_guesses_are_checked_answers_that_begin_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However dear looks are: else short answers would be over before one is saved for."""
    monkeypatch.setattr(sys.modules[__name__], "LOOK_S", 0.05 * MS)
    machine = Machine(host=2.6, tokens=FEW_TOKENS)
    plain_s = machine.decode_s(16, None)
    machine.controller, machine.beliefs, machine.ahead = Controller(waits=True), Beliefs(), Ahead()
    for seed in range(4):
        machine.decode_s(16, 1.0, seed)
    assert sum(machine.decode_s(16, 1.0, 10 + seed) for seed in range(4)) < 0.4 * 4 * plain_s
    for seed in range(4):
        machine.decode_s(16, 0.0, seed)
    assert sum(machine.decode_s(16, 0.0, 10 + seed) for seed in range(4)) < 1.01 * 4 * plain_s


class Ends(TimedRunner):
    """Ends all answers at once, now and then."""

    def says(self, count: int) -> list[SampledToken]:
        """See `TimedRunner.says`."""
        return [SampledToken(END if self._random.random() < 0.2 else TOLD)] * count


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("is_hindered", [False, True])
def test_whatever_comes_of_a_wait_it_counts_once(rows: int, is_hindered: bool) -> None:
    """Even where the results end whoever decodes, or others decode on and may have no drafts any longer."""
    time, counts = Time(), {"waits": 0, "found": 0, "in vain": 0}
    server = Server(Ends(SHORT, time, max_drafts=15), time, {"speculation": "auto"})  # type: ignore[dict-item]
    names = [f"s{index}" for index in range(60)]
    speculator = server.engine.speculator
    speculator.sources, speculator.controller = [Script(time, names, 0.9, TOKENS, 1)], Always(3)
    is_due, waited = speculator.is_due, speculator.ahead.waited
    scheduler = server.engine.scheduler
    are_alone, is_hindering = scheduler._are_alone, False

    def alone(decoding: list[Sequence]) -> bool:
        return are_alone(decoding) and not is_hindering

    def counted(running: list[Sequence]) -> bool:
        nonlocal is_hindering
        assert counts["found"] + counts["in vain"] == counts["waits"], "what came of the last one is known by now"
        due = is_due(running)
        counts["waits"] += due
        is_hindering = is_hindered and due and counts["waits"] % 3 == 0
        return due

    def scheduled() -> None:
        nonlocal is_hindering
        close()
        assert counts["found"] + counts["in vain"] == counts["waits"]
        is_hindering = False

    def learnt(*, found: bool) -> None:
        counts["found" if found else "in vain"] += 1
        waited(found=found)

    speculator.is_due = counted  # type: ignore[method-assign, assignment]
    speculator.ahead.waited = learnt  # type: ignore[method-assign]
    close, speculator.scheduled = speculator.scheduled, scheduled  # type: ignore[method-assign]
    scheduler._are_alone = alone  # type: ignore[method-assign, assignment]
    for name in names:
        server.send(name, TOKENS, text=60, stop_id=END)
        if len(server.seen) % rows == 0:
            server.run_until()
    assert counts["found"] + counts["in vain"] == counts["waits"]
    assert counts["found"] > 0
    assert counts["in vain"] > 0


# ---- when to look, when to wait -------------------------------------------------------------------------------------


def looks(ahead: Ahead, spare_s: float, look_s: float, steps: int = 1000, judge_s: float = 0.0) -> int:
    """Of so many steps of a millisecond, before how many there was a look. The host waits for `spare_s` without. What a
    look guessed is judged once the step behind it has its results, before the next wait.
    """
    count, behind_s = 0, 0.0
    for _ in range(steps):
        owed_s, behind_s = behind_s, 0.0
        if ahead.may_look():
            ahead.looked(look_s)
            owed_s, behind_s, count = owed_s + look_s, judge_s, count + 1
        if behind_s:
            ahead.judged(behind_s)
        ahead.stepped(1e-3 + max(owed_s - spare_s, 0.0), max(spare_s - owed_s, 0.0))
    return count


def test_a_look_is_made_before_each_step_while_the_host_waits_for_the_device_anyway() -> None:
    assert looks(Ahead(), spare_s=3e-4, look_s=1e-4) > 990
    assert looks(Ahead(), spare_s=3e-4, look_s=1e-4, judge_s=1.5e-4) > 950


@pytest.mark.parametrize("spare_s", [0.0, 5e-5])
def test_a_host_that_has_no_time_to_spare_takes_a_fraction_of_it_for_looks(spare_s: float) -> None:
    count = looks(Ahead(), spare_s, look_s=1e-4)
    assert 0 < count * (1e-4 - spare_s) < 0.006 * 1000 * 1e-3


@pytest.mark.parametrize(("look_s", "judge_s"), [(1e-4, 0.0), (2e-3, 0.0), (5e-4, 1.5e-3)])
def test_however_dear_looks_are_they_take_no_more_of_it(look_s: float, judge_s: float) -> None:
    """Over many answers, and with what it takes to see whether they were right."""
    ahead = Ahead()
    looks(ahead, 0.0, look_s, steps=1000, judge_s=judge_s)  # the first ones are made to learn
    count = looks(ahead, 0.0, look_s, steps=20_000, judge_s=judge_s)
    assert 0.001 < count * (look_s + judge_s) / (20_000 * 1e-3) < 0.004


def test_a_few_looks_are_made_early_however_dear_they_are() -> None:
    """A source that is always right would else be found out minutes later."""
    assert 8 <= looks(Ahead(), 0.0, look_s=0.01, steps=400) <= 12


def test_a_look_that_a_busy_machine_made_dear_keeps_nobody_from_looking() -> None:
    ahead = Ahead()
    looks(ahead, spare_s=3e-4, look_s=1e-4)
    ahead.looked(1.0)
    assert looks(ahead, spare_s=3e-4, look_s=1e-4, steps=200) > 100


def test_a_first_look_that_a_busy_machine_made_dear_keeps_nobody_from_looking_for_long() -> None:
    ahead = Ahead()
    ahead.looked(0.1)
    looks(ahead, spare_s=0.0, look_s=1e-5, steps=1000)
    assert looks(ahead, spare_s=0.0, look_s=1e-5, steps=200) > 20


def test_an_answer_that_may_repeat_another_is_looked_at_at_once() -> None:
    ahead = Ahead()
    looks(ahead, spare_s=0.0, look_s=1e-3)
    assert not ahead.may_look()
    ahead.expect()
    assert ahead.may_look()


def test_promises_that_waits_do_not_find_are_believed_less_and_later_again() -> None:
    ahead = Ahead()
    assert ahead.is_worth(1.5, waiting=0.5)
    assert not ahead.is_worth(1.0, waiting=0.0)
    for _ in range(20):
        ahead.waited(found=False)
    assert not ahead.is_worth(1.5, waiting=0.5)
    assert ahead.is_worth(20.0, waiting=0.5)
    for _ in range(2000):
        ahead.stepped(1e-3, 1e-4)
    assert ahead.is_worth(1.5, waiting=0.5)


def test_a_model_is_asked_ever_more_rarely_where_it_guesses_nothing() -> None:
    ahead, asked = Ahead(), 0
    for _ in range(1000):
        if ahead.may_ask():
            asked += 1
            ahead.waited(found=False)
        ahead.stepped(1e-3, 1e-4)
    assert 1000 / 64 < asked < 30
    ahead.waited(found=True)
    assert ahead.may_ask()
