"""The server's side of the pipeline: prepares a request, admits it, and hands its deltas to whoever asked.

    submit ──▶ waiting ──▶ on a worker ──▶ in the engine ──▶ finished
                  │             │               │
                  └── refused ──┴─── rejected ──┴── failed (a process died)

All state of a request lives in one `_Call`, owned here. A lease of the arena ends when the engine can no longer read
it: at the last finish event, or at the engine's death, not when the client goes away.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from preprocess.arena import LeaseTable
from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import (
    Abort,
    Admitted,
    Branch,
    ChildState,
    ClipInfo,
    Delta,
    Deltas,
    DetokenizerReset,
    Drain,
    EngineRequest,
    EngineStats,
    GenerationOptions,
    ImageInfo,
    ImagePart,
    Job,
    Lease,
    Look,
    Looked,
    Message,
    Prepared,
    Preview,
    Previewed,
    Question,
    Refused,
    Rejected,
    Reset,
    ResetDone,
    Role,
    Segmenting,
    ServerInput,
    TextPart,
    VideoPart,
)
from server.faults import rejection
from server.sequences import sequences_of

DEADLINE_REASON = "signal SIGALRM"
"""How a worker dies whose job overran its deadline: see `preprocess.worker`."""

Send = Callable[[str, bytes], None]
"""Pushes bytes to the process behind a socket name: ``"engine"``, ``"worker-0"``."""


@dataclass
class _Child:
    state: ChildState
    deaths: int = 0
    job: str = ""
    """Id of the job that this worker holds. Only the answer to this one counts: an answer to an earlier attempt at the
    same call tells of pixels in a lease that has ended."""
    call: _Call | None = None
    """Whose job that is."""
    is_used: bool = False
    """Whether its present process gets work, and whoever listens has been told so."""

    @property
    def up(self) -> bool:
        return self.state.up


@dataclass
class _Call:
    """One submitted request, from `submit` to the finish of its last choice."""

    request_id: str
    job: Job | Look | Preview
    num_choices: int
    waiting_bytes: int
    prepared: asyncio.Future[Prepared | Looked | Previewed]
    lease: Lease = field(default_factory=Lease)
    worker: int | None = None
    admissions: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    unfinished: dict[str, None] = field(default_factory=dict)
    """Engine request ids sent and not yet finished, in the order of their choices."""
    generation: Generation | None = None
    cancelled: bool = False
    deaths: int = 0
    """Workers that died with it."""


class Generation:
    """The answer to one submitted request: what preprocessing found, then deltas of all choices.

    Iterate once: ``async for choice_index, delta in generation``. Ends when every choice has finished; raises
    `ServiceError` when a process died under it. Leaving early needs `cancel`.
    """

    def __init__(self, dispatcher: Dispatcher, call: _Call, prepared: Prepared) -> None:
        self.request_id = call.request_id
        self.images: list[ImageInfo] = prepared.images
        self.clips: list[ClipInfo] = prepared.clips
        self.media_spans: list[list[tuple[int, int]]] = [item.spans for item in prepared.request.media]
        self.segments: list[tuple[float, float]] = prepared.segments
        self.branches: list[Branch] = prepared.branches
        self.num_prompt_tokens = prepared.request.num_prompt_tokens
        self.decode_ms = prepared.decode_ms
        self.preprocess_ms = prepared.preprocess_ms
        self.num_choices = call.num_choices
        self._dispatcher = dispatcher
        self._call = call
        self._queue: asyncio.Queue[tuple[int, Delta] | BeholderError] = asyncio.Queue()
        self._open = call.num_choices

    def put(self, item: tuple[int, Delta] | BeholderError) -> None:
        """Called by the dispatcher only."""
        self._queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        while self._open:
            item = await self._queue.get()
            if isinstance(item, BeholderError):
                self._open = 0
                raise item
            if item[1].finish_reason is not None:
                self._open -= 1
            if item[1].error is not None:
                raise rejection(item[1].error)
            yield item

    def cancel(self) -> None:
        """The client is gone: stop the work within one step. Harmless when finished or repeated."""
        self._dispatcher.cancel(self._call)


class Dispatcher:
    """Owns every request of this server process. Lives on one event loop; nothing here blocks or decodes media.

    Args:
        send: Pushes bytes to a child by socket name.
        num_workers: Preprocess workers that the launcher runs.
        arena_size: Bytes of the pixel arena, which this object leases out.
        pixel_bytes_per_image: Upper bound of one picture's pixels after preprocessing.
        pixel_bytes_per_clip: The same of a clip with the model's usual number of frames; more of them go inline.
        max_waiting: Most requests that wait for a worker; one more is refused.
        max_waiting_bytes: Most encoded bytes that wait for a worker.
    """

    def __init__(
        self,
        send: Send,
        *,
        num_workers: int,
        arena_size: int,
        pixel_bytes_per_image: int,
        pixel_bytes_per_clip: int = 0,
        max_waiting: int,
        max_waiting_bytes: int,
    ) -> None:
        self.epoch = secrets.token_hex(6)
        self.stats: EngineStats | None = None
        self.draining = False
        self.leases = LeaseTable(arena_size)
        self._most_for_one = arena_size // max(num_workers, 1)  # bounds are far above what most pictures take
        roles: list[tuple[Role, int]] = [("engine", 0), ("detokenizer", 0)]
        roles += [("preprocess", index) for index in range(num_workers)]
        self._children = {place: _Child(ChildState(*place, up=False, reason="starting")) for place in roles}
        self.on_drain: Callable[[float], None] = lambda _: None
        self.on_use: Callable[[ChildState], None] = lambda _: None
        """Called when a child that came up gets work from now on: until then requests may be refused for want of it."""
        self._send_bytes = send
        self._pixel_bytes_per_image = pixel_bytes_per_image
        self._pixel_bytes_per_clip = pixel_bytes_per_clip
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[_Call] = deque()
        self._waiting_bytes = 0
        self._calls: dict[str, _Call] = {}
        self._by_engine_id: dict[str, tuple[_Call, int]] = {}
        self._leases_until_reset: list[Lease] = []
        self._serial = 0
        self._reset_sent = False
        self._engine_reset = False
        self._max_context = 0  # until the engine has told it
        self._detokenizer_reset = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ServerInput] = msgspec.msgpack.Decoder(ServerInput)

    # ---- what routes use ---------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return not self.draining and self._pipeline_up and any(self._worker(i).up for i in self._workers)

    @property
    def num_preparing(self) -> int:
        """Requests before the engine: waiting for a worker, or on one."""
        return sum(not call.prepared.done() for call in self._calls.values())

    @property
    def num_open(self) -> int:
        """Requests of any state."""
        return len(self._calls)

    @property
    def arena_bytes_used(self) -> int:
        """Bytes of the arena under lease."""
        return self.leases.used

    def state(self) -> dict[str, ChildState]:
        """Every child's last known state, by a name such as ``preprocess-0``."""
        return {
            role if role != "preprocess" else f"preprocess-{index}": child.state
            for (role, index), child in self._children.items()
        }

    def deaths(self) -> dict[str, int]:
        """Deaths seen by this server process, by role."""
        totals: dict[str, int] = {}
        for (role, _), child in self._children.items():
            totals[role] = totals.get(role, 0) + child.deaths
        return totals

    async def submit(
        self,
        messages: list[Message],
        options: GenerationOptions,
        *,
        n: int = 1,
        session_id: str = "",
        priority: int = 0,
        arrival_s: float | None = None,
        segmenting: Segmenting | None = None,
        questions: Sequence[Question] = (),
    ) -> Generation:
        """Prepare and admit one request of `n` choices, or of one for each branch of its questions. Returns once the
        engine has queued all of them.

        With `segmenting` the choices are the parts of the request's one clip, however many there are.

        Raises:
            ClientError: It cannot be served as sent, or the queues are full (429).
            ServiceError: Draining, a process is down, or one died under it (503).
        """
        self._refuse_if_draining()
        self._refuse_if_down()
        call = self._accept(messages, options, n, session_id, priority, arrival_s, segmenting, list(questions))
        try:
            prepared = await call.prepared
            assert isinstance(prepared, Prepared)
            self._admit(call, prepared)
            outcomes = await asyncio.gather(*call.admissions.values(), return_exceptions=True)
        except asyncio.CancelledError:
            self.cancel(call)
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self.cancel(call)
                raise outcome
        assert call.generation is not None
        return call.generation

    async def look(self, data: bytes, reference: bytes = b"") -> Looked:
        """Have a preprocess worker compare a frame with an earlier one's thumbnail.

        Raises:
            ClientError: It is no picture, or the queue is full (429).
            ServiceError: Draining.
        """
        looked = await self._ask_worker(Look(self._new_id(), data, reference), len(data))
        assert isinstance(looked, Looked)
        return looked

    async def preview(self, part: ImagePart | VideoPart) -> Previewed:
        """Have a preprocess worker show what the model would see of a picture or clip.

        Raises:
            ClientError: It is none, or the queue is full (429).
            ServiceError: Draining.
        """
        shown = await self._ask_worker(Preview(self._new_id(), part), len(part.data) + len(part.data_url))
        assert isinstance(shown, Previewed)
        return shown

    async def _ask_worker(self, job: Look | Preview, num_bytes: int) -> Prepared | Looked | Previewed:
        """A worker's answer to what never reaches the engine."""
        self._refuse_if_draining()
        call = self._queue(job, 1, num_bytes)
        try:
            answer = await call.prepared
        except asyncio.CancelledError:
            self.cancel(call)
            raise
        self._forget(call)
        return answer

    def cancel(self, call: _Call) -> None:
        """Stop what is left of a call; its memory is freed when the process that uses it has let go."""
        if call.cancelled or call.request_id not in self._calls:
            return
        call.cancelled = True
        for engine_id in call.unfinished:
            self._send("engine", Abort(engine_id))
        if call in self._waiting:
            self._leave_queue(call)
        if call.worker is None and not call.unfinished:
            self._forget(call)

    def fail_all(self) -> None:
        """The grace time is over: end every request with a clear error."""
        error = ServiceError("the server shut down before this request finished; send it again", code="draining")
        for call in list(self._calls.values()):
            self._fail(call, error)

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise ServiceError("the server is shutting down; send the request elsewhere or later", code="draining")

    def _refuse_if_down(self) -> None:
        if not self._pipeline_up:
            down = [f"the {name} is down ({state.reason})" for name, state in self.state().items() if not state.up]
            raise ServiceError(
                f"not ready yet: {', '.join(down) or 'the engine is being reset'}; /ready tells when it is",
                code="not_ready",
                retry_after_s=1.0,
            )

    def _accept(
        self,
        messages: list[Message],
        options: GenerationOptions,
        n: int,
        session_id: str,
        priority: int,
        arrival_s: float | None,
        segmenting: Segmenting | None,
        questions: list[Question],
    ) -> _Call:
        media = [part for message in messages for part in message.content if not isinstance(part, TextPart)]
        num_bytes = sum(len(part.data) + len(part.data_url) for part in media)
        job = Job(
            self._new_id(),
            messages,
            options,
            Lease(),
            arrival_s if arrival_s is not None else time.monotonic(),
            session_id,
            priority,
            segmenting,
            questions=questions,
        )
        return self._queue(job, n, num_bytes)

    def _new_id(self) -> str:
        self._serial += 1
        return f"{self.epoch}-{self._serial}"

    def _queue(self, job: Job | Look | Preview, n: int, num_bytes: int) -> _Call:
        """Line a job up for a worker, or refuse it."""
        full = len(self._waiting) >= self._max_waiting
        if full or (self._waiting and self._waiting_bytes + num_bytes > self._max_waiting_bytes):
            what = f"{len(self._waiting)} requests" if full else f"{self._waiting_bytes >> 20} MiB of pictures"
            raise ClientError(
                f"the server is busy: {what} wait to be prepared; try again in a moment",
                status=429,
                code="queue_full",
                retry_after_s=1.0,
            )
        call = _Call(job.request_id, job, n, num_bytes, asyncio.get_running_loop().create_future())
        self._calls[job.request_id] = call
        self._waiting.append(call)
        self._waiting_bytes += num_bytes
        self._pump()
        return call

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Give waiting jobs to idle workers, oldest first."""
        for index in self._workers:
            worker = self._worker(index)
            if not self._waiting:
                return
            if not worker.up or worker.call is not None:
                continue
            call = self._waiting[0]
            self._leave_queue(call)
            call.worker = index
            worker.call, worker.job = call, f"{call.request_id}/{call.deaths}"
            job = msgspec.structs.replace(
                self._with_lease(call), request_id=worker.job, generation=worker.state.generation
            )
            self._send(f"worker-{index}", job)

    def _with_lease(self, call: _Call) -> Job | Look | Preview:
        """The call's job with room for its pixels; looks and previews need none."""
        if not isinstance(call.job, Job):
            return call.job
        parts = [part for message in call.job.messages for part in message.content]
        num_images = sum(isinstance(part, ImagePart) for part in parts)
        num_clips = sum(isinstance(part, VideoPart) for part in parts)
        wanted = num_images * self._pixel_bytes_per_image + num_clips * self._pixel_bytes_per_clip
        call.lease = self.leases.lease(min(wanted, self._most_for_one))  # what does not fit goes inline
        return msgspec.structs.replace(call.job, lease=call.lease, max_context=self._max_context)

    def _leave_queue(self, call: _Call) -> None:
        self._waiting.remove(call)
        self._waiting_bytes -= call.waiting_bytes

    def _worker_done(self, job_id: str) -> _Call | None:
        """Free the worker that answered; None when nobody wants the answer any more."""
        worker = next((self._worker(i) for i in self._workers if self._worker(i).job == job_id), None)
        call = worker.call if worker is not None else None
        if worker is None or call is None:
            return None
        worker.call, worker.job = None, ""
        call.worker = None
        if isinstance(call.job, Job):  # the encoded pictures have done their duty
            call.job = msgspec.structs.replace(call.job, messages=[])
        elif isinstance(call.job, Look):
            call.job = msgspec.structs.replace(call.job, data=b"")
        else:
            call.job = msgspec.structs.replace(call.job, part=ImagePart())
        self._pump()
        if call.cancelled:
            self._forget(call)
            return None
        return call if call.request_id in self._calls else None

    def _on_prepared(self, prepared: Prepared) -> None:
        call = self._worker_done(prepared.request_id)
        if call is not None and not call.prepared.done():
            call.lease = self.leases.shrink(call.lease, prepared.arena_bytes)
            call.prepared.set_result(prepared)

    def _on_worker_answer(self, answer: Looked | Previewed) -> None:
        call = self._worker_done(answer.request_id)
        if call is not None and not call.prepared.done():
            call.prepared.set_result(answer)

    def _on_refused(self, refused: Refused) -> None:
        call = self._worker_done(refused.request_id)
        if call is not None:
            self._fail(call, rejection(refused))

    def _on_worker_death(self, index: int, reason: str) -> None:
        """Once is bad luck, unless the deadline ended it: another worker tries. Twice is its media's doing."""
        worker = self._worker(index)
        call, worker.call, worker.job = worker.call, None, ""
        if call is None or call.request_id not in self._calls:
            return
        call.worker = None
        call.deaths += 1
        self.leases.release(call.lease)
        call.lease = Lease()
        if call.cancelled:
            self._forget(call)
        elif reason == DEADLINE_REASON or call.deaths > 1:
            self._fail(call, _killed_worker(call.job, reason))
        else:
            self._waiting.appendleft(call)
            self._waiting_bytes += call.waiting_bytes

    # ---- engine ------------------------------------------------------------------------------------------------------

    def _admit(self, call: _Call, prepared: Prepared) -> None:
        """Send one engine request a choice: the prefix cache computes their prompt once (segments have their own)."""
        try:
            self._refuse_if_down()
        except ServiceError:
            self._forget(call)
            raise
        sequences = sequences_of(prepared, call.num_choices)
        call.num_choices = len(sequences)
        call.generation = Generation(self, call, prepared)
        loop = asyncio.get_running_loop()
        for choice, sequence in enumerate(sequences):
            engine_id = f"{call.request_id}.{choice}"
            call.admissions[engine_id] = loop.create_future()
            call.unfinished[engine_id] = None
            self._by_engine_id[engine_id] = (call, choice)
            self._send("engine", msgspec.structs.replace(sequence, request_id=engine_id))

    def _on_admission(self, request_id: str, error: BeholderError | None) -> None:
        found = self._by_engine_id.get(request_id)
        if found is None:
            return
        call, _ = found
        admission = call.admissions[request_id]
        if not admission.done():
            if error is None:
                admission.set_result(None)
            else:
                admission.set_exception(error)
        if error is not None:
            self._finish(request_id)

    def _on_deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            found = self._by_engine_id.get(delta.request_id)
            if found is None:
                continue
            call, choice = found
            self._on_admission(delta.request_id, None)  # the engine's own word may take longer on its way
            if call.generation is not None and not call.cancelled:
                call.generation.put((choice, delta))
            if delta.finish_reason is not None:
                self._finish(delta.request_id)

    def _finish(self, engine_id: str) -> None:
        call, _ = self._by_engine_id.pop(engine_id)
        call.unfinished.pop(engine_id, None)
        if not call.unfinished:
            self._forget(call)

    def _forget(self, call: _Call) -> None:
        """The last user of the call's pixels is done."""
        if self._calls.pop(call.request_id, None) is not None:
            self.leases.release(call.lease)
            for engine_id in call.unfinished:
                self._by_engine_id.pop(engine_id, None)

    def _fail(self, call: _Call, error: BeholderError) -> None:
        """End a call whose remaining work is known to be gone."""
        self._forget(call)
        if not call.prepared.done():
            call.prepared.set_exception(error)
            call.prepared.exception()  # a client that left is no unhandled error
        for admission in call.admissions.values():
            if not admission.done():
                admission.set_exception(error)
                admission.exception()
        if call.generation is not None:
            call.generation.put(error)

    def _fail_engine_calls(self, error: BeholderError, *, engine_lives: bool) -> None:
        """A living engine may read their pixels until it has reset: then their leases wait for that."""
        for call in [call for call in self._calls.values() if call.unfinished]:
            if engine_lives:
                self._leases_until_reset.append(call.lease)
                call.lease = Lease()
            self._fail(call, error)

    # ---- what arrives ------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Handle one message from any other process."""
        message = self._decoder.decode(data)
        if isinstance(message, Deltas):
            self._on_deltas(message.deltas)
        elif isinstance(message, Prepared):
            self._on_prepared(message)
        elif isinstance(message, Looked | Previewed):
            self._on_worker_answer(message)
        elif isinstance(message, Refused):
            self._on_refused(message)
        elif isinstance(message, Admitted):
            self._on_admission(message.request_id, None)
        elif isinstance(message, Rejected):
            self._on_admission(message.request_id, rejection(message))
        elif isinstance(message, EngineStats):
            self.stats = message
        elif isinstance(message, ResetDone):
            self._on_engine_reset(message)
        elif isinstance(message, DetokenizerReset):
            self._detokenizer_reset |= message.epoch == self.epoch
            self._note_use()
        elif isinstance(message, ChildState):
            self._on_child(message)
        else:
            self._on_drain(message)

    def _on_child(self, state: ChildState) -> None:
        child = self._children[state.role, state.index]
        child.state = state
        child.is_used = False
        if not state.up:
            child.deaths += 1
            if state.role == "preprocess":
                self._on_worker_death(state.index, state.reason)
            else:
                self._reset_sent = self._engine_reset = self._detokenizer_reset = False
                if state.role == "engine" and self.stats is not None:  # its gauges tell of what is gone
                    self.stats = msgspec.structs.replace(
                        self.stats, num_running=0, num_waiting=0, kv_slots_used=0, vision_cache_bytes=0
                    )
                self._fail_engine_calls(
                    ServiceError(
                        f"the {state.role} stopped ({state.reason}) and is being restarted; send the request again",
                        code=f"{state.role}_restarting",
                        retry_after_s=1.0,
                    ),
                    engine_lives=state.role == "detokenizer",
                )
        if self._children["engine", 0].up and self._children["detokenizer", 0].up and not self._reset_sent:
            self._reset_sent = True
            self._send("engine", Reset(self.epoch, self._children["engine", 0].state.generation))
        self._note_use()
        self._pump()

    def _note_use(self) -> None:
        """Tell of the children that get work since the last call: engine and detokenizer only once both are reset."""
        for (role, _), child in self._children.items():
            if child.up and not child.is_used and (role == "preprocess" or self._pipeline_up):
                child.is_used = True
                self.on_use(child.state)

    def _on_engine_reset(self, done: ResetDone) -> None:
        if done.epoch == self.epoch:
            self._engine_reset = True
            self._max_context = done.max_context
            for lease in self._leases_until_reset:
                self.leases.release(lease)
            self._leases_until_reset.clear()
            self._note_use()

    def _on_drain(self, drain: Drain) -> None:
        self.draining = True
        self.on_drain(drain.grace_s)

    # ---- small things ------------------------------------------------------------------------------------------------

    @property
    def _workers(self) -> range:
        return range(len(self._children) - 2)

    def _worker(self, index: int) -> _Child:
        return self._children["preprocess", index]

    @property
    def _pipeline_up(self) -> bool:
        both_up = self._children["engine", 0].up and self._children["detokenizer", 0].up
        return both_up and self._engine_reset and self._detokenizer_reset

    def _send(self, name: str, message: Job | Look | Preview | EngineRequest | Abort | Reset) -> None:
        self._send_bytes(name, self._encoder.encode(message))


def _killed_worker(job: Job | Look | Preview, reason: str) -> ClientError:
    """Refuses what a worker died of."""
    parts = [part for message in job.messages for part in message.content] if isinstance(job, Job) else []
    if isinstance(job, Preview):
        parts = [job.part]
    if isinstance(job, Job) and all(isinstance(part, TextPart) for part in parts):
        return ClientError(
            "the text of this request could not be prepared in the time allowed; send a shorter one",
            status=422,
            code="text_undecodable",
        )
    is_clip = any(isinstance(part, VideoPart) for part in parts)
    what, kind = ("a clip", "video") if is_clip else ("a picture", "image")
    if reason == DEADLINE_REASON:
        hint = "shorter, smaller, or with more key frames" if is_clip else "smaller or in a simpler format"
        return ClientError(
            f"{what} of this request took too long to decode; send it {hint}", status=422, code=f"{kind}_timeout"
        )
    hint = "an MP4 with H.264 video" if is_clip else "a plain JPEG or PNG"
    return ClientError(
        f"{what} of this request could not be decoded safely; send it in another format, such as {hint}",
        status=422,
        code=f"{kind}_undecodable",
    )
