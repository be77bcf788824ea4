"""What every kind of session shares: its state and limits, its outbox, its one response, the actions for its driver.

CONNECTED ⇄ DETACHED        by `detach` and `attach`, where a kind of session can be resumed
    └──── CLOSED            by `end`: exactly one `Close`, after which nothing is asked of the driver

At most one response runs; what comes for one that is done is ignored.
"""

from __future__ import annotations

import abc
from typing import Generic, Protocol, TypeVar

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import Delta, Looked
from server.faults import rejection
from server.stream.client_events import ClientEvent
from server.stream.incoming import event_id_of
from server.stream.mailbox import DropReason, Mailbox
from server.stream.outbound import OutboundEvent
from server.stream.outbox import Outbox
from server.stream.pace import Recent
from server.stream.rates import Rates
from server.stream.response import Ending
from server.stream.terms import Terms
from server.stream.work import Action, Cancel, Close, CloseCode, State


class Tally(Protocol):
    """Counts over all sessions."""

    def first_token(self, frame_age_ms: float) -> None:
        """A response said its first word about a frame of that age."""

    def done(self, status: str) -> None:
        """A response ended."""

    def feedback(self, rating: str) -> None:
        """A person judged a response."""


class Running(Protocol):
    """A response while it runs."""

    id: str


R = TypeVar("R", bound=Running)


class Lifetime(abc.ABC, Generic[R]):
    """Base of sessions. Every call carries the time in seconds of one monotonic clock.

    Args:
        session_id: Its name.
        resume_token: Who knows it may go on with the session.
        terms: What the server offers.
        now_s: The time.
        tally: Is told of what is counted over all sessions.
    """

    resumable = True
    """Whether a session outlives its connection for a while."""

    def __init__(
        self, session_id: str, resume_token: str, terms: Terms, now_s: float, tally: Tally | None = None
    ) -> None:
        self.id = session_id
        self.resume_token = resume_token
        self.terms = terms
        self.limits = terms.limits
        self.state = State.CONNECTED
        self.mailbox = Mailbox(terms.limits.max_queue)
        self.outbox = Outbox(terms.limits.send_queue_bytes, terms.limits.send_queue_bytes)
        self.age = Recent()
        self.rtt_ms: float | None = None
        self.detached_s = 0.0
        self._tally = tally
        self._actions: list[Action] = []
        self._rates = Rates(terms.limits, now_s)
        self._active: R | None = None
        self._draining = False
        self._serial = 0
        self._heard_s = now_s
        self._expires_s = now_s + terms.limits.max_session_s

    # ---- what a kind of session says -------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Encoded pictures kept in memory."""

    @abc.abstractmethod
    def receive_binary(self, data: bytes, now_s: float) -> None:
        """One binary message."""

    @abc.abstractmethod
    def on_started(
        self, response_id: str, num_prompt_tokens: int, decode_ms: float, preprocess_ms: float, now_s: float
    ) -> None:
        """The engine has a response's chat."""

    @abc.abstractmethod
    def on_failed(self, response_id: str, error: BeholderError, now_s: float) -> None:
        """A response cannot go on, or could not begin."""

    @abc.abstractmethod
    def on_looked(self, look_id: str, looked: Looked, now_s: float) -> None:
        """A frame was compared."""

    @abc.abstractmethod
    def on_look_failed(self, look_id: str, error: BeholderError, now_s: float) -> None:
        """A frame could not be compared."""

    @abc.abstractmethod
    def drain(self, grace_s: float, now_s: float) -> None:
        """The server is about to end: finish what runs, start nothing."""

    @abc.abstractmethod
    def _decode(self, raw: bytes) -> ClientEvent:
        """The event in a text message; raises `ClientError`."""

    @abc.abstractmethod
    def _on_event(self, event: ClientEvent, now_s: float) -> None:
        """Do as the client says; raises `BeholderError`."""

    @abc.abstractmethod
    def _advance(self, now_s: float) -> None:
        """Something has changed: start what may start now, end what is to end."""

    @abc.abstractmethod
    def _speak(self, response: R, delta: Delta, now_s: float) -> None:
        """Tell the client what the engine said."""

    @abc.abstractmethod
    def _finish(self, response: R, ending: Ending, now_s: float) -> None:
        """The running response is done: tell the client."""

    @abc.abstractmethod
    def _drop_frames(self, reason: DropReason) -> None:
        """Nothing that waits gets a response."""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Keep no picture and no question."""

    @staticmethod
    @abc.abstractmethod
    def refusal(error: BeholderError, event_id: str | None = None, *, fatal: bool = False) -> OutboundEvent:
        """The event that tells of an error. `fatal`: the connection is closed next."""

    # ---- messages --------------------------------------------------------------------------------------------------

    def receive_text(self, data: str | bytes, now_s: float) -> None:
        """One JSON event."""
        raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
        if not self._hear(len(raw), now_s):
            return
        event_id: str | None = None
        try:
            event = self._decode(raw)
            event_id = event.event_id
            self._on_event(event, now_s)
        except BeholderError as error:
            self.outbox.put(self.refusal(error, event_id or event_id_of(raw)))
        self._advance(now_s)

    def _hear(self, num_bytes: int, now_s: float) -> bool:
        """Whether a message may be looked at."""
        if self.state is not State.CONNECTED:
            return False
        self._heard_s = now_s
        if not self._rates.messages.admits(now_s):
            what = f"more than {self.limits.max_messages_per_s:g} messages a second (--stream-max-messages-per-s)"
        elif not self._rates.bytes.admits(now_s, num_bytes):
            what = f"more than {self.limits.max_bytes_per_s / (1 << 20):g} MiB a second (--stream-max-mb-per-s)"
        else:
            self._rates.note(now_s)
            return True
        error = ClientError(f"The client sent {what}; send less.", code="rate_limited", status=429, retry_after_s=1.0)
        self.end(CloseCode.RATE_LIMITED, "rate limited", now_s, error)
        return False

    def _reads_too_slowly(self, now_s: float) -> bool:
        """Whether the session had to end because too much waits for its reader."""
        if not self.outbox.overflows:
            return False
        error = ServiceError(
            "The client reads too slowly: more waits for it than this server keeps (--stream-send-queue-kb).",
            code="slow_reader",
        )
        self.end(CloseCode.OVERLOAD, "too slow a reader", now_s, error)
        return True

    # ---- the response ----------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a response runs."""
        return self._active is not None

    def _running(self, response_id: str) -> R | None:
        active = self._active
        return active if active is not None and active.id == response_id else None

    def on_delta(self, response_id: str, delta: Delta, now_s: float) -> None:
        """The engine has said more."""
        response = self._running(response_id)
        if response is None:
            return
        if delta.error is not None:
            self.on_failed(response_id, rejection(delta.error), now_s)
            return
        if delta.finish_reason in {"abort", "error"}:
            self.on_failed(response_id, ServiceError("The generation was ended by the server.", code="aborted"), now_s)
            return
        self._speak(response, delta, now_s)
        if delta.finish_reason is not None:
            self._finish(response, Ending.of(delta), now_s)
        self._advance(now_s)

    def _cancel_asked(self, response_id: str | None, code: str, now_s: float) -> None:
        """The client asks to end the running response, by its id or whichever it is. `code`: when there is none."""
        if self._active is None or response_id not in {None, self._active.id}:
            what = "No response runs" if response_id is None else f"The response {response_id!r:.80} does not run"
            raise ClientError(f"{what} now.", code=code, param="response_id")
        self._cancel_active("cancelled", now_s)

    def _cancel_active(self, reason: DropReason, now_s: float) -> None:
        assert self._active is not None
        self._actions.append(Cancel(self._active.id))
        self._finish(self._active, Ending("cancelled", reason=reason), now_s)

    # ---- time and connection ---------------------------------------------------------------------------------------

    def take_actions(self) -> list[Action]:
        """Work since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def wake_at_s(self) -> float:
        """When `tick` has something to do, if nothing else happens before."""
        if self.state is State.DETACHED:
            return self.detached_s + self.limits.resume_s
        return min(self._heard_s + self.limits.idle_timeout_s, self._expires_s)

    def detach(self, now_s: float) -> None:
        """The connection is gone: everything that costs something ends now."""
        if self.state is not State.CONNECTED:
            return
        self._stop_work("disconnected", now_s)
        self.state = State.DETACHED
        self.detached_s = now_s
        if not self.resumable:
            self.end(CloseCode.NORMAL, "the client left", now_s)

    def attach(self, now_s: float) -> None:
        """A connection has come: the first one, another one after that was lost, or one that takes over."""
        self.state = State.CONNECTED
        self._heard_s = now_s

    def end(self, code: CloseCode, reason: str, now_s: float, error: BeholderError | None = None) -> None:
        """Close for good."""
        if self.state is State.CLOSED:
            return
        self._stop_work("disconnected", now_s)
        if error is not None:
            self.outbox.put(self.refusal(error, fatal=True))
        self.state = State.CLOSED
        self._forget()
        self._actions.append(Close(code, reason))

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        if self.state is State.DETACHED and now_s >= self.detached_s + self.limits.resume_s:
            self.end(CloseCode.NO_SUCH_SESSION, "nobody resumed the session", now_s)
        if self.state is not State.CONNECTED:
            return
        if now_s >= self._heard_s + self.limits.idle_timeout_s:
            error = ClientError(
                f"Nothing came from the client for {self.limits.idle_timeout_s:g} s; send something now and then, such "
                "as a ping (--stream-idle-timeout-s).",
                code="idle_timeout",
                status=408,
            )
            self.end(CloseCode.IDLE, "idle timeout", now_s, error)
        elif now_s >= self._expires_s:
            error = ClientError(
                f"The session has lasted {self.limits.max_session_s:g} s, the longest that this server allows; begin "
                "another one (--stream-max-session-s).",
                code="session_expired",
                status=408,
            )
            self.end(CloseCode.EXPIRED, "session expired", now_s, error)

    def _stop_work(self, reason: DropReason, now_s: float) -> None:
        """End everything that costs something."""
        if self._active is not None:
            self._cancel_active(reason, now_s)
        self._drop_frames(reason)
