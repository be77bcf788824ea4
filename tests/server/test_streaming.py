"""Streams write what a step brought them where it is heard of: the same bytes, in order, and without a task's turn."""

from __future__ import annotations

import json
import re
import socket
from types import SimpleNamespace

import httpx
import pytest
from serving import PATIENCE_S

from preprocess.errors import ServiceError
from server.http_connection import HttpConnection

QUESTION = {"messages": [{"role": "user", "content": "x"}], "stream": True}
PICTURE = {"image": "A", "stream": True}
STREAMS = [
    ("/v1/chat/completions", {**QUESTION, "n": 2, "logprobs": True, "stream_options": {"include_usage": True}}),
    ("/v1/captions", PICTURE),
    ("/v1/captions", {**PICTURE, "format": "text"}),
    ("/v1/captions", {"video": "data:video/mp4;base64,AAAA", "stream": True, "format": "srt", "segment_s": 4}),
    ("/v1/captions", {"video": "data:video/mp4;base64,AAAA", "stream": True, "format": "timed_json", "segment_s": 4}),
]


def lasting(text):
    """What does not differ from answer to answer."""
    return re.sub(r'"(id|created|ttft_ms|total_ms)":("[^"]*"|[0-9.]+)', "", text)


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_what_is_written_at_once_is_what_asgi_would_send(served, service, client, path, body):
    written = httpx.post(served.url + path, json=body).text
    sent = client.post(path, json=body).text
    assert lasting(written) == lasting(sent) != ""
    by_connection, by_asgi = service.generations
    assert by_connection.num_taken == by_connection.num_said - by_connection.n  # all but the ends
    assert by_asgi.num_taken == 0


@pytest.mark.parametrize("ids", [False, True])
def test_text_of_any_kind_is_what_was_said(served, service, ids):
    service.words = ('"', "\\", "\0", "a\n\n", "\u2028", "ä", "\U0001f600", '\\u0000"', "end")
    asked = {"return_token_ids": True} if ids else {}
    blocks = httpx.post(f"{served.url}/v1/chat/completions", json={**QUESTION, "n": 2, **asked}).text.split("\n\n")
    events = [json.loads(block.removeprefix("data: ")) for block in blocks if block not in ("", "data: [DONE]")]
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    for index in range(2):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        said = [choice["delta"]["content"] for choice in choices if "content" in choice["delta"]]
        assert tuple(said) == ("", *service.words)
        told = [choice.get("token_ids") for choice in choices if "content" in choice["delta"]]
        assert told == [None, *([100 + i] if ids else None for i in range(len(service.words)))]


def test_a_client_that_knows_no_chunks_is_sent_none(served, service):
    data = json.dumps({**PICTURE, "format": "text"}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S) as connection:
        lines = ["POST /v1/captions HTTP/1.0", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    head, _, text = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert text.decode() == "".join(service.words) + "\n"
    assert service.generations[0].num_taken == 0


def test_a_stream_that_fails_ends_with_an_error_behind_what_was_written(served, service):
    service.failure = ServiceError("the engine stopped", code="engine_restarting")
    text = httpx.post(f"{served.url}/v1/captions", json=PICTURE).text
    *said, failure, rest = [block.removeprefix("data: ") for block in text.split("\n\n")]
    assert "".join(json.loads(event)["text"] for event in said) == "".join(service.words[: service.fail_at])
    assert (json.loads(failure)["error"]["code"], rest) == ("engine_restarting", "")


def test_a_piece_that_cannot_be_made_is_an_internal_error_of_its_own_stream(served, service):
    service.words = ("A ", "\ud800", "cat")  # no UTF-8
    text = httpx.post(f"{served.url}/v1/captions", json=PICTURE).text
    said, failure, rest = [block.removeprefix("data: ") for block in text.split("\n\n")]
    assert json.loads(said)["text"] == "A "
    assert (json.loads(failure)["error"]["code"], rest) == ("internal_error", "")


def test_a_quiet_clip_is_pinged_though_deltas_come(served, service, monkeypatch):
    monkeypatch.setattr("server.routes.streaming.HEARTBEAT_S", 0.02)
    service.words, service.delay_s = ("word ",) * 20, 0.01
    text = httpx.post(f"{served.url}/v1/captions", json=STREAMS[3][1]).text
    assert text.count(": ping") == 0  # subtitles have no such word
    text = httpx.post(f"{served.url}/v1/captions", json=STREAMS[4][1]).text
    assert text.count(": ping\n\n") >= 2


@pytest.mark.parametrize(
    "state", [None, "completed", "disconnected", "paused", "closing", "HTTP/1.0"], ids=lambda state: state or "streams"
)
def test_pieces_are_written_directly_only_to_who_reads_them(state):
    connection = object.__new__(HttpConnection)
    connection.cycle = SimpleNamespace(
        response_started=True, response_complete=state == "completed", disconnected=state == "disconnected"
    )
    connection.flow = SimpleNamespace(write_paused=state == "paused")
    connection.transport = SimpleNamespace(is_closing=lambda: state == "closing")
    connection.conn = SimpleNamespace(their_http_version=b"1.0" if state == "HTTP/1.0" else b"1.1")
    assert connection.takes_chunks == (state is None)
