"""The benchmarks' client: what it reads however it is split, when that came, and how long it keeps connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import PATIENCE_S

from server.bench import http_client
from server.bench.chat import Answer, Chat
from server.bench.event_lines import EventLines
from server.bench.http_client import HttpClient
from server.bench.http_response import MAX_HEAD_BYTES, MAX_LINE_BYTES, ResponseParser
from server.bench.load import Level, Scenario, measure
from server.tls import self_signed

Result = TypeVar("Result")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

SAID = b'data: {"choices": [{"delta": {"content": "A"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSED = HEAD.replace(b"200 OK", b"400 Bad Request")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


END = chunk(b"")
COMPLETE = HEAD + chunk(SAID) * 3 + chunk(USAGE) + END


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line[16:] for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")]
    return head + (await reader.readexactly(int(lengths[0])) if lengths else b"")


class Host:
    """A server that answers its n-th connection's requests with what is scripted, and counts.

    Args:
        answers: Of each connection, in turn, pieces that are sent one after the other; the last one serves all
            connections that follow. A connection closes after its last answer.
    """

    def __init__(self, *answers: list[bytes]) -> None:
        self.answers = answers
        self.connections = 0
        self.requests: list[bytes] = []
        self.sent_s: list[float] = []
        self.is_gone = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for answer in self.answers[min(self.connections, len(self.answers)) - 1]:
                self.requests.append(await read_request(reader))
                for piece in answer.split(b"|"):
                    self.sent_s.append(time.perf_counter())
                    writer.write(piece)
                    await asyncio.sleep(0.02)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.is_gone.set()
            writer.close()


def with_host(handler: Handler, ask: Callable[[str], Awaitable[Result]], tls: ssl.SSLContext | None = None) -> Result:
    """What a client comes to that is given the address of a server."""

    async def both() -> Result:
        async with await asyncio.start_server(handler, "127.0.0.1", 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            return await ask(f"{'https' if tls else 'http'}://127.0.0.1:{port}")

    return asyncio.run(both())


async def chat_times(url: str, answer: Answer | None = None) -> list[float]:
    async with Chat.with_server(url, model="a") as chat:
        return [now_s async for now_s in chat.events([], 4, answer)]


# ---- framing ---------------------------------------------------------------------------------------------------------


def parsed(pieces: list[bytes]) -> tuple[bytes, ResponseParser]:
    parser = ResponseParser()
    return b"".join([parser.feed(piece) for piece in pieces]), parser


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % len(data) for cut in cuts}), len(data)]
    return [data[first:last] for first, last in pairwise(edges)]


@given(bodies=st.lists(st.binary(min_size=1, max_size=40), max_size=6), cuts=st.lists(st.integers(0, 400), max_size=40))
def test_chunks_are_joined_wherever_packets_end(bodies: list[bytes], cuts: list[int]) -> None:
    data = HEAD + b"".join(map(chunk, bodies)) + END
    body, parser = parsed(split(data, cuts))
    assert body == b"".join(bodies)
    assert (parser.status, parser.is_complete, parser.keeps_open) == (200, True, True)
    _, parser = parsed(split(data[:-1], cuts))
    assert not parser.is_complete
    with pytest.raises(ConnectionError, match="broke off"):
        parser.end()


@given(body=st.binary(max_size=60), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_a_counted_body_ends_where_it_says(body: bytes, cuts: list[int]) -> None:
    data = b"HTTP/1.1 404 Not Found\r\nCONTENT-LENGTH:%d\r\n\r\n%b" % (len(body), body)
    found, parser = parsed(split(data, cuts))
    assert (found, parser.status, parser.is_complete, parser.keeps_open) == (body, 404, True, True)


def test_what_has_come_of_a_chunk_is_not_held_back() -> None:
    parser = ResponseParser()
    assert parser.feed(HEAD + b"a\r\n01234") == b"01234"
    assert parser.feed(b"56789") == b"56789"


def test_extensions_trailers_and_interim_responses_are_no_body() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
    data = interim + HEAD + b'1;name="x"\r\nA\r\n01 \r\nB\r\n0\r\nX-Trailer: 1\r\n\r\n'
    for pieces in ([data], [bytes([byte]) for byte in data]):
        body, parser = parsed(pieces)
        assert (body, parser.status, parser.is_complete) == (b"AB", 200, True)


def test_a_body_without_a_length_lasts_until_the_connection_ends() -> None:
    body, parser = parsed([b"HTTP/1.1 200 OK\r\n\r\nA", b"B"])
    assert (body, parser.is_complete) == (b"AB", False)
    parser.end()
    assert (parser.is_complete, parser.keeps_open) == (True, False)


@pytest.mark.parametrize(
    ("data", "keeps_open"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 200\r\nConnection: x, Close\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nAB", False),
        (HEAD + END + b"HTTP", False),
    ],
)
def test_a_connection_serves_again_where_the_server_says_so(data: bytes, keeps_open: bool) -> None:
    _, parser = parsed([data])
    assert (parser.is_complete, parser.keeps_open) == (True, keeps_open)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * MAX_HEAD_BYTES,
        HEAD + b"+1\r\nA\r\n",
        HEAD + b"-1\r\nA\r\n",
        HEAD + b"\r\n",
        HEAD + b"1_0\r\n",
        HEAD + b"1\r\nAB\r\n",
        HEAD + b"1" * (MAX_LINE_BYTES + 1),
    ],
)
def test_what_is_no_http_is_told(data: bytes) -> None:
    with pytest.raises(ConnectionError, match="the server sent"):
        parsed([data])


# ---- events ----------------------------------------------------------------------------------------------------------


@given(
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    objects=st.lists(st.sampled_from([b"{}", b'{"a": "\xc3\xa4\xe2\x80\xa8"}']), max_size=4),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)
def test_events_are_found_wherever_pieces_end(end: bytes, objects: list[bytes], cuts: list[int]) -> None:
    lines = [b": hello", b"event: x", b"data: [DONE]", b"id: 7", b""]
    lines[2:2] = [b"data: " + one for one in objects]
    text = end.join(lines) + end
    decoder = EventLines()
    assert [found for piece in split(text, cuts) for found in decoder.feed(piece)] == objects


def test_a_last_line_that_nothing_ends_counts_and_the_space_may_be_missing() -> None:
    decoder = EventLines()
    assert decoder.feed(b"data:{}\ndata:  {1}\nother: {}\ndata: {2") == [b"{}", b"{1}"]
    assert decoder.feed(b"") == []
    assert decoder.feed(b"}") == []
    assert decoder.end() == [b"{2}"]
    assert decoder.end() == []


# ---- times -----------------------------------------------------------------------------------------------------------


def test_events_of_one_packet_came_at_one_time_and_those_of_later_packets_later() -> None:
    host = Host([HEAD + chunk(SAID) * 2 + b"|" + chunk(SAID * 3) + b"|" + chunk(SAID + USAGE) + END])
    answer = Answer()
    times_s = with_host(host, lambda url: chat_times(url, answer))
    assert [times_s.count(at) for at in sorted(set(times_s))] == [2, 3, 1]
    assert answer.num_tokens == 7
    for sent_s, at in zip(host.sent_s, sorted(set(times_s)), strict=True):
        assert sent_s < at


def test_an_event_in_several_packets_came_with_the_last_of_its_line() -> None:
    data = HEAD + chunk(SAID + SAID) + END
    for at in range(len(HEAD) + 1, len(HEAD) + 6 + len(SAID), 11):
        host = Host([data[:at] + b"|" + data[at:]])
        times_s = with_host(host, chat_times)
        assert len(times_s) == 2
        assert host.sent_s[1] < times_s[1]
        is_whole = at >= len(HEAD) + len(b"xx\r\n") + len(SAID) - 1
        assert (times_s[0] < host.sent_s[1]) == is_whole


def test_times_are_of_arrival_even_if_the_reader_is_busy() -> None:
    async def slow(url: str) -> list[float]:
        async with Chat.with_server(url, model="a") as chat:
            times_s = []
            async for now_s in chat.events([], 4):
                times_s.append(now_s)
                await asyncio.sleep(0.05)
            return times_s

    host = Host([b"|".join([HEAD, *[chunk(SAID)] * 4, END])])
    times_s = with_host(host, slow)
    for sent_s, at, next_s in zip(host.sent_s[1:], times_s, host.sent_s[2:], strict=False):
        assert sent_s < at < next_s


def test_what_comes_while_readers_are_told_of_theirs_is_stamped_before_all_of_them_are_done() -> None:
    """Ten readers wake for what has come at once, and while the first is busy an eleventh's comes, too."""
    asked, come, more, sent = (threading.Event() for _ in range(4))

    def host(listener: socket.socket) -> None:
        connections = {}
        for _ in range(11):
            connection, _ = listener.accept()
            request = b""
            while not request.endswith(b"}"):
                request += connection.recv(65536)
            connections[b"late" in request, connection.fileno()] = connection
        *early, late = [connections[key] for key in sorted(connections)]
        asked.set()
        for connection in early:
            connection.sendall(HEAD + chunk(SAID) + END)
        come.set()
        more.wait(PATIENCE_S)
        late.sendall(HEAD + chunk(SAID) + END)
        sent.set()

    async def read(chat: Chat, name: str) -> tuple[float, float]:
        """When it came and when its reader had done with it."""
        times_s = []
        async for now_s in chat.events([{"role": "user", "content": name}], 4):
            times_s.append(now_s)
            if not more.is_set():
                more.set()
                sent.wait(PATIENCE_S)
        return times_s[0], time.perf_counter()

    async def all_times(url: str) -> list[tuple[float, float]]:
        async with Chat.with_server(url, model="a") as chat:
            readers = [asyncio.ensure_future(read(chat, name)) for name in [*map(str, range(10)), "late"]]
            while not asked.is_set():
                await asyncio.sleep(0.001)
            come.wait(PATIENCE_S)  # nobody reads meanwhile
            return await asyncio.gather(*readers)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=host, args=(listener,), daemon=True)
        thread.start()
        *early, (stamped_s, _) = asyncio.run(all_times(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()
    assert sum(done_s > stamped_s for _, done_s in early) >= len(early) - 2 * http_client.WOKEN_A_TURN


# ---- connections -----------------------------------------------------------------------------------------------------


async def twice(url: str) -> list[int]:
    async with Chat.with_server(url, model="a", api_key="secret") as chat:
        return [len([now_s async for now_s in chat.events([], 4)]) for _ in range(2)]


def test_a_connection_is_kept_for_the_next_chat() -> None:
    host = Host([COMPLETE] * 2)
    assert with_host(host, twice) == [3, 3]
    assert host.connections == 1
    for request in host.requests:
        assert request.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nAuthorization: Bearer secret\r\n" in request
        assert b'"ignore_eos":true' in request


@pytest.mark.parametrize("closes", ["Connection: close", "connection: Close"])
def test_a_connection_that_the_server_closes_is_not(closes: str) -> None:
    host = Host([COMPLETE.replace(b"\r\n", f"\r\n{closes}\r\n".encode(), 1)])
    assert with_host(host, twice) == [3, 3]
    assert host.connections == 2


def test_a_kept_connection_that_the_server_has_given_up_is_replaced() -> None:
    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                while b"}" not in connection.recv(65536):
                    pass
                connection.sendall(COMPLETE)

    async def ask() -> list[int]:
        async with Chat.with_server(f"http://127.0.0.1:{listener.getsockname()[1]}", model="a") as chat:
            found = [len([now_s async for now_s in chat.events([], 4)])]
            time.sleep(0.1)  # as while pictures are drawn: nobody hears that the connection has ended
            return [*found, len([now_s async for now_s in chat.events([], 4)])]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        assert asyncio.run(ask()) == [3, 3]
        thread.join()


def test_chats_at_once_have_a_connection_each_and_all_are_kept() -> None:
    async def ask(url: str) -> list[int]:
        async with Chat.with_server(url, model="a") as chat:

            async def client() -> int:
                return len([now_s async for now_s in chat.events([], 4)])

            return [*await asyncio.gather(*(client() for _ in range(8))), *await asyncio.gather(client(), client())]

    host = Host([COMPLETE] * 2)
    assert with_host(host, ask) == [3] * 10
    assert host.connections == 8


@pytest.mark.parametrize("how", ["cancelled", "left"])
def test_who_leaves_a_stream_closes_its_connection(how: str) -> None:
    async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(SAID))
        is_closed.append(await reader.read() == b"")
        gone.set()
        writer.close()

    async def leave(url: str) -> None:
        async with Chat.with_server(url, model="a") as chat:
            has_begun = asyncio.Event()

            async def read() -> None:
                async for _ in chat.events([], 4):
                    has_begun.set()
                    if how == "left":
                        return

            task = asyncio.create_task(read())
            await has_begun.wait()
            if how == "cancelled":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.wait_for(gone.wait(), 10)

    is_closed: list[bool] = []
    gone = asyncio.Event()
    with_host(never_ends, leave)
    assert is_closed == [True]


def test_https_asks_for_a_certificate_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(["127.0.0.1"], tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    host = Host([COMPLETE] * 2)
    with pytest.raises(ConnectionError, match=r"cannot be reached.*certificate"):
        with_host(host, twice, context)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert with_host(host, twice, context) == [3, 3]
    assert host.connections == 1


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 9\r\n\r\nnot |today", RuntimeError, "503: not today"),
        (
            HEAD.replace(b"200 OK", b"400 Bad") + chunk(b"no such ") + b"|" + chunk(b"field") + END,
            RuntimeError,
            "such f",
        ),
        (b"HTTP/1.1 500 Oh\r\n\r\n" + b"a" * 600, RuntimeError, "500: a{500}$"),
        (HEAD + chunk(SAID), ConnectionError, "broke off"),
        (HEAD + chunk(SAID)[:-9], ConnectionError, "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + SAID, ConnectionError, "broke off"),
        (b"HTTP/1.1 200", ConnectionError, "broke off"),
        (b"", ConnectionError, "without an answer"),
        (b"SSH-2.0-OpenSSH_9\r\n", ConnectionError, "no HTTP: 'SSH"),
        (HEAD + chunk(b'data: {"error": {"message": "too hot"}}\n\n') + END, RuntimeError, "too hot"),
        (HEAD + chunk(b"data: {oops}\n\n") + END, RuntimeError, "no event of a chat.*oops"),
        (HEAD + chunk(b'data: {"choices": 7}') + END, RuntimeError, "no event of a chat"),
    ],
)
def test_what_goes_wrong_is_told_and_its_connection_closed(answer: bytes, kind: type[Exception], words: str) -> None:
    host = Host([answer])
    with pytest.raises(kind, match=words):
        with_host(host, chat_times)
    assert host.connections == 1


def test_a_refusal_keeps_its_connection() -> None:
    async def ask(url: str) -> int:
        async with Chat.with_server(url, model="a") as chat:
            with pytest.raises(RuntimeError, match="429"):
                [now_s async for now_s in chat.events([], 4)]
            return len([now_s async for now_s in chat.events([], 4)])

    host = Host([b"HTTP/1.1 429 Later\r\nContent-Length: 0\r\n\r\n", COMPLETE])
    assert with_host(host, ask) == 3
    assert host.connections == 1


def test_a_server_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "TIMEOUT_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + chunk(SAID))
        await reader.read()
        writer.close()

    with pytest.raises(ConnectionError, match="said nothing for"):
        with_host(silent, chat_times)


def test_a_port_where_nobody_is_is_told() -> None:
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        asyncio.run(chat_times("http://127.0.0.1:9"))
    with pytest.raises(ConnectionError, match="cannot be reached"):
        asyncio.run(chat_times(f"http://{'a' * 70}.invalid"))


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "127.0.0.1:80",
            "ftp://there",
            "http://",
            "http://there:port",
            "http://[::1",
            "http://a b",
            "http://thére",
        ),
        *("http://name:word@there", "http://there/v1?a=b", "http://there/a\r\nb"),
    ],
)
def test_what_is_no_address_is_quoted(url: str) -> None:
    with pytest.raises(RuntimeError, match="is no address of a server"):
        HttpClient(url)


def test_a_key_that_cannot_be_sent_is_not() -> None:
    with pytest.raises(RuntimeError, match="Authorization") as told:
        HttpClient("http://there", {"Authorization": "Bearer se\r\ncret"})
    assert "cret" not in str(told.value)


# ---- who uses it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 3])
def test_each_client_asks_so_many_rounds(clients: int) -> None:
    host = Host([COMPLETE] * 100)

    async def ask(url: str) -> list[Level]:
        return await measure(url, Scenario(image_size=(16, 16)), [clients], 8, 0, model="a")

    (level,) = with_host(host, ask)
    assert (level.row()["requests"], level.row()["failed"]) == (8 * clients, 0)
    assert level.num_tokens == 8 * clients * 7


def test_how_many_tokens_an_event_brings_is_told_where_ids_are_asked_for() -> None:
    def event(choice: bytes) -> bytes:
        return chunk(b'data: {"choices": [{' + choice + b"}]}\n\n")

    told = [b'"delta": {"content": "a"}, "token_ids": [7]', b'"delta": {"content": "b"}, "token_ids": [8, 9]']
    untold = [b'"delta": {"content": ""}, "token_ids": null', b'"delta": {"content": "c"}']
    host = Host([HEAD + b"".join(event(choice) for choice in [*told, *untold]) + END])

    async def ask(url: str) -> list[int]:
        answer = Answer()
        async with Chat.with_server(url, model="a") as chat:
            return [answer.num_ids async for _ in chat.events([], 4, answer, token_ids=True)]

    assert with_host(host, ask) == [1, 2, 1]
    assert b'"return_token_ids":true' in host.requests[0]
