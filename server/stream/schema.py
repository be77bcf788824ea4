"""The JSON Schema of `vlm.stream.v1`, made from the structs that the server itself decodes and encodes.

python -m server.stream.schema > docs/protocol.schema.json
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from server.stream.client_events import CLIENT_EVENTS
from server.stream.configuration import MAX_INTERVAL_MS, MAX_TEXT
from server.stream.mailbox import DROP_REASONS
from server.stream.media import MAX_ID, MAX_TS, Header
from server.stream.server_events import SERVER_EVENTS
from server.stream.settings_events import SessionPatch
from server.stream.terms import MEDIA, TRIGGERS

_WORDS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("TriggerPatch", "mode"): TRIGGERS,
    ("SessionPatch", "prompt_position"): ("before", "after"),
    ("SessionPatch", "overflow"): ("latest", "queue"),
    ("SessionPatch", "detail"): ("auto", "low", "high"),
    ("FeedbackCreate", "rating"): ("up", "down"),
    ("Header", "k"): MEDIA,
}
_BOUNDS: Final[dict[tuple[str, str], dict[str, float]]] = {
    ("TriggerPatch", "interval_ms"): {"minimum": 0, "maximum": MAX_INTERVAL_MS},
    ("TriggerPatch", "change_threshold"): {"minimum": 0, "maximum": 100},
    ("SessionPatch", "prompt"): {"minLength": 1, "maxLength": MAX_TEXT},
    ("SessionPatch", "instructions"): {"minLength": 1, "maxLength": MAX_TEXT},
    ("SessionPatch", "context_frames"): {"minimum": 0},
    ("SessionPatch", "max_tokens"): {"minimum": 1},
    ("SessionPatch", "max_pixels"): {"minimum": 1},
    ("SessionPatch", "temperature"): {"minimum": 0, "maximum": 2},
    ("SessionResume", "last_seq"): {"minimum": 0},
    ("FeedbackCreate", "comment"): {"maxLength": 2000},
    ("Header", "id"): {"minimum": 0, "maximum": MAX_ID},
    ("Header", "ts"): {"minimum": -MAX_TS, "maximum": MAX_TS},
}
_OPTIONAL: Final = {("TextDelta", "token_ids")}
"""Fields of server events that are absent when there is nothing to say."""

_CLIENT_PARTS: Final = frozenset(
    {"SessionPatch", "TriggerPatch", "Ask", "Header"}
    | {"TextFormat", "JsonObjectFormat", "JsonSchemaFormat", "JsonSchema", "StructuredOutputs"}
)
"""Inside of clients' events: what they leave out has a default."""


def protocol_schema() -> dict[str, Any]:
    """The whole schema: `$defs` has `ServerEvent`, `ClientEvent`, `Header`, and every struct in them by its name."""
    kinds = [*SERVER_EVENTS, *CLIENT_EVENTS.values(), SessionPatch, Header]
    _, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    names = {kind.__name__: name for name, kind in CLIENT_EVENTS.items()}
    for part, schema in parts.items():
        _complete(part, schema, is_sent_by_client=part in names or part in _CLIENT_PARTS)
        if part in names:
            schema["properties"]["type"] = {"const": names[part]}
    parts["SessionUpdate"]["properties"]["session"] = {"$ref": "#/$defs/SessionPatch"}
    parts["FramesStats"]["properties"]["dropped"] = {
        "type": "object",
        "properties": {reason: {"type": "integer", "minimum": 1} for reason in DROP_REASONS},
        "additionalProperties": False,
    }
    parts["ServerEvent"] = {"oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in SERVER_EVENTS]}
    parts["ClientEvent"] = {"oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in CLIENT_EVENTS.values()]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "vlm.stream.v1",
        "description": "Text messages in both directions; a binary message begins with a Header. See protocol.md.",
        "anyOf": [{"$ref": "#/$defs/ServerEvent"}, {"$ref": "#/$defs/ClientEvent"}],
        "$defs": dict(sorted(parts.items())),
    }


def _complete(part: str, schema: dict[str, Any], *, is_sent_by_client: bool) -> None:
    """Nothing undocumented is in an object; the server leaves nothing out."""
    properties = schema.get("properties")
    if properties is None:
        return
    schema["additionalProperties"] = False
    if not is_sent_by_client:
        schema["required"] = [name for name in properties if (part, name) not in _OPTIONAL]
        for field in properties.values():
            field.pop("default", None)
    for (where, name), words in _WORDS.items():
        if where == part:
            _narrow(properties[name], {"enum": list(words)})
    for (where, name), bounds in _BOUNDS.items():
        if where == part:
            _narrow(properties[name], bounds)


def _narrow(field: dict[str, Any], rule: dict[str, Any]) -> None:
    """Put a rule on a field, beside null where that is allowed."""
    choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
    choices[0].update(rule)


if __name__ == "__main__":
    print(json.dumps(protocol_schema(), indent=1))
