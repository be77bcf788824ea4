"""From an accepted call to its answer: runs the generation, counts it, and streams it as server-sent events or text.

    start ──▶ submit (refusals are still status codes) ──▶ Answer ──▶ deltas ──▶ JSON | event stream | text

Chat and captions differ only in what they make of the deltas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from preprocess.errors import BeholderError, ServiceError
from preprocess.wire import Delta, ImageInfo, Usage
from server.faults import error_body, internal_error, rejection
from server.intake import Call
from server.routes.connection import ClientGone, Heartbeat, time_limit, while_connected
from server.routes.context import Context
from server.service import Generation

HEARTBEAT_S = 10.0
LAST_WORD_S = 5.0
"""What a client that stopped reading gets to take the end of its stream."""
_log = logging.getLogger("beholder.server")


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

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """All deltas with their choice. Close it when leaving early.

        Raises:
            BeholderError: The generation failed.
        """
        metrics = self.context.metrics
        try:
            async for index, delta in self.generation:
                if delta.error is not None:
                    raise rejection(delta.error)
                if delta.finish_reason in {"abort", "error"}:
                    raise ServiceError("The generation was ended by the server; send it again.", code="aborted")
                self._count(index, delta)
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

    def _count(self, index: int, delta: Delta) -> None:
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


class Stream(Response):
    """Response that sends pieces as they come, and stops the generation when the client leaves.

    In an event stream a failure becomes a last event ``data: {"error": …}`` without ``[DONE]``, since clients take a
    cut stream for a whole answer. Plain text has no such word: there the connection is cut, and HTTP's chunks tell.

    Args:
        answer: What is streamed.
        pieces: The stream's bytes, made from `answer.deltas`.
        media_type: ``text/event-stream`` or plain text.
    """

    def __init__(
        self, answer: Answer, pieces: AsyncGenerator[bytes, None], media_type: str = "text/event-stream"
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._answer = answer
        self._pieces = pieces
        self._is_events = media_type == "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; return early when the client leaves."""
        try:
            with contextlib.suppress(ClientGone):
                await while_connected(receive, self._send_all(scope, send))
        finally:
            self._answer.generation.cancel()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        heartbeat = Heartbeat(lambda: _send_piece(send, b": ping\n\n"), HEARTBEAT_S)
        beating = asyncio.ensure_future(heartbeat.run()) if self._is_events else None
        failure: BeholderError | None = None
        try:
            async with self._answer.arrival.time_limit(), contextlib.aclosing(self._pieces):
                async for piece in self._pieces:
                    await _send_piece(send, piece)
                    heartbeat.sent()
        except BeholderError as error:
            failure = error
        except Exception:
            request_id = scope["state"]["request_id"]
            _log.exception("request %s: the stream failed", request_id)
            failure = internal_error(request_id)
        finally:
            if beating is not None:
                beating.cancel()
        if failure is not None:
            self._answer.context.metrics.refused(failure)
            if not self._is_events:
                return  # without its last message the response is cut
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if failure is not None:
                    await _send_piece(send, b"data: " + error_body(failure) + b"\n\n")
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            return  # it reads no more: cut the connection


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


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
