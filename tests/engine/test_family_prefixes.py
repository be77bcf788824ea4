"""A cached prefix may end anywhere, inside a picture too: whoever goes on from there says the same, on every family.

What is left of a cut picture needs its embeddings (and what DeepStack adds) from the middle on, and positions of three
axes that begin in the middle of its grid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from tiny_models import FAMILIES

from engine.core import Engine
from preprocess.wire import EngineRequest, TokenEvents
from tests.engine.family_parity import Checked, pixels_of, run

Load = Callable[[str], Checked]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads each family once, for all tests of this module."""
    return cache(lambda name: Checked(FAMILIES[name](tmp_path_factory.mktemp("family"))))


def _compute(engine: Engine, request: EngineRequest, num_tokens: int) -> None:
    """Leaves the first tokens of a prompt in the prefix cache, and nothing else."""
    engine.submit(request, pixels_of)
    while not engine.scheduler.running or engine.scheduler.running[0].num_computed < num_tokens:
        engine.step()
    assert engine.scheduler.running[0].num_computed == num_tokens
    engine.abort(request.request_id)
    engine.step()
    assert not engine.has_work


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_may_end_inside_a_picture(family: str, load: Load) -> None:
    checked = load(family)
    case = "pictures and clips" if checked.shows("pictures and clips") else "several pictures"
    request, expected = checked.expected(case)
    spans = [span for item in request.media for span in item.spans]
    cuts = sorted({start + part for start, length in spans for part in (1, length // 2)})
    for cut in cuts[:: len(cuts) // 8 + 1]:
        engine = checked.engine(chunk=cut, prefix_cache=True)
        _compute(engine, request, cut)
        engine.submit(request, pixels_of)
        finished = []
        answers: list[int] = []
        while engine.has_work:
            for message in engine.step():
                for event in message.events if isinstance(message, TokenEvents) else []:
                    answers.extend(event.token_ids)
                    finished.append(event.usage)
        assert answers == expected.ids, f"cut at {cut}"
        usage = finished[-1]
        assert usage is not None
        assert usage.cached_tokens == cut


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_goes_on_from_the_answer_before_it(family: str, load: Load) -> None:
    """Keys and values of an answer are found by the next turn, at the positions that it would give them itself."""
    checked = load(family)
    request, expected = checked.expected("picture before text")
    following = torch.tensor([60, 70, 80, 90])  # whatever comes after the answer
    prompt = torch.frombuffer(bytearray(request.prompt_ids), dtype=torch.int64)
    turn = EngineRequest(
        "next",
        torch.cat([prompt, torch.tensor(expected.ids), following]).numpy().tobytes(),
        request.media,
        request.sampling,
        request.text,
        0.0,
        positions=request.positions,
    )
    alone = checked.answer(turn)
    torch.testing.assert_close(alone.logits[:1], checked.reference_logits(turn, []), atol=1e-4, rtol=1e-5)

    engine = checked.engine(chunk=4096, prefix_cache=True)
    engine.submit(request, pixels_of)
    assert run(engine)[request.request_id] == expected.ids
    cached_before = engine.stats().prefix_hit_tokens
    engine.submit(turn, pixels_of)
    assert run(engine)["next"] == alone.ids
    assert engine.stats().prefix_hit_tokens - cached_before == request.num_prompt_tokens + len(expected.ids) - 1
