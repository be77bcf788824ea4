"""Jobs for the preprocess workers: those that wait, those on a worker, and what becomes of them when one dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from preprocess.arena import LeaseTable
from preprocess.errors import ClientError
from preprocess.wire import ChildState, ImagePart, Job, Look, Preview, TextPart, VideoPart
from preprocess.wire.framing import frames_of
from server.open_call import OpenCall

DEADLINE_REASON = "signal SIGALRM"
"""How a worker dies whose job overran its deadline: see `preprocess.worker`."""


class Send(Protocol):
    """Pushes a message to the process behind a socket name: ``"engine"``, ``"worker-0"``."""

    def __call__(self, name: str, /, *frames: bytes) -> None:
        """`frames` are one message: see `preprocess.wire.framing`."""


@dataclass
class _Worker:
    job: str = ""
    """Id of the job that it holds. Only the answer to this one counts: an answer to an earlier attempt at the same call
    tells of pixels in a lease that has ended."""
    call: OpenCall | None = None
    """Whose job that is."""


class WorkerQueue:
    """Lines jobs up and gives them to idle workers, oldest first; knows who has which.

    Args:
        send: Pushes messages to a worker.
        state_of: What is known of the worker of an index.
        num_workers: How many there are.
        leases: The arena's; a job that is sent has room for its pixels there, or sends them inline.
        most_for_one: Bytes that one job is leased at most; bounds are far above what most pictures take.
        pixel_bytes_per_image: Upper bound of one picture's pixels after preprocessing.
        pixel_bytes_per_clip: The same of a clip with the model's usual number of frames; more of them go inline.
        max_waiting: Most jobs that wait; one more is refused.
        max_waiting_bytes: Most encoded bytes that wait.
    """

    def __init__(
        self,
        send: Send,
        state_of: Callable[[int], ChildState],
        *,
        num_workers: int,
        leases: LeaseTable,
        most_for_one: int,
        pixel_bytes_per_image: int,
        pixel_bytes_per_clip: int,
        max_waiting: int,
        max_waiting_bytes: int,
    ) -> None:
        self.max_context = 0
        """Longest prompt + answer of the engine, in tokens; 0 until it has told it."""
        self._send = send
        self._state_of = state_of
        self._leases = leases
        self._most_for_one = most_for_one
        self._pixel_bytes_per_image = pixel_bytes_per_image
        self._pixel_bytes_per_clip = pixel_bytes_per_clip
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._workers = [_Worker() for _ in range(num_workers)]
        self._waiting: deque[OpenCall] = deque()
        self._waiting_bytes = 0

    def check_room(self, num_bytes: int) -> None:
        """Raises `ClientError` (429) when no further job of so many encoded bytes may wait."""
        full = len(self._waiting) >= self._max_waiting
        if full or (self._waiting and self._waiting_bytes + num_bytes > self._max_waiting_bytes):
            what = f"{len(self._waiting)} requests" if full else f"{self._waiting_bytes >> 20} MiB of pictures"
            raise ClientError(
                f"The server is busy: {what} wait to be prepared; try again in a moment.",
                status=429,
                code="queue_full",
                retry_after_s=1.0,
            )

    def put(self, call: OpenCall) -> None:
        """Line a call's job up behind the others."""
        self._waiting.append(call)
        self._waiting_bytes += call.waiting_bytes
        self.pump()

    def put_first(self, call: OpenCall) -> None:
        """Line it up again, before all others; `pump` follows when a worker is up."""
        self._waiting.appendleft(call)
        self._waiting_bytes += call.waiting_bytes

    def withdraw(self, call: OpenCall) -> None:
        """Nobody waits for it any more. A worker that has it already goes on."""
        if call in self._waiting:
            self._leave(call)

    def pump(self) -> None:
        """Give waiting jobs to idle workers."""
        for index, worker in enumerate(self._workers):
            if not self._waiting:
                return
            state = self._state_of(index)
            if not state.up or worker.call is not None:
                continue
            call = self._waiting[0]
            self._leave(call)
            call.worker = index
            worker.call, worker.job = call, f"{call.request_id}/{call.deaths}"
            job = msgspec.structs.replace(self._with_lease(call), request_id=worker.job, generation=state.generation)
            self._send(
                f"worker-{index}",
                *frames_of(job, has_media=not isinstance(job, Job) or bool(call.num_images + call.num_clips)),
            )

    def answered(self, job_id: str) -> OpenCall | None:
        """Free the worker that answered; None when that job is nobody's any more."""
        worker = next((worker for worker in self._workers if worker.job == job_id), None)
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
        self.pump()
        return call

    def died(self, index: int) -> OpenCall | None:
        """A worker is gone; the call whose job it held."""
        worker = self._workers[index]
        call, worker.call, worker.job = worker.call, None, ""
        return call

    def _with_lease(self, call: OpenCall) -> Job | Look | Preview:
        """The call's job with room for its pixels; looks and previews need none."""
        if not isinstance(call.job, Job):
            return call.job
        wanted = call.num_images * self._pixel_bytes_per_image + call.num_clips * self._pixel_bytes_per_clip
        call.lease = self._leases.lease(min(wanted, self._most_for_one))  # what does not fit goes inline
        return msgspec.structs.replace(call.job, lease=call.lease, max_context=self.max_context)

    def _leave(self, call: OpenCall) -> None:
        self._waiting.remove(call)
        self._waiting_bytes -= call.waiting_bytes


def killed_worker(job: Job | Look | Preview, reason: str) -> ClientError:
    """Refuses what a worker died of."""
    parts = [part for message in job.messages for part in message.content] if isinstance(job, Job) else []
    if isinstance(job, Preview):
        parts = [job.part]
    if isinstance(job, Job) and all(isinstance(part, TextPart) for part in parts):
        return ClientError(
            "The text of this request could not be prepared in the time allowed; send a shorter one.",
            status=422,
            code="text_undecodable",
        )
    is_clip = any(isinstance(part, VideoPart) for part in parts)
    what, kind = ("A clip", "video") if is_clip else ("A picture", "image")
    if reason == DEADLINE_REASON:
        hint = "shorter, smaller, or with more key frames" if is_clip else "smaller or in a simpler format"
        return ClientError(
            f"{what} of this request took too long to decode; send it {hint}.", status=422, code=f"{kind}_timeout"
        )
    hint = "an MP4 with H.264 video" if is_clip else "a plain JPEG or PNG"
    return ClientError(
        f"{what} of this request could not be decoded safely; send it in another format, such as {hint}.",
        status=422,
        code=f"{kind}_undecodable",
    )
