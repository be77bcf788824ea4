"""The server's side of the pipeline: prepares a request, admits it, and hands its deltas to whoever asked.

    submit ──▶ waiting ──▶ on a worker ──▶ in the engine ──▶ finished
                  │             │               │
                  └── refused ──┴─── rejected ──┴── failed (a process died)

What is open, and what other processes say of it, is in `server.open_calls`; jobs for workers in `server.worker_queue`;
which processes are up in `server.children`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from preprocess.errors import ServiceError
from preprocess.wire import (
    ChildState,
    EngineStats,
    GenerationOptions,
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
    Segmenting,
    TextPart,
    VideoPart,
)
from server.generation import Generation
from server.open_call import OpenCall
from server.open_calls import OpenCalls


class Dispatcher(OpenCalls):
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

    # ---- what routes use ---------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return not self.draining and self.children.ready

    @property
    def stats(self) -> EngineStats | None:
        """The engine's last report; its totals go on where an engine that died had left them."""
        return self._totals.stats

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
        return self.children.states()

    def deaths(self) -> dict[str, int]:
        """Deaths seen by this server process, by role."""
        return self.children.deaths()

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
        self.children.refuse_if_down()
        call = self._accept(messages, options, n, session_id, priority, arrival_s, segmenting, list(questions))
        try:
            prepared = await call.prepared
            assert isinstance(prepared, Prepared)
            generation = self._admit(call, prepared)
            outcomes = await asyncio.gather(*call.admissions.values(), return_exceptions=True)
        except asyncio.CancelledError:
            self.cancel(call)
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self.cancel(call)
                raise outcome
        return generation

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
        shown = await self._ask_worker(Preview(self._new_id(), part), part.num_bytes)
        assert isinstance(shown, Previewed)
        return shown

    async def _ask_worker(self, job: Look | Preview, num_bytes: int) -> Prepared | Looked | Previewed:
        """A worker's answer to what never reaches the engine."""
        self._refuse_if_draining()
        call = self._line_up(job, 1, num_bytes)
        try:
            answer = await call.prepared
        except asyncio.CancelledError:
            self.cancel(call)
            raise
        self._forget(call)
        return answer

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise ServiceError("The server is shutting down; send the request elsewhere or later.", code="draining")

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
    ) -> OpenCall:
        media = [part for message in messages for part in message.content if not isinstance(part, TextPart)]
        num_bytes = sum(part.num_bytes for part in media)
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
        num_clips = sum(isinstance(part, VideoPart) for part in media)
        return self._line_up(job, n, num_bytes, len(media) - num_clips, num_clips)

    def _new_id(self) -> str:
        self._serial += 1
        return f"{self.epoch}-{self._serial}"

    def _line_up(
        self, job: Job | Look | Preview, n: int, num_bytes: int, num_images: int = 0, num_clips: int = 0
    ) -> OpenCall:
        """Have a job done by a worker, or refuse it."""
        self._queue.check_room(num_bytes)
        answer = asyncio.get_running_loop().create_future()
        call = OpenCall(job.request_id, job, n, num_bytes, answer, num_images, num_clips)
        self._calls[job.request_id] = call
        self._queue.put(call)
        return call
