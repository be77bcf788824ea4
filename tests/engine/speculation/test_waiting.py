"""Where a device computes one step while the host makes the next: what waiting to look for guesses may cost, and that
guesses are found all the same.

On a device in made-up time for which the host needs about as long as it takes, with guesses that are right as often as
a script says; a look takes the host some µs a row.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Final

import pytest

from engine.sequence import Sequence
from engine.speculation.controller import LONG_REST, Controller
from engine.speculation.drafting import Drafting, Proposal
from engine.speculation.lengths import Lengths
from engine.speculation.replay import Replay
from tests.engine.timed_device import MS, QWEN3_VL_2B, TOLD, Server, Time, TimedRunner

SHORT: Final = dataclasses.replace(QWEN3_VL_2B, context_s=0.001 * MS)
LOOK_S: Final = 0.008 * MS
DRAFT_S: Final = 0.017 * MS
"""With 7 for each of 64 rows a step takes five times as long."""
TOKENS: Final = 600


class Script(Replay):
    """Guesses that take time to find."""

    def __init__(self, time: Time, names: list[str], accuracy: float) -> None:
        super().__init__({name: [TOLD] * TOKENS for name in names}, accuracy, TimedRunner.vocab_size)
        self._time = time

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        self._time.now_s += LOOK_S
        return super().propose(sequence, drafting, limit)


def decode_s(rows: int, accuracy: float | None, controller: Lengths | None = None, draft_s: float = DRAFT_S) -> float:
    """How long so many streams take. `accuracy`: of guesses; None: nobody guesses."""
    time = Time()
    runner = TimedRunner(SHORT, time, noise=0.01, draft_s=draft_s, max_drafts=15)
    runner.drafts_beside_prompts = True
    mode = "none" if accuracy is None else "auto"
    server = Server(runner, time, {"speculation": mode})  # type: ignore[dict-item]
    names = [f"s{index}" for index in range(rows)]
    if accuracy is not None:
        server.engine.speculator.sources = [Script(time, names, accuracy)]
        if controller is not None:
            server.engine.speculator.controller = controller
    for name in names:
        server.send(name, TOKENS, text=60)
    server.run_until()
    return max(seen.events_s[-1] for seen in server.seen.values()) - server.seen[names[0]].events_s[0]


@cache
def plain_decode_s(rows: int) -> float:
    """How long they take where nobody guesses: the same every time, for time is made up."""
    return decode_s(rows, None)


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


def test_where_no_check_can_pay_waits_are_rare() -> None:
    """However often guesses are right."""
    plain_s = plain_decode_s(64)
    controller = Controller(waits=True)
    dear_s = 0.05 * MS  # more than a token of 64 rows
    for accuracy in (1.0, 0.0):
        decode_s(64, accuracy, controller, dear_s)
    for accuracy in (0.0, 0.5, 0.8, 1.0):
        assert decode_s(64, accuracy, controller, dear_s) < 1.01 * plain_s
    assert controller.rest(64) == LONG_REST
    assert controller.rest(1) < LONG_REST
