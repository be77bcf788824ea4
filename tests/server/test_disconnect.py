"""A client that goes away ends the work for it, at every stage and in both modes; a real server and real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import select
import socket
import threading
import time

import httpx
import msgspec
import pytest
from serving import PATIENCE_S

from server.app import create_app
from server.routes import streaming

QUESTION = {"messages": [{"role": "user", "content": "x"}]}


def send_request(served, body, path="/v1/chat/completions"):
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    connection.sendall(head(path, len(data)) + data)
    return connection


def head(path, num_bytes):
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {num_bytes}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def test_a_body_declared_too_large_is_refused_before_it_is_sent(served):
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    connection.sendall(head("/v1/captions", 100 << 20))
    assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    connection.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", QUESTION),
        ("/v1/chat/completions", {**QUESTION, "stream": True}),
        ("/v1/captions", {"image": "AAAA"}),
        ("/v1/captions", {"image": "AAAA", "stream": True}),
        ("/v1/captions", {"image": "AAAA", "stream": True, "format": "text"}),
    ],
)
def test_leaving_while_tokens_come_cancels_the_generation(served, service, eventually, path, body):
    service.delay_s, service.words = 0.02, ("word ",) * 10_000
    connection = send_request(served, body, path)
    assert eventually(lambda: service.generations and service.generations[0].num_said >= 2)
    connection.close()
    assert eventually(lambda: service.generations[0].num_cancels > 0)
    said = service.generations[0].num_said
    time.sleep(0.1)
    assert service.generations[0].num_said == said
    metrics = httpx.get(f"{served.url}/metrics").text
    assert 'request_success_total{finished_reason="abort",model_name="tiny"} 1.0' in metrics


@pytest.mark.parametrize("body", [QUESTION, {**QUESTION, "stream": True}])
def test_leaving_while_the_request_is_prepared_cancels_the_submit(served, service, eventually, body):
    service.submit_delay_s = 60
    connection = send_request(served, body)
    assert eventually(lambda: len(service.submitted) == 1)
    connection.close()
    assert eventually(lambda: service.num_submits_cancelled == 1)
    assert service.generations == []


def test_leaving_while_the_body_is_sent_starts_nothing(served, service):
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
    connection.close()
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert service.submitted == []


def test_a_client_that_reads_nothing_is_let_go_when_it_leaves(served, service, eventually):
    service.words = ("x" * 4096,) * 100_000
    connection = send_request(served, {**QUESTION, "stream": True})
    said = [-1]

    def stands_still():
        """It has come to rest, for half a second; or it is done, 400 MB later."""
        said.append(service.generations[0].num_said if service.generations else 0)
        time.sleep(0.005)
        return said[-1] > 10 and len(set(said[-100:])) == 1

    assert eventually(stands_still)
    assert said[-1] < len(service.words) / 4, "the server buffers without bound"
    connection.close()
    assert eventually(lambda: service.generations[0].num_cancels > 0)


def test_a_finished_answer_is_not_cancelled(served, service):
    for stream in (False, True):
        httpx.post(f"{served.url}/v1/chat/completions", json={**QUESTION, "stream": stream})
    assert [generation.num_cancels for generation in service.generations] == [0, 0]


def test_a_quiet_stream_gets_pings_that_clients_ignore(served, service, monkeypatch):
    monkeypatch.setattr(streaming, "HEARTBEAT_S", 0.05)
    service.held_after, service.words = 1, ("a", "b")
    text = ""
    started = time.monotonic()
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json={**QUESTION, "stream": True}) as response:
        for piece in response.iter_text():
            text += piece
            if text.count(": ping\n\n") >= 3:
                service.released.set()
    assert 3 <= text.count(": ping\n\n") <= (time.monotonic() - started) / 0.05
    assert text.endswith("data: [DONE]\n\n")


def test_a_failed_text_stream_is_cut_so_that_clients_notice(served, service):
    service.failure = ValueError("x")
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{served.url}/v1/captions?format=text&stream=true", json={"image": "A"}) as response,
    ):
        response.read()


def test_two_hundred_requests_that_leave_at_random_leave_nothing_running(served, service, eventually):
    service.delay_s, service.submit_delay_s, service.words = 0.002, 0.005, ("word ",) * 50
    chance = random.Random(7)

    async def one(client, stream):
        patience = chance.choice([0.001, 0.005, 0.02, 0.05, PATIENCE_S])
        try:
            await asyncio.wait_for(
                client.post(f"{served.url}/v1/chat/completions", json={**QUESTION, "stream": stream}), patience
            )
        except TimeoutError:
            return False
        return True

    async def everybody():
        limits = httpx.Limits(max_connections=25)
        async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(one(client, bool(i % 2)) for i in range(200)))

    finished = asyncio.run(everybody())
    assert any(finished)
    assert not all(finished)
    assert eventually(
        lambda: (
            all(generation.ended or generation.num_cancels for generation in service.generations)
            and len(service.generations) + service.num_submits_cancelled == len(service.submitted)
        )
    )


def test_large_bodies_keep_the_event_loop_for_no_longer_than_they_must(served, service, monkeypatch):
    """So that others are answered meanwhile. Counted in the loop's own time, whatever else the machine has to do."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 900_000}]})
    stop = threading.Event()
    submit, spent_s = service.submit, []

    async def noting(*arguments, **options):
        spent_s.append(time.thread_time())
        return await submit(*arguments, **options)

    monkeypatch.setattr(service, "submit", noting)

    def send():
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not stop.is_set():
                assert client.post(f"{served.url}/v1/chat/completions", content=body).status_code == 200

    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    with httpx.Client(timeout=PATIENCE_S) as client:
        while len(spent_s) < 41:
            assert client.get(f"{served.url}/health").json() == {"status": "ok"}
    stop.set()
    for sender in senders:
        sender.join()
    # After the first, which finds nothing loaded: far above what they take, far below bodies decoded the slow way.
    assert (spent_s[-1] - spent_s[4]) / (len(spent_s) - 5) < 0.05


def test_bodies_on_their_way_are_bounded_together(served, app, service, eventually):
    budget = app.state.context.bodies
    budget.max_bytes = 100_000
    connections = []
    for _ in range(2):
        connection = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
        connection.sendall(head("/v1/chat/completions", 200_000) + b" " * 60_000)
        connections.append(connection)
    assert eventually(lambda: budget.used == 60_000)
    (refused,), _, _ = select.select(connections, [], [], PATIENCE_S)
    assert refused.recv(4096).startswith(b"HTTP/1.1 429 ")
    (other,) = [connection for connection in connections if connection is not refused]
    other.sendall(json.dumps(QUESTION).encode().ljust(140_000))
    assert other.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert budget.used == 0


def test_a_stream_whose_client_reads_nothing_ends_with_its_time(
    app, service, settings, serve_app, eventually, monkeypatch
):
    monkeypatch.setattr(streaming, "LAST_WORD_S", 0.1)
    hurried = msgspec.structs.replace(settings, request_timeout_s=0.5)
    served = serve_app(create_app(hurried, service))
    service.words = ("x" * 4096,) * 100_000
    connection = send_request(served, {**QUESTION, "stream": True})
    # Cancelled when its time is over, and again when its last word was given up: then nobody sends any more.
    assert eventually(lambda: service.generations and service.generations[0].num_cancels > 1)
    tail = b""
    while piece := connection.recv(1 << 20):  # what was under way, then the end, which came without a last word
        tail = (tail + piece)[-1000:]
    assert b"request_timeout" not in tail
    connection.close()
