"""A client's JSON text → one of the client events, or a refusal that names the field."""

from __future__ import annotations

from typing import Final

import msgspec

from preprocess.errors import ClientError
from server.complaints import decode, nearest_name
from server.stream.events import CLIENT_EVENTS, ClientEvent, Envelope

_envelope_decoder: Final = msgspec.json.Decoder(Envelope)
_decoders: Final = {name: msgspec.json.Decoder(kind) for name, kind in CLIENT_EVENTS.items()}


def decode_event(raw: bytes) -> ClientEvent:
    """A client's event.

    Raises:
        ClientError: It is none, naming the field.
    """
    try:
        envelope = decode(_envelope_decoder, raw)
        decoder = _decoders.get(envelope.type)
        if decoder is None:
            raise ClientError(
                f"The event type {envelope.type[:80]!r} is unknown.{nearest_name(envelope.type, CLIENT_EVENTS)}",
                code="unknown_event",
                param="type",
            )
        return decode(decoder, raw)
    except ClientError as error:
        error.message = error.message.replace("The body", "The message", 1)
        raise


def event_id_of(raw: bytes) -> str | None:
    """The `event_id` of an event that was refused, if it has one."""
    try:
        return msgspec.json.decode(raw, type=Envelope).event_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
