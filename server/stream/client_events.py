"""What clients of `vlm.stream.v1` send, besides media: every event as a struct that refuses fields it does not have."""

from __future__ import annotations

from typing import Final

import msgspec

from server.request_models import Sampling


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
