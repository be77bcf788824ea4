"""Below the application: what is no HTTP, too long a head, or a head that never ends."""

from __future__ import annotations

import contextlib
import gc
import json
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from serving import PATIENCE_S

from server import http_connection
from server.http_connection import MAX_HEAD_BYTES, READ_BYTES, HttpConnection


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has little patience with heads."""
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.3)


@pytest.fixture
def port(app, eventually) -> Iterator[int]:
    config = uvicorn.Config(
        app, port=0, http=HttpConnection, h11_max_incomplete_event_size=MAX_HEAD_BYTES, log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert eventually(lambda: server.started)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(10)


def answer(connection: socket.socket) -> bytes:
    """Everything until the server closes or cuts the connection."""
    connection.settimeout(PATIENCE_S)
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00 this is TLS\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/captions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * MAX_HEAD_BYTES,
    ],
)
def test_what_is_no_http_is_refused_with_the_usual_error_object(port: int, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request_bytes)
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX"])
@pytest.mark.usefixtures("hurried")
def test_a_head_that_does_not_end_is_not_awaited_for_ever(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(sent)
        with contextlib.suppress(OSError):  # a byte now and then does not help: at last nobody takes it
            for _ in range(2000):
                connection.sendall(b"a" if sent else b"")
                if select.select([connection], [], [], 0.05)[0]:
                    break
            else:
                raise AssertionError("it is awaited for ever")
        assert answer(connection) == b""


@pytest.mark.usefixtures("hurried")
def test_the_second_request_of_a_connection_has_the_same_time_and_a_slow_answer_has_its_own(port, service) -> None:
    service.submit_delay_s = 0.8
    body = b'{"messages":[{"role":"user","content":"x"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    for _ in range(20):  # a busy machine may need longer than the time for a head to connect and send one
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(PATIENCE_S)
            response = b""
            with contextlib.suppress(OSError):
                connection.sendall(head + body)
                while not response.endswith(b"}") and (piece := connection.recv(65536)):
                    response += piece
            if response:
                assert response.startswith(b"HTTP/1.1 200 ")
                connection.sendall(b"GET /health HTT")
                assert answer(connection) == b""
                return
    raise AssertionError("no answer came")


def test_a_large_body_is_read_in_pieces_so_that_others_get_their_turn(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    data_received = HttpConnection.data_received

    def watched(connection: HttpConnection, data: bytes) -> None:
        sizes.append(len(data))
        data_received(connection, data)

    monkeypatch.setattr(HttpConnection, "data_received", watched)
    body = b'{"messages": "' + b"a" * 10 * READ_BYTES + b'"}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + body)
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1024).startswith(b"HTTP/1.1 400 ")
    assert sum(sizes) == len(head + body)
    assert max(sizes) <= READ_BYTES


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_connection_that_has_ended_needs_no_garbage_collector(port: int, eventually, is_reset: bool) -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"stream":true}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    gc.collect()
    gc.disable()
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head + body)
            connection.settimeout(PATIENCE_S)
            response = b""
            while not response.endswith(b"0\r\n\r\n"):
                response += connection.recv(65536)
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert b"[DONE]" in response
        assert eventually(lambda: not any(type(each) is HttpConnection for each in gc.get_objects()))
    finally:
        gc.enable()
