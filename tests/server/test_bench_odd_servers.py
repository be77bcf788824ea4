"""Servers that answer the benchmarks with what is not expected: understood where it means something, else told in a
line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from server.bench import command, live
from server.bench.chat import Answer, Chat


@contextlib.contextmanager
def answering(body: bytes) -> Iterator[str]:
    """The address of a server that answers everything with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"[]", b'{"data": []}', b'{"data": [{}]}', b'{"models": []}', b"<html>", b"\xff"])
@pytest.mark.parametrize("kind", ["load", "interference"])
def test_what_is_no_list_of_models_is_told_in_a_line(
    kind: str, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(body) as url:
        assert command.main([kind, "--base-url", url, "--image-size", "64x48"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("beholder: ")
    assert "models" in told
    assert "--model" in told


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "127.0.0.1", "ftp://127.0.0.1"])
def test_what_is_no_address_is_told_in_a_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["load", "--base-url", url, "--clients", "1"]) == 1
    assert capsys.readouterr().err.startswith("beholder: ")


def events(*lines: str) -> tuple[int, int]:
    """How many of these events bring something of an answer, and how many tokens they tell of."""

    async def ask(url: str) -> tuple[int, int]:
        answer = Answer()
        async with Chat.with_server(url, model="a") as chat:
            times = [now_s async for now_s in chat.events([], 4, answer)]
        return len(times), answer.num_tokens

    with answering("".join(f"data: {line}\n\n" for line in lines).encode()) as url:
        return asyncio.run(ask(url))


def test_nulls_in_events_say_nothing() -> None:
    said = json.dumps({"choices": [{"delta": {"content": "A"}}]})
    nulls = ({"choices": [{"delta": None}]}, {"choices": None}, {"choices": [{"delta": {"content": None}}]})
    usage = {"choices": [], "usage": {"completion_tokens": 4}}
    assert events(*map(json.dumps, nulls), said, json.dumps(usage), "[DONE]") == (1, 4)
    assert events(said, json.dumps({"usage": {"completion_tokens": None}})) == (1, 0)


@pytest.mark.parametrize("line", ['{"choices": 7}', '{"choices": [{"delta": "A"}]}', '{"choices": ['])
def test_what_is_no_event_of_a_chat_is_quoted(line: str) -> None:
    with pytest.raises(RuntimeError, match="no event of a chat") as told:
        events(line)
    assert line in str(told.value)


def refuses(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(HTTPStatus.OK if request.path == "/metrics" else HTTPStatus.SERVICE_UNAVAILABLE, "")


def accepts(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(HTTPStatus.OK, "") if request.path == "/metrics" else None


def hangs_up(connection: ServerConnection) -> None:
    connection.recv()


def says_no(connection: ServerConnection) -> None:
    connection.send(json.dumps({"type": "error", "error": {"message": "no such trigger", "param": "session.trigger"}}))
    for _ in connection:
        pass


@pytest.mark.parametrize(
    ("door", "host", "words"),
    [(refuses, hangs_up, "503"), (accepts, hangs_up, "camera 0"), (accepts, says_no, "no such trigger")],
)
def test_a_live_session_that_breaks_off_is_told_in_a_line(
    door: object, host: object, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(host, "127.0.0.1", 0, process_request=door, subprotocols=["vlm.stream.v1"]) as server:  # type: ignore[arg-type,list-item]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        monkeypatch.setattr(live, "serving", lambda model: contextlib.nullcontext((url, psutil.Process())))
        monkeypatch.setattr(live, "SETTLE_S", 0.0)
        try:
            assert command.main(["live", "--fps", "10"]) == 1
        finally:
            server.shutdown()
            thread.join()
    told = capsys.readouterr().err
    assert told.startswith("beholder: camera 0: ")
    assert words in told
