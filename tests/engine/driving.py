"""Drives an engine in tests: builds requests, steps, and keeps what each request was told, checking that it is
well-formed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.config import EngineConfig
from engine.core import Engine
from engine.scheduler import Growth
from engine.speculation.choosing import Mode
from engine.speculation.drafting import Kind
from engine.speculation.lengths import Always, Candidate
from engine.speculation.model_drafting import ModelDrafting
from engine.speculation.model_lengths import ModelCandidate
from engine.speculation.replay import Replay
from engine.speculation.speculator import Speculator
from engine.step_costs import Costs
from preprocess.wire import (
    Admitted,
    EngineRequest,
    MediaItem,
    OutputStart,
    Pixels,
    Rejected,
    SamplingParams,
    TextOptions,
    TokenEvent,
    Usage,
)
from tests.engine.fake_drafter import FakeDrafter
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner, load
from tests.engine.speculation.random_trees import RandomTrees

PLACEHOLDER = 7


def picture(content: int, *spans: tuple[int, int]) -> MediaItem:
    """A picture at the given (start, length) runs of the prompt; `content` and the number of tokens tell it apart."""
    num_tokens = sum(length for _, length in spans)
    data = bytes((content * 31 + tile * 7 + channel) % 251 for tile in range(num_tokens) for channel in range(3))
    digest = content.to_bytes(16, "little") + num_tokens.to_bytes(16, "little")
    return MediaItem(digest, Pixels((num_tokens, 1, 1, 3), inline=data), list(spans))


def positions_of(media: Sequence[MediaItem]) -> bytes:
    """Three-axis positions up to the end of the last picture. What they are follows from the pictures before."""
    axes: list[tuple[int, int, int]] = []
    position = 0
    for item in media:
        times = 5 * item.digest[0]
        for start, count in item.spans:
            for _ in range(start - len(axes)):
                axes.append((position, position, position))
                position += 1
            axes += [(position + times, position + index, position + index % 2) for index in range(count)]
            position = max(max(axis) for axis in axes) + 1
    return np.array(axes, "<i4").reshape(-1, 3).T.tobytes()


def request(
    request_id: str,
    prompt: Sequence[int],
    media: Sequence[MediaItem] = (),
    *,
    max_tokens: int = 8,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    seed: int = 0,
    priority: int = 0,
    repetition_penalty: float = 1.0,
    three_axes: bool = False,
) -> EngineRequest:
    """A request; positions under its pictures get a placeholder, whatever `prompt` says there.

    `three_axes`: it brings rotary positions of its own.
    """
    ids = np.array(prompt, dtype="<i8")
    for item in media:
        for start, count in item.spans:
            ids[start : start + count] = PLACEHOLDER
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=seed,
        stop_token_ids=list(stop_token_ids),
        repetition_penalty=repetition_penalty,
    )
    return EngineRequest(
        request_id,
        ids.tobytes(),
        list(media),
        sampling,
        TextOptions(),
        0.0,
        priority=priority,
        positions=positions_of(media) if three_axes else b"",
    )


@dataclass
class Told:
    """What the detokenizer was told of a request."""

    ids: list[int] = field(default_factory=list)
    finish: TokenEvent | None = None

    @property
    def reason(self) -> str | None:
        """How it ended, if it did."""
        return self.finish.finish_reason if self.finish else None

    @property
    def usage(self) -> Usage:
        """Usage of a finished request."""
        assert self.finish is not None
        assert self.finish.usage is not None
        return self.finish.usage

    def take(self, event: TokenEvent) -> None:
        """One event more; none may follow the finish, and none may skip or repeat an output index."""
        assert self.finish is None, "an event after the end"
        assert event.first_index == len(self.ids) or (event.finish_reason == "stop" and not event.token_ids)
        self.ids.extend(event.token_ids)
        if event.finish_reason is not None:
            assert event.usage is not None
            assert (event.error is not None) == (event.finish_reason == "error")
            self.finish = event


class Optimist(Growth):
    """Expects nobody to grow, so that memory runs out and sequences are retracted."""

    def expected(self, sequence: object, hold: object) -> float:
        """Nothing."""
        return 0.0


class Sometimes(Always):
    """A model drafts in some steps only, and for some rows, so that it has much to catch up with; and now and then it
    catches up with a little only.
    """

    def __init__(self, length: int, seed: int, share: float = 0.4) -> None:
        super().__init__(length)
        self._random = random.Random(seed)
        self._share = share

    def choose_model(
        self,
        rows: int,
        candidates: Sequence[Candidate | None],
        lengths: Sequence[int],
        models: Sequence[ModelCandidate | None],
        room: int,
    ) -> list[int]:
        """See `Lengths.choose_model`."""
        self.most_late = self._random.choice((3, 20, sys.maxsize))
        some = [model if self._random.random() < self._share else None for model in models]
        chosen = super().choose_model(rows, candidates, lengths, some, room)
        return [self._random.randint(0, length) for length in chosen]


class Driver:
    """An engine that checks itself after every step, over a fake runner. `told` is what came of each request."""

    def __init__(
        self,
        runner: FakeRunner | None = None,
        *,
        max_batched_tokens: int = 16,
        max_running: int = 8,
        max_context: int = 0,
        max_waiting: int = 256,
        max_waiting_tokens: int = 100_000,
        vision_cache_tokens: int = 1000,
        prefix_cache: bool = True,
        optimistic: bool = False,
        speculation: Mode = "none",
        costs: Costs | None = None,
        itl_target_ms: float = 0.0,
        ttft_target_ms: float = 300.0,
    ) -> None:
        self.runner = runner or FakeRunner()
        self.runner.budget = max_batched_tokens
        self.now_s = 0.0
        config = EngineConfig(
            model="",
            max_running=max_running,
            max_context=max_context,
            max_batched_tokens=max_batched_tokens,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            vision_cache_bytes=vision_cache_tokens * FakeRunner.embedding_bytes,
            prefix_cache=prefix_cache,
            speculation=speculation,
            itl_target_ms=itl_target_ms,
            ttft_target_ms=ttft_target_ms,
            check=True,
        )
        self.engine = Engine(config, self.runner, lambda: self.now_s, costs)
        if optimistic:
            self.engine.scheduler.growth = Optimist()
        self.told: dict[str, Told] = {}

    def draft(self, accuracy: float, length: int, seed: int = 0, *, branches: int = 0) -> Replay:
        """From now on guess `length` tokens a step, each right with this probability, for all whose answer is known.
        `branches`: so many of them twice.
        """
        source = Replay({}, accuracy, VOCAB_SIZE, seed, branches=branches)
        self.engine.scheduler.speculator = self.engine.speculator
        self.engine.speculator.sources = [source]
        self.engine.speculator.controller = Always(length)
        return source

    def draft_with(self, kind: Kind, accuracy: float, length: int, seed: int = 0, share: float = 1.0) -> FakeDrafter:
        """As `draft`, but a model guesses: at most `length` tokens, for this share of the rows."""
        drafter = self.runner.drafter = FakeDrafter(self.runner, kind, accuracy, seed)
        engine = self.engine
        model = ModelDrafting(drafter, engine.kv, VOCAB_SIZE, lambda: self.now_s)
        engine.speculator = Speculator("auto", self.runner.max_drafts, VOCAB_SIZE, model, clock=lambda: self.now_s)
        engine.speculator.sources = []
        engine.speculator.controller = Sometimes(length, seed, share)
        engine.scheduler.speculator = engine.speculator
        return drafter

    def draft_trees(self, accuracy: float, size: int, seed: int = 0) -> RandomTrees:
        """From now on check trees of any shape, of at most `size` guesses each."""
        self.draft(0.0, size)
        return RandomTrees({}, accuracy, VOCAB_SIZE, size, seed).guide(self.engine)

    def submit(self, *requests: EngineRequest) -> None:
        """Queue requests that must be admitted."""
        for wanted in requests:
            answer = self.engine.submit(wanted, load)
            assert answer == Admitted(wanted.request_id), answer

    def refuse(self, wanted: EngineRequest) -> Rejected:
        """Send a request that must be refused."""
        answer = self.engine.submit(wanted, load)
        assert isinstance(answer, Rejected), answer
        self.engine.check()
        return answer

    def step(self, count: int = 1) -> None:
        """Step, and take what the steps told."""
        for _ in range(count):
            self.now_s += 0.001
            for message in self.engine.step():
                if isinstance(message, OutputStart):
                    assert message.request_id not in self.told, "a request starts twice"
                    self.told[message.request_id] = Told()
                    continue
                for event in message.events:
                    self.told[event.request_id].take(event)
            for complaint in self.runner.complaints:
                raise complaint

    def finish(self, *, max_steps: int = 2000) -> dict[str, Told]:
        """Step until nothing is left; then nothing may be held."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"not done after {max_steps} steps"
        self.engine.check()
        assert self.engine.stats().kv_slots_used == 0
        assert self.engine.intake.vision_ids.num_pinned == 0
        assert all(told.finish is not None for told in self.told.values())
        return self.told

    def run(self, *requests: EngineRequest) -> dict[str, Told]:
        """Submit, finish."""
        self.submit(*requests)
        return self.finish()
