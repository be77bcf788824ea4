"""The driver of one session: gives it the time, does the work that it asks for, wakes whoever writes its events.

Lives as long as the session, over however many connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from preprocess.errors import BeholderError
from server.faults import internal_error
from server.routes.answering import Answer, Arrival, Choice
from server.routes.context import Context
from server.stream.lifetime import Lifetime
from server.stream.work import Action, Cancel, Close, CloseCode, LookAt, Start, State

if TYPE_CHECKING:
    from server.stream.connection import Connection

_SOON_S: Final = 0.001
_log = logging.getLogger("beholder.stream")


class Live:
    """A session at work.

    Args:
        session: The rules.
        context: The service that does the work, and where to count.
        on_end: Called once, when the session is closed.
    """

    def __init__(self, session: Lifetime[Any], context: Context, on_end: Callable[[Live], None]) -> None:
        self.session = session
        self.connection: Connection | None = None
        self.close: Close | None = None
        """How the session ended."""
        self._context = context
        self._on_end = on_end
        self._work: dict[str, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._obey()

    # ---- what the connection calls -----------------------------------------------------------------------------------

    def receive(self, data: str | bytes) -> None:
        """A message from the client."""
        if isinstance(data, str):
            self.session.receive_text(data, time.monotonic())
        else:
            self.session.receive_binary(data, time.monotonic())
        self._obey()

    def attach(self, connection: Connection) -> None:
        """Events go to this connection from now on; an earlier one is closed."""
        earlier, self.connection = self.connection, connection
        if earlier is not None:
            earlier.dismiss(CloseCode.REPLACED, "replaced by a newer connection")
        if self.session.state is not State.CLOSED:
            self.session.attach(time.monotonic())
        self._obey()

    def detach(self, connection: Connection) -> None:
        """The connection is gone. Ignored when another one has taken over."""
        if self.connection is connection:
            self.connection = None
            self.session.detach(time.monotonic())
            self._obey()

    def drain(self, grace_s: float) -> None:
        """The server is about to end."""
        self.session.drain(grace_s, time.monotonic())
        self._obey()

    def end(self, code: CloseCode, reason: str, error: BeholderError | None = None) -> None:
        """Close the session for good."""
        self.session.end(code, reason, time.monotonic(), error)
        self._obey()

    # ---- what the session asks for ---------------------------------------------------------------------------------

    def _obey(self) -> None:
        for action in self.session.take_actions():
            self._do(action)
        if self.connection is not None:
            self.connection.wake()
        if self.close is None:
            self._set_timer()

    def _do(self, action: Action) -> None:
        if isinstance(action, Start):
            self._begin(action.response_id, self._respond(action))
        elif isinstance(action, LookAt):
            self._begin(action.look_id, self._look(action))
        elif isinstance(action, Cancel):
            task = self._work.pop(action.work_id, None)
            if task is not None:
                task.cancel()
        else:
            self.close = action
            if self._timer is not None:
                self._timer.cancel()
            self._on_end(self)

    def _begin(self, work_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work[work_id] = task
        task.add_done_callback(lambda done: self._work.pop(work_id, None))

    async def _respond(self, start: Start) -> None:
        arrival = Arrival(self._context)
        session = self.session
        try:
            async with arrival.time_limit():
                generation = await self._context.service.submit(
                    start.messages, start.options, session_id=session.id, arrival_s=arrival.monotonic_s
                )
                self._context.metrics.admitted(generation)
                answer = Answer(self._context, arrival, generation, [Choice(0.0)])
                session.on_started(
                    start.response_id,
                    generation.num_prompt_tokens,
                    generation.decode_ms,
                    generation.preprocess_ms,
                    time.monotonic(),
                )
                async with contextlib.aclosing(answer.deltas()) as deltas:
                    async for _, delta in deltas:
                        session.on_delta(start.response_id, delta, time.monotonic())
                        self._obey()
        except BeholderError as error:
            self._failed(start.response_id, error)
        except Exception:
            _log.exception("response %s failed", start.response_id)
            self._failed(start.response_id, internal_error(start.response_id))

    def _failed(self, response_id: str, error: BeholderError) -> None:
        self._context.metrics.refused(error)
        self.session.on_failed(response_id, error, time.monotonic())
        self._obey()

    async def _look(self, look: LookAt) -> None:
        try:
            looked = await self._context.service.look(look.data, look.reference)
        except BeholderError as error:
            self.session.on_look_failed(look.look_id, error, time.monotonic())
        except Exception:
            _log.exception("%s failed", look.look_id)
            self.session.on_look_failed(look.look_id, internal_error(look.look_id), time.monotonic())
        else:
            self.session.on_looked(look.look_id, looked, time.monotonic())
        self._obey()

    # ---- time ------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        """Keep a timer that fires no later than the session wants; one that fires early does no harm."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + max(_SOON_S, self.session.wake_at_s() - time.monotonic())
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.connection is not None:
            self.session.rtt_ms = self.connection.rtt_ms
        self.session.tick(time.monotonic())
        self._obey()
