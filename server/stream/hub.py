"""All live sessions of a server: begins them, finds them again, ends them, and counts what became of their frames."""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Iterable
from typing import Any, Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from preprocess.errors import ClientError
from server.routes.context import Context
from server.stream.client_events import SessionResume
from server.stream.lifetime import Lifetime
from server.stream.live import Live
from server.stream.mailbox import DROP_REASONS
from server.stream.outbound import ServerEvent
from server.stream.server_events import SessionResumed, SessionResyncRequired
from server.stream.session import Session
from server.stream.terms import terms_of
from server.stream.work import State

_AGE_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10)


class Hub(Collector):
    """One per application; it is its own collector of metrics."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.terms = terms_of(context.settings)
        self.sessions: dict[str, Live] = {}
        self._labels = {"model_name": context.settings.model_name}
        self._outcomes: dict[str, int] = dict.fromkeys(("captioned", *DROP_REASONS), 0)
        self._received = 0
        registry = context.metrics.registry
        self._age = Histogram(
            "beholder_stream_frame_age_seconds",
            "Capture of a frame to the first token about it.",
            ["model_name"],
            registry=registry,
            buckets=_AGE_S,
        ).labels(**self._labels)
        self._responses = Counter(
            "beholder_stream_responses",
            "Responses of live sessions, by status.",
            ["model_name", "status"],
            registry=registry,
        )
        self._closes = Counter(
            "beholder_stream_closes", "Live sessions ended, by close code.", ["model_name", "code"], registry=registry
        )
        self._feedback = Counter(
            "beholder_stream_feedback", "Feedback on responses, by rating.", ["model_name", "rating"], registry=registry
        )
        registry.register(self)

    @property
    def is_full(self) -> bool:
        """Whether one more session would be too many."""
        return len(self.sessions) >= self.context.settings.stream_max_sessions

    def begin(self, kind: type[Lifetime[Any]]) -> Live:
        """A new session of a kind."""
        session = kind(
            f"sess-{secrets.token_hex(8)}",
            secrets.token_urlsafe(24),
            self.terms,
            time.monotonic(),
            self,
        )
        live = Live(session, self.context, self._on_end)
        self.sessions[session.id] = live
        return live

    def resume(self, event: SessionResume) -> tuple[Live, ServerEvent]:
        """The session that a client asks for, set to repeat what it has not seen, and the event that says so.

        Raises:
            ClientError: There is no such session, or the token is not its.
        """
        live = self.sessions.get(event.session_id)
        session = live.session if live is not None else None
        token = session.resume_token if session is not None else secrets.token_urlsafe(24)
        right = hmac.compare_digest(token.encode(), event.resume_token.encode("utf-8", "replace"))
        if not right or live is None or not isinstance(session, Session):
            raise ClientError(
                f"There is no session {event.session_id[:80]!r} to resume with that token: a session is kept "
                f"{self.terms.limits.resume_s:g} s after its connection was lost. Begin another one.",
                status=404,
                code="session_not_found",
                param="session_id",
            )
        try:
            first = session.outbox.rewind(event.last_seq)
        except ValueError:
            raise ClientError(
                f"`last_seq` is {event.last_seq}; the session has sent {session.outbox.last_seq} events.",
                code="invalid_value",
                param="last_seq",
            ) from None
        if first is None:
            return live, SessionResumed(session_id=session.id, last_seq=event.last_seq)
        return live, SessionResyncRequired(
            session_id=session.id, last_seq=event.last_seq, next_seq=first, session=session.settings
        )

    def drain(self, grace_s: float) -> None:
        """The server is about to end."""
        for live in list(self.sessions.values()):
            live.drain(grace_s)

    def _on_end(self, live: Live) -> None:
        assert live.close is not None
        del self.sessions[live.session.id]
        mailbox = live.session.mailbox
        self._received += mailbox.received
        self._outcomes["captioned"] += mailbox.captioned
        for reason, count in mailbox.dropped.items():
            self._outcomes[reason] += count
        self._closes.labels(code=str(int(live.close.code)), **self._labels).inc()

    # ---- counting ----------------------------------------------------------------------------------------------------

    def first_token(self, frame_age_ms: float) -> None:
        """A response said its first word about a frame of that age."""
        self._age.observe(frame_age_ms / 1e3)

    def done(self, status: str) -> None:
        """A response ended."""
        self._responses.labels(status=status, **self._labels).inc()

    def feedback(self, rating: str) -> None:
        """A person judged a response."""
        self._feedback.labels(rating=rating, **self._labels).inc()

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known only by collecting."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All values as they are now."""
        names, values = list(self._labels), list(self._labels.values())
        sessions = [live.session for live in self.sessions.values()]
        states = GaugeMetricFamily("beholder_stream_sessions", "Live sessions, by state.", labels=[*names, "state"])
        for state in (State.CONNECTED, State.DETACHED):
            states.add_metric([*values, state.value], sum(session.state is state for session in sessions))
        yield states
        for name, text, amount in (
            (
                "beholder_stream_queued_bytes",
                "Events that wait for readers.",
                sum(s.outbox.num_bytes for s in sessions),
            ),
            ("beholder_stream_held_bytes", "Encoded pictures that sessions keep.", sum(s.held_bytes for s in sessions)),
        ):
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, amount)
            yield gauge
        received = CounterMetricFamily("beholder_stream_frames_received", "Frames of live sessions.", labels=names)
        received.add_metric(values, self._received + sum(session.mailbox.received for session in sessions))
        yield received
        frames = CounterMetricFamily(
            "beholder_stream_frames", "Frames settled, by what became of them.", labels=[*names, "outcome"]
        )
        totals = dict(self._outcomes)
        for session in sessions:
            totals["captioned"] += session.mailbox.captioned
            for reason, count in session.mailbox.dropped.items():
                totals[reason] += count
        for outcome, total in totals.items():
            frames.add_metric([*values, outcome], total)
        yield frames
