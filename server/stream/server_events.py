"""What the server of `vlm.stream.v1` says: every event as a struct, which gets its `seq` when it goes out."""

from __future__ import annotations

from typing import Final, Literal, Self

import msgspec

from preprocess.errors import BeholderError
from server.stream.outbound import EVENT_BYTES, MAX_DELTA_CHARS, OutboundEvent, ServerEvent
from server.stream.settings_events import SessionSettings, TriggerMode

Status = Literal["completed", "cancelled", "failed", "incomplete"]


class SessionLimits(msgspec.Struct, frozen=True):
    """The server's limits, as a client can use them."""

    max_frame_bytes: int
    max_clip_bytes: int
    max_message_bytes: int
    max_pixels: int
    max_images: int
    max_fps: float
    max_messages_per_s: float
    max_bytes_per_s: float
    max_held_bytes: int
    max_queue: int
    max_response_tokens: int
    send_queue_bytes: int
    idle_timeout_s: float
    max_session_s: float
    resume_s: float


class Capabilities(msgspec.Struct, frozen=True):
    """What can be asked for."""

    triggers: list[str]
    presets: list[str]
    media: list[str]


class SessionCreated(ServerEvent, frozen=True, kw_only=True, tag="session.created"):
    """The first event of a session."""

    session_id: str
    resume_token: str
    session: SessionSettings
    limits: SessionLimits
    capabilities: Capabilities

    @property
    def num_bytes(self) -> int:
        """With the settings."""
        return EVENT_BYTES + self.session.num_bytes


class SessionUpdated(ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    """The settings after a change."""

    session: SessionSettings

    @property
    def num_bytes(self) -> int:
        """With the settings."""
        return EVENT_BYTES + self.session.num_bytes


class SessionResumed(ServerEvent, frozen=True, kw_only=True, tag="session.resumed"):
    """Everything after `last_seq` follows. Belongs to the connection: `seq` is 0."""

    session_id: str
    last_seq: int


class SessionResyncRequired(ServerEvent, frozen=True, kw_only=True, tag="session.resync_required"):
    """Events from `last_seq` + 1 to `next_seq` - 1 are no longer kept. Belongs to the connection: `seq` is 0."""

    session_id: str
    last_seq: int
    next_seq: int
    session: SessionSettings


class SessionGoingAway(ServerEvent, frozen=True, kw_only=True, tag="session.going_away"):
    """The connection will be closed in so many milliseconds at the latest."""

    time_left_ms: float
    reason: Literal["draining", "session_expires"]


class SessionClosed(ServerEvent, frozen=True, kw_only=True, tag="session.closed"):
    """The last event after `session.close`."""


class ResponseCreated(ServerEvent, frozen=True, kw_only=True, tag="response.created"):
    """A response begins. `queue_ms`: from what triggered it to now. `frame_age_ms`: capture of the newest to now."""

    response_id: str
    trigger: TriggerMode
    frame_ids: list[int]
    frame_age_ms: float | None
    queue_ms: float
    metadata: dict[str, str] | None = None


class TextDelta(ServerEvent, frozen=True, kw_only=True, tag="response.output_text.delta", omit_defaults=True):
    """The next piece of text."""

    response_id: str
    delta: str
    token_ids: list[int] | None = None

    def joined_with(self, later: OutboundEvent) -> Self | None:
        """Text of the same response is one text."""
        if (
            not isinstance(later, TextDelta)
            or later.response_id != self.response_id
            or len(self.delta) >= MAX_DELTA_CHARS
        ):
            return None
        ids = None if self.token_ids is None else self.token_ids + (later.token_ids or [])
        return msgspec.structs.replace(self, delta=self.delta + later.delta, token_ids=ids)

    @property
    def num_bytes(self) -> int:
        """With its text."""
        return EVENT_BYTES + len(self.delta) + 8 * len(self.token_ids or ())


class StreamUsage(msgspec.Struct, frozen=True):
    """Token counts. `cached_tokens` of the `input_tokens` were not computed again; `accepted_prediction_tokens` of the
    `output_tokens` had been guessed ahead, and `rejected_prediction_tokens` guesses were wrong.
    """

    input_tokens: int
    image_tokens: int
    cached_tokens: int
    output_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class StreamTimings(msgspec.Struct, frozen=True):
    """Milliseconds. `decode_ms` is part of `preprocess_ms`; `ttft_ms` and `total_ms` count from `response.created`."""

    decode_ms: float
    preprocess_ms: float
    engine_queue_ms: float
    vision_ms: float
    prefill_ms: float
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float


class ErrorInfo(msgspec.Struct, frozen=True):
    """OpenAI's error object and more. `fatal`: the connection is closed next."""

    type: str
    code: str
    message: str
    param: str | None = None
    event_id: str | None = None
    retry_after_ms: float | None = None
    fatal: bool = False

    @classmethod
    def of(cls, error: BeholderError, event_id: str | None = None, *, fatal: bool = False) -> ErrorInfo:
        """From an exception."""
        retry_after_ms = None if error.retry_after_s is None else error.retry_after_s * 1e3
        return cls(error.kind, error.code, error.message, error.param, event_id, retry_after_ms, fatal)


class ResponseDone(ServerEvent, frozen=True, kw_only=True, tag="response.done"):
    """The end of a response: exactly one for every `response.created`. `frame_age_ms`: capture to first token."""

    response_id: str
    status: Status
    finish_reason: str | None
    text: str
    frame_ids: list[int]
    frame_age_ms: float | None
    usage: StreamUsage
    timings: StreamTimings
    metadata: dict[str, str] | None = None
    error: ErrorInfo | None = None

    @property
    def num_bytes(self) -> int:
        """With its text."""
        return EVENT_BYTES + len(self.text)


class FramesStats(ServerEvent, frozen=True, kw_only=True, tag="frames.stats"):
    """Totals of the session; at most one a second, and only when they changed. `change`: of the last frame compared."""

    received: int
    captioned: int
    dropped: dict[str, int]
    pending: int
    change: float | None
    frame_age_p50_ms: float | None
    rtt_ms: float | None

    def replaces(self, earlier: OutboundEvent) -> bool:
        """Newer totals make older ones pointless."""
        return isinstance(earlier, FramesStats)


class RateLimit(msgspec.Struct, frozen=True):
    """How much of one of the limits on speed is left: `remaining` of `limit` at once, all of it in `reset_seconds`."""

    name: str
    limit: float
    remaining: float
    reset_seconds: float


class RateLimitsUpdated(ServerEvent, frozen=True, kw_only=True, tag="rate_limits.updated"):
    """Less than half of a limit was left; at most one a second, and a last one when all are above half again."""

    rate_limits: list[RateLimit]

    def replaces(self, earlier: OutboundEvent) -> bool:
        """What was left earlier is of no use any more."""
        return isinstance(earlier, RateLimitsUpdated)


class FeedbackCreated(ServerEvent, frozen=True, kw_only=True, tag="feedback.created"):
    """The feedback was taken."""

    response_id: str


class Pong(ServerEvent, frozen=True, kw_only=True, tag="pong"):
    """`server_t`: milliseconds of the server's monotonic clock."""

    t: float | None
    server_t: float


class ErrorEvent(ServerEvent, frozen=True, kw_only=True, tag="error"):
    """Something was refused or went wrong."""

    error: ErrorInfo


SERVER_EVENTS: Final[tuple[type[ServerEvent], ...]] = (
    SessionCreated,
    SessionUpdated,
    SessionResumed,
    SessionResyncRequired,
    SessionGoingAway,
    SessionClosed,
    ResponseCreated,
    TextDelta,
    ResponseDone,
    FramesStats,
    RateLimitsUpdated,
    FeedbackCreated,
    Pong,
    ErrorEvent,
)
