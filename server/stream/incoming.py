"""A client's JSON text → one of the client events, or a refusal that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from preprocess.errors import ClientError
from server.complaints import decode, nearest_name
from server.stream.client_events import CLIENT_EVENTS, ClientEvent, Envelope

_envelope: Final = msgspec.json.Decoder(Envelope)


class Decoders:
    """The events of one protocol, by type."""

    def __init__(self, events: Mapping[str, type[ClientEvent]]) -> None:
        self._decoders = {name: msgspec.json.Decoder(kind) for name, kind in events.items()}

    def decode(self, raw: bytes, not_served: tuple[str, ...] = ()) -> ClientEvent:
        """A client's event.

        Args:
            raw: JSON.
            not_served: Event types that are known and refused.

        Raises:
            ClientError: It is none, naming the field.
        """
        try:
            kind = decode(_envelope, raw).type
            decoder = self._decoders.get(kind)
            if decoder is not None:
                return decode(decoder, raw)
        except ClientError as error:
            error.message = error.message.replace("The body", "The message", 1)
            raise
        if kind in not_served:
            raise ClientError(f"The event {kind} is not supported here.", code="unsupported_event", param="type")
        raise ClientError(
            f"The event type {kind[:80]!r} is unknown.{nearest_name(kind, self._decoders)}",
            code="unknown_event",
            param="type",
        )


_stream: Final = Decoders(CLIENT_EVENTS)


def decode_event(raw: bytes) -> ClientEvent:
    """An event of `vlm.stream.v1`. Raises as `Decoders.decode` does."""
    return _stream.decode(raw)


def event_id_of(raw: bytes) -> str | None:
    """The `event_id` of an event that was refused, if it has one."""
    try:
        return msgspec.json.decode(raw, type=Envelope).event_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
