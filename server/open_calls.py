"""Requests that are not finished, and what the other processes say about them.

All state of a request lives in one `OpenCall`, owned here. A lease of the arena ends when the engine can no longer read
it: at the last finish event, or at the engine's death, not when the client goes away.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable

import msgspec

from preprocess.arena import LeaseTable
from preprocess.errors import BeholderError, ServiceError
from preprocess.wire import (
    Abort,
    Admitted,
    ChildState,
    Delta,
    Deltas,
    DetokenizerReset,
    Drain,
    EngineRequest,
    EngineStats,
    Lease,
    Looked,
    Prepared,
    Previewed,
    Refused,
    Rejected,
    Reset,
    ResetDone,
    ServerInput,
)
from server.children import Children
from server.engine_totals import EngineTotals
from server.faults import rejection
from server.generation import Generation
from server.open_call import OpenCall
from server.sequences import sequences_of
from server.worker_queue import DEADLINE_REASON, Send, WorkerQueue, killed_worker


class OpenCalls:
    """The requests of this server process; see `server.dispatcher` for its arguments. Lives on one event loop."""

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
        self.draining = False
        self.on_drain: Callable[[float], None] = lambda _: None
        self.on_step: Callable[[], None] = lambda: None
        """Called when all that a step said has been handed on."""
        self.leases = LeaseTable(arena_size)
        self.children = Children(num_workers)
        self._queue = WorkerQueue(
            send,
            self.children.worker,
            num_workers=num_workers,
            leases=self.leases,
            most_for_one=arena_size // max(num_workers, 1),
            pixel_bytes_per_image=pixel_bytes_per_image,
            pixel_bytes_per_clip=pixel_bytes_per_clip,
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
        )
        self._send_frames = send
        self._totals = EngineTotals()
        self._calls: dict[str, OpenCall] = {}
        self._by_engine_id: dict[str, tuple[OpenCall, int]] = {}
        self._leases_until_reset: list[Lease] = []
        self._serial = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ServerInput] = msgspec.msgpack.Decoder(ServerInput)

    def cancel(self, call: OpenCall) -> None:
        """Stop what is left of a call; its memory is freed when the process that uses it has let go."""
        if call.cancelled or call.request_id not in self._calls:
            return
        call.cancelled = True
        for engine_id in call.unfinished:
            self._send("engine", Abort(engine_id))
        self._queue.withdraw(call)
        if call.worker is None and not call.unfinished:
            self._forget(call)

    def fail_all(self) -> None:
        """The grace time is over: end every request with a clear error."""
        error = ServiceError("The server shut down before this request finished; send it again.", code="draining")
        for call in list(self._calls.values()):
            self._fail(call, error)

    # ---- workers -----------------------------------------------------------------------------------------------------

    def _answered(self, job_id: str) -> OpenCall | None:
        """The call that a worker's answer is for; None when nobody wants it any more."""
        call = self._queue.answered(job_id)
        if call is not None and call.cancelled:
            self._forget(call)
            return None
        return call if call is not None and call.request_id in self._calls else None

    def _on_prepared(self, prepared: Prepared) -> None:
        call = self._answered(prepared.request_id)
        if call is not None and not call.prepared.done():
            call.lease = self.leases.shrink(call.lease, prepared.arena_bytes)
            call.prepared.set_result(prepared)

    def _on_worker_answer(self, answer: Looked | Previewed) -> None:
        call = self._answered(answer.request_id)
        if call is not None and not call.prepared.done():
            call.prepared.set_result(answer)

    def _on_refused(self, refused: Refused) -> None:
        call = self._answered(refused.request_id)
        if call is not None:
            self._fail(call, rejection(refused))

    def _on_worker_death(self, index: int, reason: str) -> None:
        """Once is bad luck, unless the deadline ended it: another worker tries. Twice is its media's doing."""
        call = self._queue.died(index)
        if call is None or call.request_id not in self._calls:
            return
        call.worker = None
        call.deaths += 1
        self.leases.release(call.lease)
        call.lease = Lease()
        if call.cancelled:
            self._forget(call)
        elif reason == DEADLINE_REASON or call.deaths > 1:
            self._fail(call, killed_worker(call.job, reason))
        else:
            self._queue.put_first(call)

    # ---- engine ------------------------------------------------------------------------------------------------------

    def _admit(self, call: OpenCall, prepared: Prepared) -> Generation:
        """Send one engine request a choice: the prefix cache computes their prompt once (segments have their own)."""
        try:
            self.children.refuse_if_down()
        except ServiceError:
            self._forget(call)
            raise
        sequences = sequences_of(prepared, call.num_choices)
        call.num_choices = len(sequences)
        cancel = functools.partial(self.cancel, call)
        call.generation = generation = Generation(call.request_id, prepared, call.num_choices, cancel)
        loop = asyncio.get_running_loop()
        for choice, sequence in enumerate(sequences):
            engine_id = f"{call.request_id}.{choice}"
            call.admissions[engine_id] = loop.create_future()
            call.unfinished[engine_id] = None
            self._by_engine_id[engine_id] = (call, choice)
            self._send("engine", msgspec.structs.replace(sequence, request_id=engine_id))
        return generation

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
                call.generation.put(choice, delta)
            if delta.finish_reason is not None:
                self._finish(delta.request_id)
        self.on_step()

    def _finish(self, engine_id: str) -> None:
        call, _ = self._by_engine_id.pop(engine_id)
        call.unfinished.pop(engine_id, None)
        if not call.unfinished:
            self._forget(call)

    def _forget(self, call: OpenCall) -> None:
        """The last user of the call's pixels is done. The answer's may hold it, and with it the call: not the other way
        round, or all that came with the request would stay until garbage is looked for.
        """
        call.generation = None
        if self._calls.pop(call.request_id, None) is not None:
            self.leases.release(call.lease)
            for engine_id in call.unfinished:
                self._by_engine_id.pop(engine_id, None)

    def _fail(self, call: OpenCall, error: BeholderError) -> None:
        """End a call whose remaining work is known to be gone."""
        generation = call.generation
        self._forget(call)
        if not call.prepared.done():
            call.prepared.set_exception(error)
            call.prepared.exception()  # a client that left is no unhandled error
        for admission in call.admissions.values():
            if not admission.done():
                admission.set_exception(error)
                admission.exception()
        if generation is not None:
            generation.fail(error)

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
            if self.children.engine_has_reset:  # an engine that died may still have a word on its way
                self._totals.report(message)
        elif isinstance(message, ResetDone):
            self._on_engine_reset(message)
        elif isinstance(message, DetokenizerReset):
            if message.epoch == self.epoch:
                self.children.note_reset("detokenizer")
                self.children.tell_of_use()
        elif isinstance(message, ChildState):
            self._on_child(message)
        else:
            self._on_drain(message)

    def _on_child(self, state: ChildState) -> None:
        self.children.note(state)
        if not state.up and state.role == "preprocess":
            self._on_worker_death(state.index, state.reason)
        elif not state.up:
            if state.role == "engine":
                self._totals.engine_died()
            self._fail_engine_calls(
                ServiceError(
                    f"The {state.role} stopped ({state.reason}) and is being restarted; send the request again.",
                    code=f"{state.role}_restarting",
                    retry_after_s=1.0,
                ),
                engine_lives=state.role == "detokenizer",
            )
        generation = self.children.generation_to_reset()
        if generation is not None:
            self._send("engine", Reset(self.epoch, generation))
        self.children.tell_of_use()
        self._queue.pump()

    def _on_engine_reset(self, done: ResetDone) -> None:
        if done.epoch == self.epoch:
            self._queue.max_context = done.max_context
            for lease in self._leases_until_reset:
                self.leases.release(lease)
            self._leases_until_reset.clear()
            self.children.note_reset("engine")
            self.children.tell_of_use()

    def _on_drain(self, drain: Drain) -> None:
        self.draining = True
        self.on_drain(drain.grace_s)

    def _send(self, name: str, message: EngineRequest | Abort | Reset) -> None:
        self._send_frames(name, self._encoder.encode(message))
