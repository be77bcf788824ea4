"""One live session: what its client says, and what it is told beside answers. No sockets, no clock.

    receive_text, receive_binary, tick, attach, detach ─┐                     ┌─▶ outbox: events for the client
                                                        ├─▶ Session ─advance──┤
    on_looked, on_started, on_delta, on_failed ─────────┘                     └─▶ take_actions: work for the driver

Lifetime (limits, the one response) ─▶ Answering (a response) ─▶ Triggered (when one starts) ─▶ Session (the client)
"""

from __future__ import annotations

from typing import Final

from preprocess.errors import BeholderError, ClientError, ServiceError
from server.complaints import invalid
from server.stream.answering import REMEMBERED_RESPONSES, Asked
from server.stream.client_events import (
    Ask,
    ClientEvent,
    FeedbackCreate,
    Ping,
    ResponseCancel,
    ResponseCreate,
    SessionClose,
    SessionUpdate,
)
from server.stream.configuration import check_ask, patched
from server.stream.incoming import decode_event
from server.stream.lifetime import Tally
from server.stream.media import parse
from server.stream.server_events import (
    FeedbackCreated,
    FramesStats,
    Pong,
    RateLimitsUpdated,
    SessionGoingAway,
    SessionUpdated,
)
from server.stream.terms import Terms
from server.stream.triggers import Triggered
from server.stream.work import CloseCode, State

STATS_EVERY_S: Final = 1.0
GOING_AWAY_S: Final = 60.0
MAX_EVENT_BYTES: Final = 262_144


class Session(Triggered):
    """The rules of one session; see `Lifetime` for its arguments."""

    def __init__(
        self, session_id: str, resume_token: str, terms: Terms, now_s: float, tally: Tally | None = None
    ) -> None:
        super().__init__(session_id, resume_token, terms, now_s, tally)
        self._warned = False
        self._stats: FramesStats | None = None
        self._stats_s = now_s

    # ---- time and connection ---------------------------------------------------------------------------------------

    def wake_at_s(self) -> float:
        """When `tick` has something to do, if nothing else happens before."""
        times: list[float | None] = [super().wake_at_s()]
        if self.state is State.CONNECTED:
            times += [self._trigger_at_s(), self._rates.due_s]
            times.append(None if self._warned else self._expires_s - GOING_AWAY_S)
            times.append(None if self._stats_now() == self._stats else self._stats_s + STATS_EVERY_S)
        return min(at_s for at_s in times if at_s is not None)

    def attach(self, now_s: float) -> None:
        """A connection has come: the first one, another one after that was lost, or one that takes over."""
        was_detached = self.state is State.DETACHED
        super().attach(now_s)
        if was_detached:
            self._due_s = now_s
            self._reference = b""
            self._advance(now_s)

    def drain(self, grace_s: float, now_s: float) -> None:
        """The server is about to end: finish what runs, start nothing."""
        if self.state is State.DETACHED:
            self.end(CloseCode.DRAINING, "the server is shutting down", now_s)
        elif self.state is State.CONNECTED and not self._draining:
            self._draining = self._reception.closed = True
            self._put(SessionGoingAway(time_left_ms=grace_s * 1e3, reason="draining"))
            self._refuse_asks()
            self._drop_frames("cancelled")
            self._advance(now_s)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        super().tick(now_s)
        if self.state is not State.CONNECTED:
            return
        if not self._warned and now_s >= self._expires_s - GOING_AWAY_S:
            self._warned = True
            self._put(SessionGoingAway(time_left_ms=(self._expires_s - now_s) * 1e3, reason="session_expires"))
        self._advance(now_s)
        if now_s >= self._stats_s + STATS_EVERY_S:
            self._say_stats(now_s)
        if self._rates.due_s is not None and now_s >= self._rates.due_s:
            self._put(RateLimitsUpdated(rate_limits=self._rates.shown(now_s)))
            self._rates.told(now_s)

    # ---- what the client sends -------------------------------------------------------------------------------------

    def receive_binary(self, data: bytes, now_s: float) -> None:
        """One binary message with media."""
        if not self._hear(len(data), now_s):
            return
        try:
            media = parse(data)
            if media.kind == "frame":
                self._reception.take_frame(media, now_s)
            elif media.kind == "video":
                self._reception.take_part(media, now_s)
            else:
                self._show_pinned(self._reception.pin(media, self.settings.context_frames, now_s))
        except BeholderError as error:
            self._put(self.refusal(error))
        self._rates.note(now_s)
        self._advance(now_s)

    def _decode(self, raw: bytes) -> ClientEvent:
        if len(raw) > MAX_EVENT_BYTES:
            raise ClientError(
                f"The event has {len(raw):,} bytes; at most {MAX_EVENT_BYTES:,} are accepted as text. Pictures go "
                "into binary messages.",
                status=413,
                code="event_too_large",
            )
        return decode_event(raw)

    def _on_event(self, event: ClientEvent, now_s: float) -> None:
        if isinstance(event, SessionUpdate):
            self._on_update(event)
        elif isinstance(event, ResponseCreate):
            self._on_ask(event.response, event.event_id, now_s)
        elif isinstance(event, ResponseCancel):
            self._cancel_asked(event.response_id, "response_not_active", now_s)
        elif isinstance(event, FeedbackCreate):
            self._on_feedback(event)
        elif isinstance(event, Ping):
            self._put(Pong(t=event.t, server_t=now_s * 1e3))
        elif isinstance(event, SessionClose):
            self._closing = self._reception.closed = True
            self._drop_frames("cancelled")
        else:
            raise ClientError(
                "`session.resume` was not the first message of its connection.", code="resume_not_first", param="type"
            )

    def _on_update(self, event: SessionUpdate) -> None:
        self._configuration = patched(event.session, self._configuration, self.terms)
        self.mailbox.keep_latest_only(self.settings.overflow == "latest")
        self._gallery.pinned = {pinned: self._gallery.pinned[pinned] for pinned in self.settings.pinned_ids}
        self._gallery.keep_context(self.settings.context_frames)
        self._reference = b""  # what holds now was asked of no frame yet
        self._due_s = self._heard_s
        self._put(SessionUpdated(session=self.settings))

    def _on_ask(self, ask: Ask, event_id: str | None, now_s: float) -> None:
        question = check_ask(ask, self._configuration, self.terms)
        if self._is_leaving:
            raise ServiceError("The session is closing and takes no more.", code="draining")
        if ask.frame_ids is None and self._gallery.latest is None and not self._gallery.pinned:
            raise ClientError(
                "There is no frame yet to answer about: send one first, or `frame_ids` [] for a question without a "
                "picture.",
                code="no_frame",
                param="response.frame_ids",
            )
        for frame_id in ask.frame_ids or []:
            if self._gallery.find(frame_id, self.mailbox.waiting) is None:
                raise invalid(
                    "response.frame_ids",
                    f"`response.frame_ids` names {frame_id}, which is not kept; kept are "
                    f"{self._gallery.ids(self.mailbox.waiting)}.",
                )
        if len(ask.frame_ids or []) + len(self._gallery.pinned) > self.limits.max_images:
            raise invalid("response.frame_ids", "`response.frame_ids` and the pinned pictures are too many together.")
        if len(self._asks) >= self.limits.max_queue:
            raise ClientError(
                f"{len(self._asks)} responses wait already, the most that this server allows (--stream-max-queue).",
                status=429,
                code="queue_full",
                retry_after_s=1.0,
            )
        self._asks.append(Asked(ask, question, now_s, event_id))
        if self._active is not None and self.settings.preempt:
            self._cancel_active("cancelled", now_s)

    def _on_feedback(self, event: FeedbackCreate) -> None:
        if event.response_id not in self._recent:
            raise ClientError(
                f"The response {event.response_id[:80]!r} is not one of this session's last {REMEMBERED_RESPONSES}.",
                code="response_not_found",
                status=404,
                param="response_id",
            )
        if event.rating not in {"up", "down"}:
            raise invalid("rating", f"`rating` is {event.rating[:40]!r}; expected up or down.")
        if len(event.comment) > 2000:
            raise invalid("comment", f"`comment` has {len(event.comment)} characters; expected at most 2000.")
        if len(event.tags) > 16 or any(len(tag) > 64 for tag in event.tags):
            raise invalid("tags", "`tags` is too large; expected at most 16 tags of 64 characters.")
        self._put(FeedbackCreated(response_id=event.response_id))
        if self._tally is not None:
            self._tally.feedback(event.rating)

    def _refuse_asks(self) -> None:
        while self._asks:
            error = ServiceError("The server is shutting down; ask another one.", code="draining")
            self._put(self.refusal(error, self._asks.popleft().event_id))

    # ---- statistics ------------------------------------------------------------------------------------------------

    def _stats_now(self) -> FramesStats:
        return FramesStats(
            received=self.mailbox.received,
            captioned=self.mailbox.captioned,
            dropped={reason: count for reason, count in self.mailbox.dropped.items() if count},
            pending=self.mailbox.pending,
            change=self._change,
            frame_age_p50_ms=self.age.median,
            rtt_ms=self.rtt_ms,
        )

    def _say_stats(self, now_s: float) -> None:
        stats = self._stats_now()
        if stats != self._stats and stats.received:
            self._put(stats)
            self._stats_s = now_s
        self._stats = stats
