"""The pipeline inside one process: the classes that the server's processes wrap, driven by whoever waits for an answer.

Job ─▶ Preparer ─▶ Engine ─▶ Detokenizer ─▶ deltas
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from preprocess.errors import ServiceError
from preprocess.wire import (
    ClipInfo,
    Delta,
    EngineRequest,
    GenerationOptions,
    ImageInfo,
    Job,
    Lease,
    Message,
    OutputStart,
    Pixels,
    Prepared,
    Refused,
    Rejected,
    Segmenting,
    Usage,
)
from server.faults import rejection
from server.sequences import sequences_of
from server.settings import Settings
from server.turns import Turns

if TYPE_CHECKING:
    import torch

_NO_LIMIT: Final = 1 << 40
SESSION: Final = "offline"
"""All requests of one `Beholder` are one session: what it said of a picture helps to guess what it says of the next."""


class Caption(msgspec.Struct, frozen=True):
    """What was said about one request, what it cost, and how long it took."""

    text: str
    finish_reason: str
    images: list[ImageInfo]
    usage: Usage
    image_decode_ms: float
    preprocess_ms: float
    ttft_ms: float
    total_ms: float
    clips: list[ClipInfo] = msgspec.field(default_factory=list)


class Running:
    """One request in the engine, and the deltas that nobody has taken yet."""

    def __init__(self, request_id: str, prepared: Prepared, started_s: float) -> None:
        self.request_id = request_id
        self.prepared = prepared
        self.started_s = started_s
        self.first_token_s: float | None = None
        self.deltas: deque[Delta] = deque()
        self.text: list[str] = []
        self.last: Delta | None = None

    def put(self, delta: Delta) -> None:
        """Note the next delta; the one that ends the request is `last`."""
        if self.first_token_s is None and delta.token_ids:
            self.first_token_s = time.monotonic()
        if delta.text:
            self.text.append(delta.text)
        if delta.finish_reason is not None:
            self.last = delta
        self.deltas.append(delta)

    def caption(self) -> Caption:
        """The finished answer. Raises what made it fail."""
        assert self.last is not None
        if self.last.error is not None:
            raise rejection(self.last.error)
        if self.last.usage is None or self.last.finish_reason is None:
            raise ServiceError("This Beholder was closed before the answer was whole.", code="closed")
        now = time.monotonic()
        return Caption(
            text="".join(self.text),
            finish_reason=self.last.finish_reason,
            images=self.prepared.images,
            usage=self.last.usage,
            image_decode_ms=self.prepared.decode_ms,
            preprocess_ms=self.prepared.preprocess_ms,
            ttft_ms=((self.first_token_s or now) - self.started_s) * 1e3,
            total_ms=(now - self.started_s) * 1e3,
            clips=self.prepared.clips,
        )


class Stages:
    """Preparer, engine and detokenizer of a model, and the requests in them, from any thread.

    Whoever waits for an answer steps the engine, for all: each thread in its turn, and none whose turn comes after
    another's step before it has looked at what that gave.

    Raises:
        ServiceError: The model folder cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        """`settings`: resolved."""
        from engine.core import Engine  # imports torch
        from engine.limits import with_vision_cache
        from engine.load import load_runner
        from preprocess.detokenise import Detokenizer
        from preprocess.prepare import Preparer

        config = msgspec.structs.replace(settings.engine_config(), max_waiting=_NO_LIMIT, max_waiting_tokens=_NO_LIMIT)
        self._preparer = Preparer(settings.preprocess_config(), None)
        runner = load_runner(config)
        self._engine = Engine(with_vision_cache(config, runner), runner)
        self._preparer.limit_context(self._engine.max_context)
        self._detokenizer = Detokenizer(config.model)
        self._running: dict[str, Running] = {}
        self._serial = itertools.count()
        self._turns = Turns()
        self._num_steps = 0
        self._abandoned: deque[str] = deque()
        """Ids of requests that nobody waits for any more; the next step aborts them."""
        self._closed = False

    def close(self) -> None:
        """End every running request: whoever waits for one, in another thread, gets an error. What was loaded is freed
        with this object.
        """
        self._closed = True
        if not self._turns.is_mine:  # else a signal's handler closes what it interrupts, which then ends with its turn
            with self._turn():
                pass

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """This thread alone uses engine and detokenizer. What runs in them ends with the turn if `close` was called."""
        with self._turns:
            try:
                yield
            finally:
                if self._closed:
                    self._engine.reset()
                    self._detokenizer.reset()
                    for running in list(self._running.values()):
                        running.put(Delta(running.request_id, "", [], finish_reason="abort"))
                    self._running.clear()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ServiceError("This Beholder was closed; make another one.", code="closed")

    def _submit(self, messages: list[Message], options: GenerationOptions) -> Running:
        return self._submit_all(messages, options)[0]

    def _submit_all(
        self, messages: list[Message], options: GenerationOptions, segmenting: Segmenting | None = None
    ) -> list[Running]:
        """One request, or one for each part of a clip."""
        started_s = time.monotonic()
        request_id = f"offline-{next(self._serial)}"
        job = Job(request_id, messages, options, Lease(), started_s, session_id=SESSION, segmenting=segmenting)
        prepared = self._prepare(job)
        submitted: list[Running] = []
        try:
            for index, request in enumerate(sequences_of(prepared, 1)):
                wanted = msgspec.structs.replace(request, request_id=f"{request_id}.{index}")
                submitted.append(self._start(prepared, wanted, started_s))
        except BaseException:
            for running in submitted:
                self._cancel(running)
            raise
        return submitted

    def _prepare(self, job: Job) -> Prepared:
        self._refuse_if_closed()
        prepared = self._preparer.prepare(job)
        if isinstance(prepared, Refused):
            raise rejection(prepared)
        return prepared

    def _start(self, prepared: Prepared, request: EngineRequest, started_s: float) -> Running:
        running = Running(request.request_id, prepared, started_s)
        with self._turn():
            self._refuse_if_closed()
            admission = self._engine.submit(request, _pixels)
            if isinstance(admission, Rejected):
                raise rejection(admission)
            self._running[request.request_id] = running
        return running

    def _step(self) -> None:
        """Returns after one engine step for all requests, this thread's or another's."""
        num_steps = self._num_steps
        with self._turn():
            if self._num_steps == num_steps:
                self._compute()

    def _compute(self) -> None:
        """A step, in this thread's turn; what it made goes to those that it belongs to."""
        if self._closed:
            return
        self._num_steps += 1
        while self._abandoned:
            self._engine.abort(self._abandoned.popleft())
        for output in self._engine.step():
            if isinstance(output, OutputStart):
                self._detokenizer.start(output)
                continue
            deltas, stops = self._detokenizer.feed(output)
            for stop in stops:
                self._engine.stop(stop.request_id, stop.num_tokens)
            for delta in deltas:
                running = self._running.get(delta.request_id)
                if running is not None:
                    running.put(delta)
                    if running.last is not None:
                        self._running.pop(delta.request_id, None)

    def _finish(self, running: Running) -> Caption:
        try:
            while running.last is None:
                self._step()
        finally:
            self._cancel(running)
        return running.caption()

    def _pieces(self, running: Running) -> Iterator[str]:
        """The answer's text as it comes, after an empty piece that is there already: a generator that nobody has asked
        for anything would not stop the work when it is closed.
        """
        try:
            yield ""
            while True:
                while running.deltas:
                    text = running.deltas.popleft().text
                    if text:
                        yield text
                if running.last is not None:
                    break
                self._step()
        finally:
            self._cancel(running)
        running.caption()  # raises what made it fail

    def _cancel(self, running: Running) -> None:
        """Stop a request that has not finished; its memory is free after the next step.

        The garbage collector may call this anywhere, to end a stream that was dropped: even within this thread's turn.
        """
        if self._running.pop(running.request_id, None) is None:
            return
        self._abandoned.append(running.request_id)
        if self._turns.is_mine or sys.is_finalizing():  # at the end a thread that is gone for good may have the turn
            return
        with self._turn():
            self._compute()


def _pixels(pixels: Pixels) -> torch.Tensor:
    """uint8 (tiles, height, width, 3)."""
    import torch

    return torch.frombuffer(bytearray(pixels.inline), dtype=torch.uint8).view(pixels.shape)
