"""Every encoder, cut between any two layers, gives what it gives as a whole, to the last bit (float32)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES

from engine.config import EngineConfig
from engine.load import load_runner
from engine.runner import TorchRunner
from preprocess.vision.slices import SlicedEncoding

Load = Callable[[str], TorchRunner]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads each family once."""

    @cache
    def loaded(name: str) -> TorchRunner:
        folder: Path = FAMILIES[name](tmp_path_factory.mktemp("family"))
        runner = load_runner(EngineConfig(str(folder), dtype="float32", threads=1, kv_tokens=64, max_running=1))
        assert isinstance(runner, TorchRunner)
        return runner

    return loaded


def items(family: str, runner: TorchRunner) -> list[torch.Tensor]:
    """A picture or more of each kind: sizes with windows that are not full, frames of a clip, tiles of two batches."""
    generator = torch.Generator().manual_seed(7)
    if family.startswith("qwen"):
        shapes = [(1, 64, 64), (1, 80, 48), (1, 16, 112), (2, 48, 80)]
    else:
        side = runner.picture_side
        shapes = [(1, side, side), (3, side, side), (35, side, side)]
    return [torch.randint(0, 256, (*shape, 3), generator=generator, dtype=torch.uint8) for shape in shapes]


def cuts(num_slices: int, seed: int) -> list[int]:
    """How many slices run in each step: all ones, two halves, or anything."""
    if seed == 0:
        return [1] * num_slices
    chosen = random.Random(seed)
    left, parts = num_slices, []
    while left:
        parts.append(chosen.randint(1, left))
        left -= parts[-1]
    return parts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sliced_encoding_equals_the_whole(family: str, seed: int, load: Load) -> None:
    runner = load(family)
    for item in items(family, runner):
        [whole] = runner.encode([item])
        sliced = runner.begin(item)
        for count in cuts(runner.num_slices(item.shape), seed):
            sliced.run(count)
        assert torch.equal(sliced.result(), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_encodings_that_take_turns_do_not_touch_each_other(family: str, load: Load) -> None:
    """With whole encodings between their slices, which the encoder may keep things of."""
    runner = load(family)
    pictures = items(family, runner)
    whole = [runner.encode([item])[0] for item in pictures]
    under_way = [runner.begin(item) for item in pictures]
    left = [runner.num_slices(item.shape) for item in pictures]
    while any(left):
        for index, encoding in enumerate(under_way):
            if left[index]:
                encoding.run(1)
                left[index] -= 1
        runner.encode(pictures[:1])
    for encoding, expected in zip(under_way, whole, strict=True):
        assert torch.equal(encoding.result(), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_may_be_gone_after_the_first_slice(family: str, load: Load) -> None:
    """They lie in memory that is lent to whoever sent them."""
    runner = load(family)
    for item in items(family, runner):
        [whole] = runner.encode([item])
        lent = item.clone()
        sliced = runner.begin(lent)
        sliced.run(1)
        lent.fill_(0)
        sliced.run(runner.num_slices(item.shape) - 1)
        assert torch.equal(sliced.result(), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_counted_and_bounded_by_what_a_layer_takes(family: str, load: Load) -> None:
    runner = load(family)
    layers = runner.encoder.num_layers
    for item in items(family, runner):
        sliced = runner.begin(item)
        most = 0
        for _ in range(runner.num_slices(item.shape)):
            sliced.run(1)
            most = max(most, sliced.num_bytes)
        result = sliced.result()
        assert sliced.num_bytes == result.nbytes
        batch = runner.encoder.batches(item)[0]
        state = runner.encoder.begin(batch)
        assert state.num_bytes <= most <= state.num_bytes + item.nbytes + 2 * result.nbytes
        assert runner.num_slices(item.shape) == runner.encoder.num_batches(item.shape) * layers


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_write_where_they_are_told_may_run_again(family: str, load: Load) -> None:
    """A layer at a time from one pair of buffers to another, each twice: as captured pieces of an encoder do."""
    runner = load(family)
    encoder = runner.encoder
    for item in items(family, runner):
        [batch, *_] = encoder.batches(item)
        begun = encoder.begin(batch)
        encoder.run(begun, encoder.num_layers)
        expected = encoder.finish(begun)
        state = encoder.begin(batch)
        while state.next_layer < encoder.num_layers:
            kept = state.x.clone()
            results = []
            for _ in range(2):
                again = replace(state, taps=list(state.taps))
                out = torch.empty_like(state.x), torch.empty_like(state.x)
                encoder.run(again, 1, out)
                assert again.x is out[0]
                assert again.normed is out[1]
                assert torch.equal(state.x, kept)
                results.append(again)
            assert torch.equal(results[0].x, results[1].x)
            state = results[1]
        assert torch.equal(encoder.finish(state), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_reports_progress_and_nothing_can_be_had_too_early(family: str, load: Load) -> None:
    runner = load(family)
    reports: list[int] = []
    runner.report_to(lambda: reports.append(1))
    item = items(family, runner)[0]
    sliced = SlicedEncoding(runner.encoder, item)
    with pytest.raises(RuntimeError, match="before its last slice"):
        sliced.result()
    sliced.run(runner.num_slices(item.shape) - 1)
    assert len(reports) == runner.encoder.num_layers - 1
    with pytest.raises(RuntimeError, match="before its last slice"):
        sliced.result()
    sliced.run(1)
    with pytest.raises(IndexError):
        sliced.run(1)
    runner.report_to(lambda: None)
