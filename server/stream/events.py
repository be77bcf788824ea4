"""Every event of `vlm.stream.v1` as a struct: what clients may send, and what the server says.

Client events refuse fields that they do not have. Server events get their `seq` when they go out (`outbox`).
"""

from __future__ import annotations

from typing import Final, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from preprocess.errors import BeholderError
from preprocess.wire import Detail
from server.request_models import SAMPLING_FIELDS, Sampling
from server.shape_models import ResponseFormat, StructuredOutputs, TextFormat

TriggerMode = Literal["manual", "interval", "continuous", "on_change"]
Status = Literal["completed", "cancelled", "failed", "incomplete"]
EVENT_BYTES: Final = 256
"""What an event is reckoned at besides its text."""
MAX_DELTA_CHARS: Final = 16_384
"""Text is not joined beyond that."""


# ---- what clients send ----------------------------------------------------------------------------------------------


class Envelope(msgspec.Struct, frozen=True):
    """What all client events share; the rest is decoded once the type is known."""

    type: str
    event_id: str | None = None


class ClientEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all client events. `event_id` comes back in the `error` event that it causes."""

    type: str
    event_id: str | None = None


class SessionUpdate(ClientEvent, frozen=True, kw_only=True):
    """Change settings; see `SessionPatch`."""

    session: msgspec.Raw


class Ask(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One response asked for, with what differs from the session for it alone."""

    prompt: str | None = None
    preset: str | None = None
    instructions: str | None = None
    frame_ids: list[int] | None = None
    metadata: dict[str, str] | None = None


class ResponseCreate(ClientEvent, frozen=True, kw_only=True):
    """Ask now."""

    response: Ask = msgspec.field(default_factory=Ask)


class ResponseCancel(ClientEvent, frozen=True, kw_only=True):
    """End the running response."""

    response_id: str | None = None


class SessionResume(ClientEvent, frozen=True, kw_only=True):
    """Go on with a session whose connection was lost. Only as the first message of a connection."""

    session_id: str
    resume_token: str
    last_seq: int


class FeedbackCreate(ClientEvent, frozen=True, kw_only=True):
    """What a person thought of a response."""

    response_id: str
    rating: str
    comment: str = ""
    tags: list[str] = msgspec.field(default_factory=list)


class Ping(ClientEvent, frozen=True, kw_only=True):
    """Answered by `pong` with the same `t`."""

    t: float | None = None


class SessionClose(ClientEvent, frozen=True, kw_only=True):
    """Finish what was asked for, then close."""


CLIENT_EVENTS: Final[dict[str, type[ClientEvent]]] = {
    "session.update": SessionUpdate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
    "session.resume": SessionResume,
    "feedback.create": FeedbackCreate,
    "ping": Ping,
    "session.close": SessionClose,
}


class SessionPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `session` of `session.update`: what is absent stays, null is the default again."""

    model: str | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    prompt: str | UnsetType | None = UNSET
    preset: str | UnsetType | None = UNSET
    prompt_position: str | UnsetType | None = UNSET
    trigger: TriggerPatch | UnsetType | None = UNSET
    overflow: str | UnsetType | None = UNSET
    preempt: bool | UnsetType | None = UNSET
    context_frames: int | UnsetType | None = UNSET
    detail: str | UnsetType | None = UNSET
    max_pixels: int | UnsetType | None = UNSET
    pinned_ids: list[int] | UnsetType | None = UNSET
    response_format: ResponseFormat | UnsetType | None = UNSET
    structured_outputs: StructuredOutputs | UnsetType | None = UNSET
    return_token_ids: bool | UnsetType | None = UNSET
    max_tokens: int | UnsetType | None = UNSET
    min_tokens: int | UnsetType | None = UNSET
    temperature: float | UnsetType | None = UNSET
    top_p: float | UnsetType | None = UNSET
    top_k: int | UnsetType | None = UNSET
    min_p: float | UnsetType | None = UNSET
    presence_penalty: float | UnsetType | None = UNSET
    frequency_penalty: float | UnsetType | None = UNSET
    repetition_penalty: float | UnsetType | None = UNSET
    seed: int | UnsetType | None = UNSET
    stop: str | list[str] | UnsetType | None = UNSET
    stop_token_ids: list[int] | UnsetType | None = UNSET
    ignore_eos: bool | UnsetType | None = UNSET
    include_stop_str_in_output: bool | UnsetType | None = UNSET
    skip_special_tokens: bool | UnsetType | None = UNSET


class TriggerPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What starts responses. It is replaced as a whole."""

    mode: str
    interval_ms: float | None = None
    change_threshold: float | None = None


# ---- settings as the server shows them ------------------------------------------------------------------------------


class Trigger(msgspec.Struct, frozen=True):
    """`interval_ms`: least time between starts. `change_threshold`: percent, see `preprocess.change`."""

    mode: TriggerMode = "manual"
    interval_ms: float = 0.0
    change_threshold: float = 4.0


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that holds for a session now, the preset's sampling and shape with it. What is null is left to the model.

    `prompt`: the client's own text, which stands where the preset has a place for it; null where the preset does
    without.
    """

    model: str
    instructions: str | None = None
    prompt: str | None
    preset: str | None = None
    prompt_position: Literal["before", "after"] = "before"
    trigger: Trigger = msgspec.field(default_factory=Trigger)
    overflow: Literal["latest", "queue"] = "latest"
    preempt: bool = False
    context_frames: int = 0
    detail: Detail = "auto"
    max_pixels: int | None = None
    pinned_ids: list[int] = msgspec.field(default_factory=list)
    response_format: ResponseFormat = msgspec.field(default_factory=TextFormat)
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool = False
    max_tokens: int
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def num_bytes(self) -> int:
        """Of its texts and shapes, of which there may be many."""
        return len(msgspec.json.encode(self))


SESSION_SAMPLING: Final = tuple(name for name in SAMPLING_FIELDS if name != "max_completion_tokens")
"""Sampling fields and shapes that a session has; `max_completion_tokens` is another name of `max_tokens`."""


# ---- what the server says -------------------------------------------------------------------------------------------


class OutboundEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What an outbox asks of the events in it."""

    def numbered(self, seq: int) -> object:
        """What goes out as the session's `seq`-th event."""
        raise NotImplementedError

    def joined_with(self, later: OutboundEvent) -> Self | None:
        """One event that says what both say, where that is possible."""
        return None

    def replaces(self, earlier: OutboundEvent) -> bool:
        """Whether an earlier event need not go out any more."""
        return False

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes while it waits."""
        return EVENT_BYTES


class ServerEvent(OutboundEvent, frozen=True, kw_only=True):
    """Base of all server events. `seq` counts the session's events from 1; 0 in those that belong to the connection."""

    seq: int = 0

    def numbered(self, seq: int) -> Self:
        """With its `seq`."""
        return msgspec.structs.replace(self, seq=seq)


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
