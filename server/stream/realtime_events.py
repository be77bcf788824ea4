"""What OpenAI Realtime clients send and hear here: the text and `input_image` part of it, and one extension.

Names and shapes are OpenAI's. Our own: `input_image_buffer.append` and `.clear`, and the key `beholder` in a session.
"""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec

from preprocess.errors import BeholderError
from preprocess.wire import Detail
from server.stream.client_events import ClientEvent
from server.stream.outbound import EVENT_BYTES, MAX_DELTA_CHARS, OutboundEvent

DELTA: Final = "response.output_text.delta"


# ---- what clients send ----------------------------------------------------------------------------------------------


class ItemContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an item."""

    type: str
    text: str | None = None
    image_url: str | None = None
    detail: Detail | None = None


class ItemInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A conversation item; only messages are served, and in a response's input references to them."""

    type: str
    role: str | None = None
    content: list[ItemContent] | None = None
    id: str | None = None
    object: str | None = None
    status: str | None = None


class Extras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Our own settings, below `beholder` of a session; in a response, what differs from the session for it alone.

    `detail` and `max_pixels` are of the pictures that come from then on; in a response, of those that it brings.
    """

    detail: Detail | None = None
    max_pixels: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repetition_penalty: float | None = None


class RealtimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`session` of `session.update`. The second group is served only with a value that asks for nothing."""

    type: str | None = None
    model: str | None = None
    instructions: str | None = None
    output_modalities: list[str] | None = None
    max_output_tokens: int | str | None = None
    beholder: Extras | None = None

    audio: Any = None
    include: Any = None
    parallel_tool_calls: Any = None
    prompt: Any = None
    reasoning: Any = None
    tool_choice: Any = None
    tools: Any = None
    tracing: Any = None
    truncation: Any = None


class ResponseParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response` of `response.create`."""

    instructions: str | None = None
    output_modalities: list[str] | None = None
    max_output_tokens: int | str | None = None
    metadata: dict[str, str] | None = None
    conversation: str | None = None
    input: list[ItemInput] | None = None
    beholder: Extras | None = None

    audio: Any = None
    parallel_tool_calls: Any = None
    prompt: Any = None
    reasoning: Any = None
    tool_choice: Any = None
    tools: Any = None


UNSERVED: Final = (
    "audio",
    "include",
    "parallel_tool_calls",
    "prompt",
    "reasoning",
    "tool_choice",
    "tools",
    "tracing",
    "truncation",
)
HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "include": ([],),
    "parallel_tool_calls": (True, False),  # there are no tools to call
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "truncation": ("auto", "disabled"),
}
"""Values of unserved fields that change nothing, besides null and objects of nulls."""


class RealtimeUpdate(ClientEvent, frozen=True, kw_only=True):
    """`session.update`."""

    session: RealtimeConfig


class ItemCreate(ClientEvent, frozen=True, kw_only=True):
    """`conversation.item.create`."""

    item: ItemInput
    previous_item_id: str | None = None


class ItemNamed(ClientEvent, frozen=True, kw_only=True):
    """`conversation.item.retrieve` and `.delete`."""

    item_id: str


class RealtimeResponseCreate(ClientEvent, frozen=True, kw_only=True):
    """`response.create`."""

    response: ResponseParams = msgspec.field(default_factory=ResponseParams)


class RealtimeResponseCancel(ClientEvent, frozen=True, kw_only=True):
    """`response.cancel`."""

    response_id: str | None = None


class ImageAppend(ClientEvent, frozen=True, kw_only=True):
    """`input_image_buffer.append`: a picture, as base64 or as a data URL; the newest counts."""

    image: str


class ImageClear(ClientEvent, frozen=True, kw_only=True):
    """`input_image_buffer.clear`."""


REALTIME_EVENTS: Final[dict[str, type[ClientEvent]]] = {
    "session.update": RealtimeUpdate,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemNamed,
    "conversation.item.delete": ItemNamed,
    "response.create": RealtimeResponseCreate,
    "response.cancel": RealtimeResponseCancel,
    "input_image_buffer.append": ImageAppend,
    "input_image_buffer.clear": ImageClear,
}
NOT_SERVED: Final = (
    "conversation.item.truncate",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
    "output_audio_buffer.clear",
)


# ---- what the server says -------------------------------------------------------------------------------------------


class RealtimeEvent(OutboundEvent, frozen=True, kw_only=True):
    """Any event of OpenAI's; `event_id` is given when it goes out."""

    name: str
    fields: dict[str, Any]

    def numbered(self, seq: int) -> object:
        """With its `event_id`."""
        return {"type": self.name, "event_id": f"event_{seq}", **self.fields}

    def joined_with(self, later: OutboundEvent) -> Self | None:
        """Text of the same response is one text."""
        if not isinstance(later, RealtimeEvent) or self.name != DELTA or later.name != DELTA:
            return None
        if self.fields["response_id"] != later.fields["response_id"] or len(self.fields["delta"]) >= MAX_DELTA_CHARS:
            return None
        joined = {**self.fields, "delta": self.fields["delta"] + later.fields["delta"]}
        return msgspec.structs.replace(self, fields=joined)

    @property
    def num_bytes(self) -> int:
        """With its texts, wherever they are."""
        if self.name == DELTA:
            return EVENT_BYTES + len(self.fields["delta"])
        return EVENT_BYTES + len(msgspec.json.encode(self.fields))


def error_event(error: BeholderError, event_id: str | None = None) -> RealtimeEvent:
    """OpenAI's `error`."""
    shown = {
        "type": error.kind,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "event_id": event_id,
    }
    return RealtimeEvent(name="error", fields={"error": shown})
