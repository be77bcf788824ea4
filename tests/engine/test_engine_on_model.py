"""The equality matrix on a real (tiny, random, float32) model: same tokens cached or not, chunked, batched, retracted.

The greedy and the sampled answers of all requests are compared with those of each alone, in one chunk, without a cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch import Runner
from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_runner
from preprocess.wire import EngineRequest, MediaItem, Pixels, SamplingParams, TextOptions, TokenEvents
from tests.engine.driving import PLACEHOLDER

TEXT = [(17 * index) % 400 + 30 for index in range(24)]


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> Runner:
    return load_runner(EngineConfig(str(tiny_model), dtype="float32", threads=1, kv_tokens=900, max_running=6))


def pixels_of(runner: Runner, content: int) -> torch.Tensor:
    side = runner.encoder.image_size  # type: ignore[attr-defined]
    return torch.randint(
        0, 256, (1, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(content)
    )


def load(pixels: Pixels) -> torch.Tensor:
    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)


def requests_for(runner: Runner) -> list[EngineRequest]:
    """Text, one picture, several, swapped, the same at another place; half of them greedy."""
    requests = []
    for index, layout in enumerate([[], [(1, 3)], [(2, 3)], [(1, 3), (2, 5)], [(2, 3), (1, 5)], [(1, 5)], [(1, 3)]]):
        prompt: list[int] = []
        media: list[MediaItem] = []
        for content, gap in layout:
            pixels = pixels_of(runner, content)
            count = runner.encode([pixels])[0].shape[0]
            prompt.extend(TEXT[:gap])
            side = pixels.shape[1]
            inline = Pixels((1, side, side, 3), inline=pixels.numpy().tobytes())
            media.append(MediaItem(bytes([content]) * 32, inline, [(len(prompt), count)]))
            prompt.extend([PLACEHOLDER] * count)
        prompt.extend(TEXT)
        sampling = SamplingParams(max_tokens=10, temperature=float(index % 2), seed=index)
        ids = torch.tensor(prompt, dtype=torch.int64).numpy().tobytes()
        requests.append(EngineRequest(f"r{index}", ids, media, sampling, TextOptions(), 0.0))
    return requests


def answers(engine: Engine, *, retract_every: int = 0) -> dict[str, list[int]]:
    """Run to the end; retract the youngest every few steps."""
    outputs: dict[str, list[int]] = {}
    steps = 0
    while engine.has_work:
        steps += 1
        running = [sequence for sequence in engine.scheduler.running if sequence.num_retracted < 2]
        if retract_every and running and steps % retract_every == 0:
            engine.scheduler.retract(running[-1])
        for message in engine.step():
            for event in message.events if isinstance(message, TokenEvents) else []:
                outputs.setdefault(event.request_id, []).extend(event.token_ids)
                assert event.error is None
    return outputs


@pytest.fixture(scope="module")
def alone(runner: Runner) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    for wanted in requests_for(runner):
        engine = Engine(EngineConfig("", max_batched_tokens=512, prefix_cache=False, check=True), runner)
        engine.submit(wanted, load)
        outputs |= answers(engine)
    return outputs


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("chunk", [7, 33, 512])
@pytest.mark.parametrize("retract_every", [0, 5], ids=["straight", "retracted"])
def test_batched_answers_equal_those_alone(
    runner: Runner, alone: dict[str, list[int]], prefix_cache: bool, chunk: int, retract_every: int
) -> None:
    config = EngineConfig("", max_batched_tokens=chunk, prefix_cache=prefix_cache, check=True, max_running=6)
    engine = Engine(config, runner)
    for wanted in requests_for(runner):
        engine.submit(wanted, load)
    assert answers(engine, retract_every=retract_every) == alone
    assert bool(retract_every) == bool(engine.stats().num_retracted)
    if prefix_cache:
        for wanted in requests_for(runner):
            engine.submit(wanted, load)
        hits = engine.stats().prefix_hit_tokens
        assert answers(engine) == alone
        assert engine.stats().prefix_hit_tokens - hits > 50, "the second time most is cached"


def test_answers_differ_from_each_other(alone: dict[str, list[int]]) -> None:
    assert len({tuple(ids) for ids in alone.values()}) >= len(alone) - 1
