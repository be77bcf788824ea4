"""Every encoder as graphs of a few layers gives what it gives without, to the last bit: as a whole, in slices, and
whatever else the device computes between them. On the simulated GPU, or on the device where there is one.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES

from engine.batch import Row
from engine.config import EngineConfig
from engine.core import Engine
from engine.step_costs import Costs
from preprocess.wire import EngineRequest, MediaItem, Pixels, SamplingParams, TextOptions, TokenEvents
from tests.engine.cost_table import MS, Table
from tests.engine.simulated_gpu import load_simulated, rows_of_table, simulate
from tests.engine.test_encoder_slices import items
from tests.engine.test_gpu_runner import GREEDY, _big_enough, _load

TIMES = 4
"""A shape comes for the first time, is captured, and is replayed after that."""


@pytest.fixture(scope="module", params=["smolvlm", "qwen2_5_vl", "qwen3_vl"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    folder = tmp_path_factory.mktemp("model")
    if torch.cuda.is_available():
        yield request.param, _load(_big_enough(folder, request.param), "cuda", "bfloat16")
        return
    with pytest.MonkeyPatch.context() as patch:
        simulate(patch)
        yield request.param, load_simulated(FAMILIES[request.param](folder), max_rows=4)


@pytest.fixture(params=[1, 2])
def runner(loaded: tuple[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With no graphs of pictures yet; slices of one layer or two. Every piece is captured as soon as it may be."""
    from engine.gpu.encoder_graphs import EncoderGraphs

    monkeypatch.setattr("engine.gpu.encoder_graphs.LAYERS", request.param)
    monkeypatch.setattr("engine.gpu.capture_pace.EVERY", 0)
    monkeypatch.setattr("engine.gpu.capture_pace.SELDOM", 0)
    _, runner = loaded
    runner._encoder_graphs = EncoderGraphs(runner.encoder)
    return runner


@pytest.fixture
def pictures(loaded: tuple[str, Any]) -> list[torch.Tensor]:
    return items(*loaded)


def plain(runner: Any, picture: torch.Tensor) -> torch.Tensor:
    """The encoder alone."""
    with torch.inference_mode():
        tokens: torch.Tensor = runner.encoder([picture.to(runner.device)])[0]
        return tokens


def in_slices(runner: Any, picture: torch.Tensor, seed: int, between: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Any number of slices at a time; whole pictures after each."""
    chosen = random.Random(seed)
    encoding = runner.begin(picture)
    left = runner.num_slices(picture.shape)
    while left:
        count = chosen.randint(1, left)
        encoding.run(count)
        left -= count
        runner.encode(between)
    result: torch.Tensor = encoding.result()
    return result


def test_new_captured_and_replayed_pictures_are_encoded_alike(runner: Any, pictures: list[torch.Tensor]) -> None:
    for number in range(TIMES):
        for picture in pictures:
            other = (picture.int() * (number + 3) % 251).to(torch.uint8)
            assert torch.equal(runner.encode([other])[0], plain(runner, other))
    assert all(runner._encoder_graphs.knows(picture) for picture in pictures)


def test_slices_are_encoded_as_the_whole_with_other_pictures_between_them(
    runner: Any, pictures: list[torch.Tensor]
) -> None:
    for number in range(TIMES):
        for picture in pictures:
            others = [other for other in pictures if other is not picture]
            assert torch.equal(in_slices(runner, picture, number, others), plain(runner, picture))


def test_two_of_one_shape_in_turns_do_not_touch_each_other(runner: Any, pictures: list[torch.Tensor]) -> None:
    """The second is encoded without graphs, and a whole one between them as well."""
    picture = pictures[0]
    other = 255 - picture
    expected = [plain(runner, picture), plain(runner, other)]
    for _ in range(TIMES):
        both = [runner.begin(picture), runner.begin(other)]
        for _ in range(runner.num_slices(picture.shape)):
            for encoding in both:
                encoding.run(1)
            assert torch.equal(runner.encode([other])[0], expected[1])
        assert [torch.equal(one.result(), own) for one, own in zip(both, expected, strict=True)] == [True, True]


def test_who_gives_up_a_picture_gives_its_buffers_back(runner: Any, pictures: list[torch.Tensor]) -> None:
    picture = pictures[0]
    for _ in range(TIMES):
        runner.encode([picture])
    [graphs] = runner._encoder_graphs._captured.values()
    encoding = runner.begin(picture)
    encoding.run(1)
    assert graphs.is_free == (runner.num_slices(picture.shape) == 1)
    del encoding
    gc.collect()
    assert graphs.is_free
    assert torch.equal(in_slices(runner, picture, 1), plain(runner, picture))
    assert graphs.is_free


def test_pixels_may_be_gone_after_the_first_slice(runner: Any, pictures: list[torch.Tensor]) -> None:
    for picture in pictures:
        for _ in range(TIMES):
            lent = picture.clone()
            encoding = runner.begin(lent)
            encoding.run(1)
            lent.fill_(0)
            encoding.run(runner.num_slices(picture.shape) - 1)
            assert torch.equal(encoding.result(), plain(runner, picture))


def test_what_is_kept_between_slices_is_counted(runner: Any, pictures: list[torch.Tensor]) -> None:
    for picture in pictures:
        for _ in range(TIMES):
            encoding = runner.begin(picture)
            encoding.run(1)
            assert encoding.num_bytes > 0
            encoding.run(runner.num_slices(picture.shape) - 1)
            assert encoding.num_bytes == encoding.result().nbytes


def test_a_slice_is_some_layers(runner: Any, pictures: list[torch.Tensor]) -> None:
    from engine.gpu.encoder_graphs import LAYERS

    for picture in pictures:
        of_a_batch = -(-runner.encoder.num_layers // LAYERS)
        assert runner.num_slices(picture.shape) == runner.encoder.num_batches(picture.shape) * of_a_batch


def test_a_slice_of_a_large_picture_is_one_layer(
    runner: Any, pictures: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large batch, where a picture has several."""
    sizes = [batch.numel() for picture in pictures for batch in runner.encoder.batches(picture)]
    monkeypatch.setattr("engine.gpu.encoder_graphs.LARGE", max(sizes))
    large = next(picture for picture in pictures if runner.encoder.batches(picture)[0].numel() == max(sizes))
    small = min(pictures, key=torch.Tensor.numel)
    batches, layers = runner.encoder.num_batches(large.shape), runner.encoder.num_layers
    short = runner.num_slices(small.shape)
    assert runner.num_slices(large.shape) == layers + (batches - 1) * short
    for number in range(TIMES):
        for picture in (large, small):
            assert torch.equal(in_slices(runner, picture, number), plain(runner, picture))


def test_large_pictures_are_sliced_without_graphs(
    runner: Any, pictures: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.gpu.encoder_graphs.MOST_BYTES", 1)
    for number in range(TIMES):
        assert torch.equal(in_slices(runner, pictures[0], number), plain(runner, pictures[0]))
    assert not runner._encoder_graphs.knows(pictures[0])


@pytest.mark.parametrize("bound", ["MOST_KEPT", "MOST_SHAPES"])
def test_what_was_used_longest_ago_makes_room(
    runner: Any, pictures: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(f"engine.gpu.encoder_graphs.{bound}", 1)
    for picture in pictures[:2]:
        for number in range(TIMES):
            assert torch.equal(in_slices(runner, picture, number), plain(runner, picture))
    assert [runner._encoder_graphs.knows(picture) for picture in pictures[:2]] == [False, True]
    assert len(runner._encoder_graphs._captured) == 1


def test_what_cannot_be_captured_is_told_once_and_encoded_alike(
    runner: Any, pictures: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def fails(*_: object) -> None:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr("engine.gpu.encoder_graphs.Graph", fails)
    monkeypatch.setattr("engine.gpu.encoder_graphs.logger.warning", lambda text, *_, **__: told.append(text))
    for number in range(TIMES):
        assert torch.equal(in_slices(runner, pictures[0], number), plain(runner, pictures[0]))
    assert told == ["pictures of shape %s are encoded without graphs"]


def answers(runner: Any, pictures: Sequence[torch.Tensor], costs: Costs | None) -> tuple[dict[str, list[int]], int]:
    """What a stream of text and those who ask about pictures beside it are told, and how many slices ran beside."""
    config = EngineConfig("", max_running=4, prefix_cache=False, check=True, vision_cache_bytes=1 << 24)
    engine = Engine(config, runner, costs=costs)
    told: dict[str, list[int]] = {}

    def send(name: str, index: int, max_tokens: int) -> None:
        ids, media = np.arange(30, 50, dtype="<i8"), []
        if name != "stream":
            count = len(plain(runner, pictures[index]))
            ids = np.insert(ids, 2, np.full(count, 7))
            media = [MediaItem(bytes([index]) * 32, Pixels(tuple(pictures[index].shape)), [(2, count)])]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        wanted = EngineRequest(name, ids.tobytes(), media, params, TextOptions(), 0.0)
        engine.submit(wanted, lambda pixels: pictures[index])

    def step() -> None:
        for message in engine.step():
            for event in message.events if isinstance(message, TokenEvents) else ():
                assert event.error is None
                told.setdefault(event.request_id, []).extend(event.token_ids)

    send("stream", 0, 90)
    while "stream" not in told:
        step()
    for index in range(len(pictures)):
        send(f"picture {index}", index, 6)
        for _ in range(8):
            step()
    while engine.has_work:
        step()
    return told, engine.stats().encoder_slices


def test_an_engine_says_the_same_whether_pictures_ride_beside_a_stream_or_come_as_a_whole(
    runner: Any, pictures: list[torch.Tensor]
) -> None:
    small = [picture for picture in pictures if len(picture) < 9]
    expected, _ = answers(runner, small, None)
    for _ in range(TIMES):
        told, slices = answers(runner, small, Table(slice_s=3 * MS))
        assert slices == sum(runner.num_slices(picture.shape) for picture in small)
        if runner.dtype == torch.float32:  # chunks of other lengths round otherwise
            assert told == expected
        assert {name: len(ids) for name, ids in told.items()} == {name: len(ids) for name, ids in expected.items()}


def test_shapes_that_have_come_are_captured_while_there_is_nothing_to_do(
    runner: Any, pictures: list[torch.Tensor]
) -> None:
    """A piece at a time; and a picture that comes meanwhile goes on from there."""
    runner.encode(pictures[:2])
    assert not any(runner._encoder_graphs.knows(picture) for picture in pictures)
    for _ in range(3):
        assert runner._encoder_graphs.prepare(runner.device)
    for picture in pictures[:2]:
        assert torch.equal(in_slices(runner, picture, 1), plain(runner, picture))
    while runner._encoder_graphs.prepare(runner.device):
        pass
    for picture in pictures[:2]:
        assert runner._encoder_graphs.knows(picture)
        assert torch.equal(in_slices(runner, picture, 2), plain(runner, picture))


def test_while_there_is_nothing_to_do_nothing_makes_room(
    runner: Any, pictures: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.gpu.encoder_graphs.MOST_SHAPES", 1)
    runner.encode(pictures[:2])
    while runner._encoder_graphs.prepare(runner.device):
        pass
    known = [runner._encoder_graphs.knows(picture) for picture in pictures[:2]]
    assert sorted(known) == [False, True]
    runner.encode(pictures[:1])
    runner.encode(pictures[:1])
    assert runner._encoder_graphs.knows(pictures[0])


class Noting:
    """In place of a graph: notes in which step it was captured, and how long that took."""

    def __init__(self, capture_s: float) -> None:
        self.capture_s = capture_s
        self.now_s = 0.0
        self.steps: list[int] = []
        self.step = 0

    def clock(self) -> float:
        return self.now_s

    def captured(self, graph: type[Any]) -> Any:
        def capture(run: Any, memory: Any) -> Any:
            self.now_s += self.capture_s
            self.steps.append(self.step)
            return graph(run, memory)

        return capture


@pytest.fixture
def paced(runner: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Noting:
    """How a runner whose captures take so long spreads them."""
    from engine.gpu import capture_pace, encoder_graphs

    noted = Noting(request.param)
    monkeypatch.setattr("engine.gpu.capture_pace.EVERY", 2)
    monkeypatch.setattr("engine.gpu.capture_pace.SELDOM", 9)
    monkeypatch.setattr(encoder_graphs, "Graph", noted.captured(encoder_graphs.Graph))
    runner._encoder_graphs.pace = capture_pace.CapturePace(noted.clock)
    return noted


@pytest.mark.parametrize(("paced", "gap"), [(0.001, 2), (0.02, 9)], indirect=["paced"])
def test_beside_steps_a_piece_is_captured_now_and_then_and_the_more_seldom_the_longer_it_takes(
    runner: Any, pictures: list[torch.Tensor], paced: Noting, gap: int
) -> None:
    """A picture that comes again and again, in slices and as a whole; all as without graphs."""
    picture = pictures[0]
    expected = plain(runner, picture)
    pieces = runner.num_slices(picture.shape) + 2
    decode = [Row(0, 5, [3], GREEDY)]
    rows_of_table(runner, 1, 20)
    while len(paced.steps) < pieces:
        encoding = runner.begin(picture)
        for _ in range(runner.num_slices(picture.shape)):
            encoding.run(1)
            runner.step(decode)
            paced.step += 1
        assert torch.equal(encoding.result(), expected)
        assert torch.equal(runner.encode([picture])[0], expected)
        assert paced.step < 500
    assert min(later - step for step, later in itertools.pairwise(paced.steps)) >= gap
    assert torch.equal(in_slices(runner, picture, 1), expected)
    assert len(paced.steps) == pieces


@pytest.mark.parametrize("paced", [0.02], indirect=True)
def test_shapes_that_are_expected_are_captured_before_they_come(
    runner: Any, pictures: list[torch.Tensor], paced: Noting
) -> None:
    for picture in pictures[:2]:
        runner._encoder_graphs.expect(picture.shape, runner.device)
    assert not paced.steps
    while runner._encoder_graphs.prepare(runner.device):
        pass
    captured = len(paced.steps)
    for picture in pictures[:2]:
        assert runner._encoder_graphs.knows(picture)
        for number in range(TIMES):
            assert torch.equal(in_slices(runner, picture, number), plain(runner, picture))
    assert len(paced.steps) == captured


def test_expected_pictures_are_ready_after_warm_up_as_far_as_there_is_time(
    runner: Any, pictures: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner._expected = [tuple(picture.shape) for picture in pictures[:2]]
    runner._expect_pictures(until_s=0.0)
    assert runner.idle(), "what is left is captured in idle moments"
    runner._expect_pictures(until_s=float("inf"))
    assert not runner._encoder_graphs.prepare(runner.device)
    assert all(runner._encoder_graphs.knows(picture) for picture in pictures[:2])

    for error in (torch.OutOfMemoryError("no memory"), RuntimeError("no plan for this size")):

        def fails(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(runner._encoder_graphs, "expect", fails)
        runner._expect_pictures(until_s=float("inf"))


def test_a_shape_that_cannot_be_encoded_keeps_no_other_from_being_captured(
    runner: Any, pictures: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from engine.gpu.encoder_graphs import ShapeGraphs

    for picture in pictures[:2]:
        runner._encoder_graphs.expect(picture.shape, runner.device)
    bad = next(reversed(runner._encoder_graphs._captured))
    piece = ShapeGraphs._piece

    def fails(graphs: ShapeGraphs, index: int) -> list[torch.Tensor]:
        if index and graphs._pixels.shape == bad:
            raise RuntimeError("no plan for this size")
        return piece(graphs, index)

    with monkeypatch.context() as patch:
        patch.setattr(ShapeGraphs, "_piece", fails)
        while runner._encoder_graphs.prepare(runner.device):
            pass
        assert runner.idle(), "graphs of steps follow"
    assert "are encoded without graphs" in caplog.text
    for shape, graphs in runner._encoder_graphs._captured.items():
        assert len(graphs._graphs) == (1 if shape == bad else graphs._num_groups + 2)
    for picture in pictures[:2]:
        assert torch.equal(in_slices(runner, picture, 0), plain(runner, picture))
