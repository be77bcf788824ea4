"""What a session asks its driver to do, and the words both share."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from preprocess.wire import GenerationOptions, Message


class CloseCode(enum.IntEnum):
    """Why the server closes a connection; docs/protocol.md has the whole table."""

    NORMAL = 1000
    DRAINING = 1001
    BAD_MEDIA_TYPE = 1003
    INTERNAL = 1011
    OVERLOAD = 1013
    UNAUTHENTICATED = 4401
    NO_SUCH_SESSION = 4404
    IDLE = 4408
    REPLACED = 4409
    EXPIRED = 4410
    RATE_LIMITED = 4429


class State(enum.Enum):
    """DETACHED has no connection and may be resumed; CLOSED is the end."""

    CONNECTED = "connected"
    DETACHED = "detached"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Start:
    """Submit a chat; answer with `on_started`, then `on_delta` or `on_failed`."""

    response_id: str
    messages: list[Message]
    options: GenerationOptions


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the work for a response, or for a look, at once."""

    work_id: str


@dataclass(frozen=True, slots=True)
class LookAt:
    """Compare a frame; answer with `on_looked` or `on_look_failed`."""

    look_id: str
    data: bytes
    reference: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Send what is in the outbox, then close the connection."""

    code: int
    reason: str


Action = Start | Cancel | LookAt | Close
