"""What every kind of session shares: its state and limits in time and amount, its outbox, the actions for its driver.

CONNECTED ⇄ DETACHED        by `detach` and `attach`, where a kind of session can be resumed
    └──── CLOSED            by `end`: exactly one `Close`, after which nothing is asked of the driver
"""

from __future__ import annotations

import abc
from typing import Protocol

from preprocess.errors import BeholderError, ClientError, ServiceError
from preprocess.wire import Delta, Looked
from server.stream.events import OutboundEvent, SessionLimits
from server.stream.mailbox import DropReason, Mailbox
from server.stream.outbox import Outbox
from server.stream.pace import Bucket, Recent
from server.stream.work import Action, Close, CloseCode, State


class Tally(Protocol):
    """Counts over all sessions."""

    def first_token(self, frame_age_ms: float) -> None:
        """A response said its first word about a frame of that age."""

    def done(self, status: str) -> None:
        """A response ended."""

    def feedback(self, rating: str) -> None:
        """A person judged a response."""


class Lifetime(abc.ABC):
    """Base of sessions. Every call carries the time in seconds of one monotonic clock.

    Args:
        session_id: Its name.
        resume_token: Who knows it may go on with the session.
        model_names: Names of the served model, the one that answers carry first.
        limits: What the server allows.
        now_s: The time.
        tally: Is told of what is counted over all sessions.
    """

    resumable = True
    """Whether a session outlives its connection for a while."""

    def __init__(
        self,
        session_id: str,
        resume_token: str,
        model_names: tuple[str, ...],
        limits: SessionLimits,
        now_s: float,
        tally: Tally | None = None,
    ) -> None:
        self.id = session_id
        self.resume_token = resume_token
        self.limits = limits
        self.state = State.CONNECTED
        self.mailbox = Mailbox(limits.max_queue)
        self.outbox = Outbox(limits.send_queue_bytes, limits.send_queue_bytes)
        self.age = Recent()
        self.rtt_ms: float | None = None
        self.detached_s = 0.0
        self._model_names = model_names
        self._tally = tally
        self._actions: list[Action] = []
        self._messages = Bucket(limits.max_messages_per_s, 2 * limits.max_messages_per_s, now_s)
        self._bytes = Bucket(
            limits.max_bytes_per_s, max(2 * limits.max_bytes_per_s, float(limits.max_message_bytes)), now_s
        )
        self._frames = Bucket(limits.max_fps, max(1.0, limits.max_fps / 4), now_s)
        self._heard_s = now_s
        self._expires_s = now_s + limits.max_session_s

    # ---- what a kind of session says -------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """Encoded pictures kept in memory."""

    @abc.abstractmethod
    def receive_text(self, data: str | bytes, now_s: float) -> None:
        """One text message."""

    @abc.abstractmethod
    def receive_binary(self, data: bytes, now_s: float) -> None:
        """One binary message."""

    @abc.abstractmethod
    def on_started(
        self, response_id: str, num_prompt_tokens: int, decode_ms: float, preprocess_ms: float, now_s: float
    ) -> None:
        """The engine has a response's chat."""

    @abc.abstractmethod
    def on_delta(self, response_id: str, delta: Delta, now_s: float) -> None:
        """The engine has said more."""

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
    def _stop_work(self, reason: DropReason, now_s: float) -> None:
        """End everything that costs something."""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Keep no picture and no question."""

    @staticmethod
    @abc.abstractmethod
    def fatal(error: BeholderError) -> OutboundEvent:
        """The event that tells why the connection is closed next."""

    # ---- what they share -------------------------------------------------------------------------------------------

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
        """A connection has come back."""
        self.state = State.CONNECTED
        self._heard_s = now_s

    def end(self, code: CloseCode, reason: str, now_s: float, error: BeholderError | None = None) -> None:
        """Close for good."""
        if self.state is State.CLOSED:
            return
        self._stop_work("disconnected", now_s)
        if error is not None:
            self.outbox.put(self.fatal(error))
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

    def _hear(self, num_bytes: int, now_s: float) -> bool:
        """Whether a message may be looked at."""
        if self.state is not State.CONNECTED:
            return False
        self._heard_s = now_s
        if not self._messages.admits(now_s):
            what = f"more than {self.limits.max_messages_per_s:g} messages a second (--stream-max-messages-per-s)"
        elif not self._bytes.admits(now_s, num_bytes):
            what = f"more than {self.limits.max_bytes_per_s / (1 << 20):g} MiB a second (--stream-max-mb-per-s)"
        else:
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
