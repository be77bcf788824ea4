"""Drafts change nothing on any family: chats of text, pictures and clips say what transformers says, whatever part of
it is guessed, on runners that tell their results at once and on those that are a step late.

Guesses stand at the positions of three axes that the answer has, and layers that add to vision tokens must not meet
them. Good drafts, bad ones and right ones in the middle of a retraction: a script knows the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from tiny_models import FAMILIES

from engine.config import EngineConfig
from engine.core import Engine
from engine.speculation.controller import Always
from engine.speculation.replay import Replay
from tests.engine.family_parity import CASES, Checked, pixels_of, run
from tests.engine.late_results import Late

Load = Callable[[str], Checked]


def retract(engine: Engine) -> None:
    """Now and then somebody who has begun to answer, and not too often."""
    for sequence in engine.scheduler.running:
        if sequence.num_retracted < 2 and len(sequence.output_ids) > 1 + 4 * sequence.num_retracted:
            engine.scheduler.retract(sequence)
            return


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads each family once, for all tests of this module."""
    return cache(lambda name: Checked(FAMILIES[name](tmp_path_factory.mktemp("family"))))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "a-step-late"])
@pytest.mark.parametrize("retracts", [False, True], ids=["straight", "retracted"])
def test_answers_are_those_without_drafts(family: str, late: bool, retracts: bool, load: Load) -> None:
    checked = load(family)
    cases = [case for case in CASES if checked.shows(case) and case != "picture after long text"]
    expected = {case: checked.expected(case)[1].ids for case in cases}
    for prefix_cache, chunk, length, accuracy in ((True, 24, 3, 0.7), (False, 4096, 9, 0.9)):
        runner = Late(checked.runner) if late else checked.runner
        config = EngineConfig("", max_batched_tokens=chunk, prefix_cache=prefix_cache, check=True, max_running=8)
        engine = Engine(config, runner)
        engine.speculator.controller = Always(length)
        engine.speculator.sources = [Replay(expected, accuracy, checked.runner.vocab_size)]
        for case in cases:
            engine.submit(checked.expected(case)[0], pixels_of)
        assert run(engine, watch=retract if retracts else None) == expected
        assert engine.speculator.accepted["replay"] > 2 * len(cases)
        assert engine.speculator.drafted["replay"] > engine.speculator.accepted["replay"]
        assert bool(engine.stats().num_retracted) == retracts
        if late:
            assert runner.results.num_launches > 0
