"""With drafts, good, bad or none, a real (tiny, random) model says what it says without, token for token.

Over cache, chunks, retraction, pictures, grammars and every sampling field; usage apart, so do the events: logprobs,
reasons to end, stop ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Row, Runner, SampledToken
from engine.config import EngineConfig
from engine.core import Engine
from engine.cpu.runner import CpuRunner
from engine.execution import Drafted
from engine.load import load_runner
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.speculation.drafting import Drafting, Kind, Proposal
from engine.speculation.lengths import Always
from engine.speculation.replay import Replay
from preprocess.wire import (
    EngineRequest,
    MediaItem,
    Pixels,
    SamplingParams,
    TextOptions,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
)
from tests.engine.driving import PLACEHOLDER
from tests.engine.late_results import Late
from tests.engine.speculation.random_trees import RandomTrees
from tests.engine.test_grammar import DIGITS, JSON, WORDS
from tests.engine.without_amx import without_amx

TEXT = [(17 * index) % 400 + 30 for index in range(24)]
ENDS = [2, 6]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7},
    {"top_k": 6, "logprobs": 0},
    {"top_p": 0.8, "min_tokens": 6, "stop_token_ids": [*range(0, 512, 9)]},
    {"min_p": 0.05, "repetition_penalty": 1.4},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 0.8, "frequency_penalty": 0.6},
    {"temperature": 0.5, "presence_penalty": -0.5, "logit_bias": {40: 4.0, 41: 4.0}},
    {"temperature": 0.0, "stop_token_ids": [*range(1, 512, 7)], "min_tokens": 3},
]
SHAPED: list[dict[str, Any]] = [
    {"grammar": JSON, "max_tokens": 100},
    {"grammar": JSON, "max_tokens": 100, "temperature": 0.0, "logprobs": 1},
    {"grammar": DIGITS, "min_tokens": 30},
    {"grammar": WORDS, "top_p": 0.7, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(request: pytest.FixtureRequest, tiny_model: Path) -> Runner:
    """In float32 by torch, and in bfloat16 by the native step, which sums alike in any batch."""
    config = EngineConfig(str(tiny_model), dtype=request.param, threads=1, kv_tokens=2500, max_running=6)
    with without_amx():
        loaded = load_runner(config)
    if request.param == "bfloat16" and not isinstance(loaded, CpuRunner):
        pytest.skip(f"no native step: {loaded.facts()['kernel']}")
    return loaded


def every_kind(runner: Runner) -> list[EngineRequest]:
    """Requests with every kind of sampling, over text, one picture and two."""
    side = runner.encoder.image_size  # type: ignore[attr-defined]
    wanted = []
    for index, params in enumerate([*PARAMS, *SHAPED]):
        prompt: list[int] = []
        media: list[MediaItem] = []
        for content in ([], [1], [1, 2])[index % 3]:
            generator = torch.Generator().manual_seed(content)
            pixels = torch.randint(0, 256, (1, side, side, 3), dtype=torch.uint8, generator=generator)
            count = runner.encode([pixels])[0].shape[0]
            prompt.extend(TEXT[: 2 + content])
            inline = Pixels((1, side, side, 3), inline=pixels.numpy().tobytes())
            media.append(MediaItem(bytes([content]) * 32, inline, [(len(prompt), count)]))
            prompt.extend([PLACEHOLDER] * count)
        prompt.extend([*TEXT, 30 + index])
        fields: dict[str, Any] = {"max_tokens": 24, "seed": index, "stop_token_ids": ENDS} | params
        sampling = SamplingParams(**fields)
        ids = torch.tensor(prompt, dtype=torch.int64).numpy().tobytes()
        name = f"r{index}"
        wanted.append(EngineRequest(name, ids, media, sampling, TextOptions(), 0.0, session_id=f"session {name}"))
    return wanted


@pytest.fixture(scope="module")
def requests(runner: Runner) -> list[EngineRequest]:
    return every_kind(runner)


class Unsure:
    """A source that guesses one text, and beside its first word another's, whose words are right or all wrong."""

    name = "unsure"

    def __init__(self, right: Mapping[str, Ordered[int]], script: Mapping[str, Ordered[int]], second: float) -> None:
        self._right, self._script, self._second = right, script, second

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        texts = [own[sequence.request_id][len(sequence.output_ids) :][:limit] for own in (self._script, self._right)]
        if not texts[0]:
            return None
        if not self._second:
            texts[1] = [(token_id + 1) % 512 for token_id in texts[1]]
        return Proposal(Kind.REPLAY, texts[0], (Proposal(Kind.REPLAY_SECOND, texts[1]),))

    def ended(self, sequence: Sequence) -> None:
        """See `Source.ended`."""


class Heard:
    """What was told of one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.end: tuple[str, int | None] | None = None
        self.predictions = (0, 0)
        self.num_events = 0

    def take(self, event: TokenEvent) -> None:
        assert self.end is None
        assert event.error is None
        assert event.first_index == len(self.ids)
        self.ids += event.token_ids
        self.logprobs += event.logprobs
        self.num_events += 1
        if event.finish_reason is not None:
            self.end = (event.finish_reason, event.stop_token_id)
            assert event.usage is not None
            assert event.usage.completion_tokens == len(self.ids)
            self.predictions = (event.usage.accepted_prediction_tokens, event.usage.rejected_prediction_tokens)

    def same_as(self, other: Heard) -> bool:
        """Equal ids and end; logprobs equal but for the last bits, since another batch shape sums in another order."""
        return (self.ids, self.end) == (other.ids, other.end) and all(
            [token for token, _ in own.top] == [token for token, _ in its.top]
            and math.isclose(own.logprob, its.logprob, abs_tol=1e-4)
            for own, its in zip(self.logprobs, other.logprobs, strict=True)
        )


def load(pixels: Pixels) -> torch.Tensor:
    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)


def run(engine: Engine, wanted: Ordered[EngineRequest], *, retract_every: int = 0) -> dict[str, Heard]:
    """Serve all together, to the end."""
    heard: dict[str, Heard] = {}
    for one in wanted:
        engine.submit(one, load)
        heard[one.request_id] = Heard()
    steps = 0
    while engine.has_work:
        steps += 1
        running = [sequence for sequence in engine.scheduler.running if sequence.num_retracted < 2]
        if retract_every and running and steps % retract_every == 0:
            engine.scheduler.retract(running[-1])
        for message in engine.step():
            for event in message.events if isinstance(message, TokenEvents) else []:
                heard[event.request_id].take(event)
    return heard


def said_plainly(runner: Runner, folder: Path, requests: Ordered[EngineRequest]) -> dict[str, Heard]:
    """What is said to each request alone, in one chunk, without cache and drafts."""
    heard: dict[str, Heard] = {}
    for one in requests:
        config = EngineConfig(str(folder), prefix_cache=False, check=True, speculation="none")
        heard |= run(Engine(config, runner), [one])
    return heard


@pytest.fixture(scope="module")
def plain(runner: Runner, requests: list[EngineRequest], tiny_model: Path) -> dict[str, Heard]:
    return said_plainly(runner, tiny_model, requests)


@pytest.fixture
def engine_of(runner: Runner, tiny_model: Path) -> Callable[..., Engine]:
    def make(
        length: int = 7,
        script: Mapping[str, Ordered[int]] | None = None,
        *,
        shape: str = "chain",
        late: bool = False,
        **options: Any,
    ) -> Engine:
        config = EngineConfig(str(tiny_model), **{"check": True, "max_running": 6} | options)
        engine = Engine(config, Late(runner) if late else runner)
        engine.speculator.controller = Always(length)
        if script is not None:
            branches = 3 if shape == "branches" else 0
            engine.speculator.sources = [Replay(script, 0.8, runner.vocab_size, branches=branches)]
            if shape == "any tree":
                RandomTrees(script, 0.8, runner.vocab_size, length).guide(engine)
        return engine

    return make


def answers(plain: Mapping[str, Heard]) -> dict[str, list[int]]:
    return {name: heard.ids for name, heard in plain.items()}


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("chunk", [9, 64, 512])
@pytest.mark.parametrize("retract_every", [0, 5], ids=["straight", "retracted"])
@pytest.mark.parametrize(
    ("length", "shape"), [(1, "chain"), (7, "chain"), (15, "chain"), (9, "branches"), (15, "any tree")]
)
def test_scripted_drafts_change_nothing(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    prefix_cache: bool,
    chunk: int,
    retract_every: int,
    length: int,
    shape: str,
) -> None:
    engine = engine_of(length, answers(plain), shape=shape, prefix_cache=prefix_cache, max_batched_tokens=chunk)
    heard = run(engine, requests, retract_every=retract_every)
    assert [name for name, own in heard.items() if not own.same_as(plain[name])] == []
    if chunk > 9:
        assert sum(own.predictions[0] for own in heard.values()) > 100
        assert sum(own.predictions[1] for own in heard.values()) > 10
    assert bool(retract_every) == bool(engine.stats().num_retracted)


@pytest.mark.parametrize("mode", ["auto", "ngram", "echo", "grammar", "habit"])
@pytest.mark.parametrize(("length", "late"), [(2, False), (15, False), (15, True)], ids=["2", "15", "15-late"])
def test_every_source_changes_nothing(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    mode: str,
    length: int,
    late: bool,
) -> None:
    engine = engine_of(length, late=late, speculation=mode)
    for _ in range(2):  # the second time the session has answered before
        heard = run(engine, requests)
        assert [name for name, own in heard.items() if not own.same_as(plain[name])] == []
    stats = engine.stats()
    drafted = {name: getattr(stats, f"drafted_{name}") for name in ("ngram", "echo", "grammar", "habit")}
    assert {name for name, count in drafted.items() if count} == ({*drafted} if mode == "auto" else {mode})
    accepted = sum(getattr(stats, f"accepted_{name}") for name in drafted)
    assert accepted > (150 if mode in ("auto", "echo") else 0)


def test_an_answer_that_is_said_again_takes_few_steps(
    engine_of: Callable[..., Engine], requests: list[EngineRequest]
) -> None:
    engine = engine_of(15, speculation="echo")
    first = run(engine, requests[:1])["r0"]
    again = run(engine, requests[:1])["r0"]
    assert first.ids == again.ids
    assert len(first.ids) == first.num_events == 24
    assert again.num_events == 2  # fifteen guesses beside the prompt and what follows them, and the rest
    assert again.predictions == (24 - 2, 0)


@pytest.mark.parametrize("chunk", [9, 512])
@pytest.mark.parametrize("accuracy", [0.0, 0.9, 1.0])
def test_first_tokens_are_guessed_beside_the_last_ones_of_the_prompt(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    accuracy: float,
    chunk: int,
) -> None:
    """Under every kind of sampling, grammars from the first token on among them, and pictures."""
    engine = engine_of(63, prefix_cache=False, max_batched_tokens=chunk)
    engine.speculator.sources = [Replay(answers(plain), accuracy, 512)]
    shapes: list[tuple[int, int]] = []  # of rows with guesses of first tokens: what was given, what was guessed
    row = engine._execution._row

    def seen(part: Chunk, masks: Any) -> Row:
        if part.opens:
            shapes.append((part.count - len(part.drafts), len(part.drafts)))
        return row(part, masks)

    engine._execution._row = seen  # type: ignore[method-assign]
    for one in requests:
        own = run(engine, [one])[one.request_id]
        assert own.same_as(plain[one.request_id])
        assert engine.stats().kv_slots_used == 0
        if accuracy == 1.0 and chunk == 512:
            assert own.num_events == 1 + (len(own.ids) > 64)
    assert len(shapes) >= (10 if chunk == 512 else 5)
    assert max(guessed for _, guessed in shapes) > (15 if chunk == 512 else 1)
    assert {given for given, _ in shapes} != {1}


def test_what_may_say_one_token_only_is_not_guessed(engine_of: Callable[..., Engine], plain: dict[str, Heard]) -> None:
    ids = torch.tensor([*TEXT, 30], dtype=torch.int64).numpy().tobytes()
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    engine = engine_of(15, {"one": [7] * 9})
    heard = run(engine, [EngineRequest("one", ids, [], sampling, TextOptions(), 0.0)])["one"]
    assert len(heard.ids) == heard.num_events == 1
    assert heard.predictions == (0, 0)


def test_an_abort_or_a_stop_while_first_tokens_are_checked_leaves_nothing(
    engine_of: Callable[..., Engine], requests: list[EngineRequest], plain: dict[str, Heard], runner: Runner
) -> None:
    for end in (Engine.abort, lambda engine, name: engine.stop(name, 0)):
        engine = engine_of(15, answers(plain))
        engine.speculator.sources = [Replay(answers(plain), 1.0, 512)]
        one, other = requests[:2]

        def ends(rows: Ordered[Row], engine: Engine = engine, end: Any = end) -> list[SampledToken]:
            if any(row.drafted for row in rows):
                end(engine, requests[0].request_id)
            return runner.step(rows)

        engine._execution._runner = _Stepping(runner, ends)
        heard: dict[str, Heard] = {own.request_id: Heard() for own in (one, other)}
        engine.submit(one, load)
        while engine.has_work:
            for message in engine.step():
                for event in message.events if isinstance(message, TokenEvents) else []:
                    heard[event.request_id].take(event)
        assert heard[one.request_id].ids == []
        assert engine.stats().kv_slots_used == 0
        engine._execution._runner = runner
        assert run(engine, [other])[other.request_id].same_as(plain[other.request_id])


class _Stepping:
    """A runner whose steps are others."""

    def __init__(self, runner: Runner, step: Callable[[Ordered[Row]], list[SampledToken]]) -> None:
        self._runner = runner
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.mark.parametrize("second", [None, 0.0, 1.0], ids=["chain", "second-wrong", "second-right"])
def test_acceptance_in_a_batch_equals_acceptance_alone(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    second: float | None,
) -> None:
    """The same guesses are right beside seven others; were rows mixed up, a batch would accept fewer."""
    eight = [one for one in requests if not one.sampling.grammar][:8]
    script = {name: [*ids[:5], 7, *ids[6:11], 7, *ids[12:]] for name, ids in answers(plain).items()}

    def accepted(wanted: Ordered[EngineRequest], running: int) -> dict[str, tuple[int, int]]:
        engine = engine_of(3, max_running=running)
        source = Replay(script, 1.0, 512) if second is None else Unsure(answers(plain), script, second)
        engine.speculator.sources = [source]
        return {name: heard.predictions for name, heard in run(engine, wanted).items()}

    together = accepted(eight, 8)
    assert together == {name: own for one in eight for name, own in accepted([one], 1).items()}
    assert sum(right for right, _ in together.values()) > 60


@pytest.mark.parametrize("shape", ["chain", "branches", "any tree"])
def test_abort_and_stop_in_the_middle_of_a_verifying_step(
    engine_of: Callable[..., Engine],
    requests: list[EngineRequest],
    plain: dict[str, Heard],
    runner: Runner,
    shape: str,
) -> None:
    """What the step computes for who has left is dropped, and the others say what they say."""
    engine = engine_of(7, answers(plain), shape=shape)
    step = runner.step

    def interrupted(rows: Ordered[Row]) -> list[SampledToken]:
        if any(row.drafted for row in rows):
            engine.abort("r0")
            engine.stop("r2", 3)
        return step(rows)

    runner.step = interrupted  # type: ignore[method-assign]
    try:
        heard = run(engine, requests[:5])
    finally:
        runner.step = step  # type: ignore[method-assign]
    assert (heard["r0"].end, heard["r2"].end) == (("abort", None), ("stop", None))
    for name in ("r0", "r2"):
        assert heard[name].ids == plain[name].ids[: len(heard[name].ids)]
    assert all(heard[name].same_as(plain[name]) for name in ("r1", "r3", "r4"))
    engine.check()
    assert engine.stats().kv_slots_used == 0


@pytest.mark.parametrize("shape", ["chain", "branches", "any tree"])
def test_what_verified_steps_computed_serves_the_next_request(
    engine_of: Callable[..., Engine], requests: list[EngineRequest], plain: dict[str, Heard], shape: str
) -> None:
    """The tree holds prompt and answer without what was guessed wrongly: the next turn finds as much, and says the
    same, as after plain decoding.
    """
    first = requests[0]
    turn = [*torch.frombuffer(bytearray(first.prompt_ids), dtype=torch.int64).tolist(), *plain["r0"].ids, *TEXT]
    ids = torch.tensor(turn, dtype=torch.int64).numpy().tobytes()
    second = EngineRequest("second", ids, [], SamplingParams(max_tokens=12, temperature=0.0), TextOptions(), 0.0)
    engines = [engine_of(0, {}), engine_of(7, answers(plain), shape=shape)]
    said = []
    for engine in engines:
        run(engine, [first])
        said.append(run(engine, [second])["second"].ids)
    assert said[0] == said[1]
    assert engines[0].stats().prefix_hit_tokens == engines[1].stats().prefix_hit_tokens >= len(turn) - len(TEXT) - 1


@pytest.mark.parametrize("parents", [None, (0, 0, 1)], ids=["chain", "tree"])
def test_how_tokens_after_drafts_are_drawn_is_made_when_asked_for(
    engine_of: Callable[..., Engine], requests: list[EngineRequest], parents: tuple[int, ...] | None
) -> None:
    engine = engine_of(0)
    penalised = next(one for one in requests if one.sampling.repetition_penalty != 1.0)
    engine.submit(penalised, load)
    while not any(sequence.output_ids for sequence in engine.scheduler.running):
        engine.step()
    (sequence,) = engine.scheduler.running
    drafted = Drafted(Chunk(sequence, sequence.num_computed, 4, True, (5, 6, 7), parents), None)
    lineages = [(5,), (5, 6), (5, 6, 7)] if parents is None else [(5,), (6,), (5, 7)]
    expected = [sequence.sampling(lineage) for lineage in lineages]
    assert list(drafted) == [drafted[index] for index in range(3)] == drafted[:] == expected
    assert len(drafted) == 3
