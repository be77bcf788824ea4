"""The published schema is the one of the code, and refuses what the server refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from streaming import SCHEMA, check_event

from server.settings import OPTIONS
from server.stream.client_events import CLIENT_EVENTS
from server.stream.mailbox import DROP_REASONS
from server.stream.schema import protocol_schema
from server.stream.server_events import SERVER_EVENTS, SessionLimits
from server.stream.settings_events import SessionPatch
from server.stream.work import CloseCode

PROTOCOL = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


def test_the_published_schema_is_up_to_date_and_sound() -> None:
    assert protocol_schema() == SCHEMA, "run: python -m server.stream.schema > docs/protocol.schema.json"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "session.update", "session": {"prompt": ""}},
        {"type": "session.update", "session": {"trigger": {"mode": "always"}}},
        {"type": "session.update", "session": {"unknown": 1}},
        {"type": "session.update"},
        {"type": "response.create", "response": {"frame_ids": ["a"]}},
        {"type": "feedback.create", "response_id": "r", "rating": "great"},
        {"type": "ping", "t": "now"},
    ],
)
def test_it_refuses_what_the_server_refuses(event: dict[str, object]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_event(event, "ClientEvent")


def test_it_accepts_what_clients_send() -> None:
    for event in (
        {"type": "session.update", "event_id": "e", "session": {"trigger": {"mode": "interval", "interval_ms": 500}}},
        {"type": "session.update", "session": {"prompt": None, "stop": ["a", "b"], "pinned_ids": [1]}},
        {"type": "response.create"},
        {"type": "response.create", "response": {"prompt": "x", "frame_ids": [], "metadata": {"a": "b"}}},
        {"type": "response.cancel"},
        {"type": "session.close"},
    ):
        check_event(event, "ClientEvent")


def test_the_document_has_every_event_field_reason_code_and_option() -> None:
    words = set(re.findall(r"`([^`\n]+)`", PROTOCOL))
    written = " ".join(words)
    for kind in SERVER_EVENTS:
        assert kind.__struct_config__.tag in words, kind
        for field in kind.__struct_fields__:
            assert re.search(rf"\b{field}\b", written), f"{kind.__name__}.{field}"
    for name in CLIENT_EVENTS:
        assert name in words, name
    for struct in (SessionPatch, SessionLimits):
        for field in struct.__struct_fields__:
            assert re.search(rf"\b{field}\b", written), field
    for reason in DROP_REASONS:
        assert reason in words, reason
    for code in CloseCode:
        assert str(int(code)) in words, code
    for option in OPTIONS:
        if option.startswith("stream_"):
            assert f"--{option.replace('_', '-')}" in words, option


def test_every_example_in_the_document_is_right() -> None:
    examples = re.findall(r"^```json\n(.*?)^```", PROTOCOL, re.DOTALL | re.MULTILINE)
    events = [json.loads(line) for example in examples for line in example.splitlines() if line.startswith('{"type"')]
    assert len(events) > 8
    client = set(CLIENT_EVENTS)
    for event in events:
        check_event(event, "ClientEvent" if event["type"] in client else "ServerEvent")
