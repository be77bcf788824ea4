"""From an accepted call to its answer: runs the generation and counts it.

    start ──▶ submit (refusals are still status codes) ──▶ Answer ──▶ deltas ──▶ JSON | event stream | text

Chat and captions differ only in what they make of the deltas. Streams are in `server.routes.streaming`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request

from preprocess.errors import ServiceError
from preprocess.wire import Delta, ImageInfo, Usage
from server.faults import rejection
from server.intake import Call
from server.routes.connection import time_limit, while_connected
from server.routes.context import Context
from server.service import Generation, Take


class Timings(msgspec.Struct, frozen=True):
    """Where the time went, in milliseconds. `image_decode_ms` is part of `preprocess_ms`, and all of `total_ms`."""

    image_decode_ms: float
    preprocess_ms: float
    queue_ms: float
    vision_ms: float
    prefill_ms: float
    token_decode_ms: float
    ttft_ms: float | None
    total_ms: float


class MediaTokens(msgspec.Struct, frozen=True):
    """Vision tokens of one picture or frame; of them, those that were not computed again."""

    num_tokens: int
    cached_tokens: int


class Arrival:
    """When a request came, on both clocks, and until when it may run."""

    def __init__(self, context: Context) -> None:
        self.unix_s = int(time.time())
        self.monotonic_s = time.monotonic()
        self.limit_s = context.settings.request_timeout_s
        self.deadline_s = asyncio.get_running_loop().time() + self.limit_s

    def time_limit(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Ends what runs inside when the request's time is over."""
        return time_limit(self.deadline_s, self.limit_s)


@dataclass
class Choice:
    """What is known of one choice so far."""

    last_s: float
    finished: bool = False
    usage: Usage | None = None


@dataclass
class Answer:
    """A running generation, counted as it goes. Iterate once; leaving early cancels it."""

    context: Context
    arrival: Arrival
    generation: Generation
    choices: list[Choice]
    ttft_ms: float | None = None
    images: list[ImageInfo] = field(default_factory=list)

    async def deltas(self, take: Take | None = None) -> AsyncGenerator[tuple[int, Delta], None]:
        """All deltas with their choice. Close it when leaving early.

        Args:
            take: See `server.service.Generation.give_to`; it calls `count`. What it takes is not given here.

        Raises:
            BeholderError: The generation failed.
        """
        metrics = self.context.metrics
        self.generation.give_to(take)
        try:
            async for index, delta in self.generation:
                if delta.error is not None:
                    raise rejection(delta.error)
                if delta.finish_reason in {"abort", "error"}:
                    raise ServiceError("The generation was ended by the server; send it again.", code="aborted")
                self.count(index, delta)
                yield index, delta
            if self._num_unfinished:
                raise ServiceError("The generation stopped before its end; send it again.", code="aborted")
        except (asyncio.CancelledError, GeneratorExit):
            metrics.finished("abort", self._num_unfinished)
            raise
        except Exception:
            metrics.finished("error", self._num_unfinished)
            raise
        finally:
            self.generation.cancel()
            self.generation.give_to(None)  # it holds what holds this: nobody waits for the garbage collector

    def usage(self) -> Usage:
        """The usage of all choices: a prompt that they share is counted once, times are those of the slowest."""
        usages = [choice.usage for choice in self.choices if choice.usage is not None]
        prompts = usages if self.generation.segments else usages[:1]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts) or self.generation.num_prompt_tokens,
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=(sum if self.generation.segments else min)([usage.cached_tokens for usage in usages] or [0]),
            image_tokens=sum(usage.image_tokens for usage in prompts),
            queue_ms=max((usage.queue_ms for usage in usages), default=0.0),
            vision_ms=max((usage.vision_ms for usage in usages), default=0.0),
            prefill_ms=max((usage.prefill_ms for usage in usages), default=0.0),
            decode_ms=max((usage.decode_ms for usage in usages), default=0.0),
            accepted_prediction_tokens=sum(usage.accepted_prediction_tokens for usage in usages),
            rejected_prediction_tokens=sum(usage.rejected_prediction_tokens for usage in usages),
        )

    def media_tokens(self) -> list[MediaTokens]:
        """Of each picture and frame, in the prompt's order: how much of it the cache had. None of a clip in segments,
        whose parts are prompts of their own.
        """
        if self.generation.segments:
            return []
        cached = self.usage().cached_tokens  # what is cached of a prompt is its beginning
        return [
            MediaTokens(
                sum(length for _, length in spans),
                sum(min(max(cached - start, 0), length) for start, length in spans),
            )
            for spans in self.generation.media_spans
        ]

    def timings(self) -> Timings:
        """Where the time went so far."""
        usage = self.usage()
        return Timings(
            image_decode_ms=self.generation.decode_ms,
            preprocess_ms=self.generation.preprocess_ms,
            queue_ms=usage.queue_ms,
            vision_ms=usage.vision_ms,
            prefill_ms=usage.prefill_ms,
            token_decode_ms=usage.decode_ms,
            ttft_ms=self.ttft_ms,
            total_ms=(time.monotonic() - self.arrival.monotonic_s) * 1e3,
        )

    @property
    def _num_unfinished(self) -> int:
        return sum(not choice.finished for choice in self.choices)

    def count(self, index: int, delta: Delta) -> None:
        """Note what has come of a choice."""
        now = time.monotonic()
        choice = self.choices[index]
        metrics = self.context.metrics
        if delta.token_ids:
            if self.ttft_ms is None:
                self.ttft_ms = (now - self.arrival.monotonic_s) * 1e3
                metrics.first_token(now - self.arrival.monotonic_s)
            if choice.last_s:
                metrics.tokens(now - choice.last_s, len(delta.token_ids))
            choice.last_s = now
        if delta.finish_reason is not None:
            choice.finished = True
            choice.usage = delta.usage
            metrics.choice_finished(delta, self.arrival.monotonic_s)


async def start(context: Context, request: Request, call: Call, arrival: Arrival) -> Answer:
    """Submit a call; returns when it is admitted.

    Raises:
        BeholderError: It is refused.
        ClientGone: The client left meanwhile; the work for it has been ended.
    """
    messages = context.images.resolve(call.messages)
    await asyncio.sleep(0)  # reading a large body held the loop: let others have a turn
    asked: dict[str, Any] = {"questions": call.questions} if call.questions else {}
    if call.segmenting is not None:
        asked["segmenting"] = call.segmenting
    submit = context.service.submit(
        messages,
        call.options,
        n=call.n,
        session_id=call.session_id,
        priority=call.priority,
        arrival_s=arrival.monotonic_s,
        **asked,
    )
    async with arrival.time_limit():
        generation = await while_connected(request.receive, submit)
    call.messages.clear()  # its encoded pictures need not live as long as the answer takes
    context.metrics.admitted(generation)
    num_choices = len(generation.branches) if call.questions else len(generation.segments) or call.n
    choices = [Choice(0.0) for _ in range(num_choices)]
    return Answer(context, arrival, generation, choices, images=list(generation.images))


async def collect(request: Request, answer: Answer, on_delta: Callable[[int, Delta], object]) -> None:
    """Run an answer to its end for a client that waits for the whole.

    Raises:
        BeholderError: It failed, or its time is over.
        ClientGone: The client left; the generation has been cancelled.
    """

    async def run() -> None:
        async with contextlib.aclosing(answer.deltas()) as deltas:
            async for index, delta in deltas:
                on_delta(index, delta)

    try:
        async with answer.arrival.time_limit():
            await while_connected(request.receive, run())
    finally:
        answer.generation.cancel()
