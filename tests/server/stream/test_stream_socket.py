"""The stream over real sockets: handshake, keys and tickets, slow readers, lost connections, close codes, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from serving import PATIENCE_S
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

from preprocess.errors import ClientError, ServiceError
from server import http_connection

TEXT = "A small red square on white."


def metric(server: Any, name: str, **headers: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", headers=headers).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(re.escape(name) + r"([{ ]|$)", line)]
    return sum(values)


async def soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.005)


# ---- opening --------------------------------------------------------------------------------------------------------


def test_a_bare_jpeg_and_a_question_are_answered(server: Any, run: Any, service: Any) -> None:
    async def story() -> None:
        async with await server.connect() as client:
            created = await client.next()
            assert client.socket.subprotocol == "vlm.stream.v1"
            assert created["limits"]["max_message_bytes"] == 16 << 20
            await client.frame()
            await client.say("response.create", response={"prompt": "What is it?"})
            done = await client.until("response.done")
            assert done["text"] == TEXT == "".join(e["delta"] for e in client.of("response.output_text.delta"))
            assert [event["seq"] for event in client.events] == list(range(1, len(client.events) + 1))
            assert done["timings"]["decode_ms"] == 1.5
        messages, _, _ = service.last
        assert messages[0].content[0].text == "What is it?"

    run(story())


def test_deflate_is_off(server: Any, run: Any) -> None:
    async def story() -> None:
        async with await server.connect(compression="deflate") as client:
            assert "permessage-deflate" not in client.socket.response.headers.get("Sec-WebSocket-Extensions", "")

    run(story())


@pytest.mark.parametrize("offered", [None, ["other.v1"]])
def test_another_subprotocol_is_refused_naming_ours(server: Any, run: Any, offered: Any) -> None:
    async def story() -> None:
        with pytest.raises(InvalidStatus) as refused:
            await server.connect(subprotocols=offered)
        assert refused.value.response.status_code == 400
        assert "vlm.stream.v1" in json.loads(refused.value.response.body)["error"]["message"]

    run(story())


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/realtime?model=tiny"])
def test_a_request_that_is_no_websocket_is_told_so(server: Any, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
    assert "is a WebSocket" in answer.json()["error"]["message"]
    assert httpx.head(server.url + path).status_code == 426
    assert httpx.post(server.url + path).status_code == 405


def test_a_websocket_that_does_not_exist_is_not_found(server: Any, run: Any) -> None:
    async def story() -> None:
        for path in ("/v1/streams", "/v1/stream/", "/v1/captions"):
            with pytest.raises(InvalidStatus) as refused:
                await server.connect(path)
            assert refused.value.response.status_code == 404
            assert f"no WebSocket {path} here" in refused.value.response.body.decode()

    run(story())


def test_another_origin_and_a_strange_host_do_not_get_in(server: Any, run: Any) -> None:
    async def story() -> None:
        for headers in ({"origin": "https://evil.example"}, {"origin": "null"}):
            with pytest.raises(InvalidStatus) as refused:
                await server.connect(additional_headers=headers)
            assert refused.value.response.status_code == 403
        with pytest.raises(InvalidStatus) as refused:
            await server.connect(uri=f"ws://evil.example:{server.port}/v1/stream", host="127.0.0.1")
        assert refused.value.response.status_code == 403

    run(story())


def test_with_a_key_only_the_key_or_a_ticket_opens(serve: Any, run: Any) -> None:
    server = serve(api_key="sesame")
    key = {"Authorization": "Bearer sesame"}

    async def story() -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            client = await server.connect(additional_headers=headers)
            assert await client.closed() == 4401
            assert client.events == []
            assert "API key" in client.socket.close_reason
        async with await server.connect(additional_headers=key) as client:
            assert (await client.next())["type"] == "session.created"
        async with httpx.AsyncClient(base_url=server.url) as http:
            assert (await http.post("/v1/stream/tickets")).status_code == 401
            ticket = (await http.post("/v1/stream/tickets", headers=key)).json()
        assert ticket["expires_in_s"] == 60
        offered = ["vlm.stream.v1", f"vlm.ticket.{ticket['ticket']}"]
        async with await server.connect(subprotocols=offered) as client:
            assert (await client.next())["type"] == "session.created"
            assert client.socket.subprotocol == "vlm.stream.v1"
        assert await (await server.connect(subprotocols=offered)).closed() == 4401  # it works once

    run(story())


def test_a_ticket_expires_and_only_so_many_wait() -> None:
    from server.stream.tickets import LIFETIME_S, MAX_OUTSTANDING, Tickets

    now = [0.0]
    tickets = Tickets(lambda: now[0])
    late, first = tickets.issue(), tickets.issue()
    now[0] = LIFETIME_S + 0.1
    assert not tickets.redeem([f"vlm.ticket.{late}"])
    now[0] = 0.0
    for _ in range(MAX_OUTSTANDING):
        last = tickets.issue()
    assert not tickets.redeem([f"vlm.ticket.{first}"])
    assert tickets.redeem(["vlm.stream.v1", f"vlm.ticket.{last}"])


def test_the_time_for_a_request_head_does_not_end_a_stream(serve: Any, run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT_S", 0.3)
    server = serve()

    async def connected() -> Any:
        """A busy machine may need longer than that to connect and send the head."""
        for _ in range(20):
            with contextlib.suppress(OSError, InvalidMessage):
                return await server.connect()
        raise AssertionError("it never was in time")

    async def story() -> None:
        async with await connected() as client:
            await asyncio.sleep(0.7)
            await client.say("ping")
            await client.until("pong")

    run(story())


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_one_session_too_many_is_told_and_closed_with_1013(serve: Any, run: Any) -> None:
    server = serve(stream_max_sessions=1)

    async def story() -> None:
        first = await server.connect()
        token = await first.next()
        second = await server.connect()
        with contextlib.suppress(ConnectionClosed):
            await second.frame()
        assert await second.closed() == 1013
        assert second.events[0]["error"]["code"] == "too_many_sessions"
        assert second.events[0]["error"]["fatal"] is True
        first.cut()  # its place is kept for it: others wait, it may come back
        await soon(lambda: next(iter(server.hub.sessions.values())).connection is None)
        back = await server.connect()
        await back.say("session.resume", session_id=token["session_id"], resume_token=token["resume_token"], last_seq=1)
        assert (await back.next())["type"] == "session.resumed"
        await back.socket.close()
        await soon(lambda: not server.hub.sessions)

    run(story())


def test_a_message_too_large_is_closed_with_1009(serve: Any, run: Any) -> None:
    server = serve(stream_max_message_mb=0.1)

    async def story() -> None:
        client = await server.connect()
        await client.next()
        with contextlib.suppress(ConnectionClosed):
            await client.frame(b"\xff\xd8" + bytes(200_000))
        assert await client.closed() == 1009

    run(story())


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ({"stream_idle_timeout_s": 0.2}, 4408, "idle_timeout"),
        ({"stream_max_session_s": 1}, 4410, "session_expired"),
        ({"stream_max_messages_per_s": 2}, 4429, "rate_limited"),
        ({"stream_max_mb_per_s": 0.001, "stream_max_message_mb": 0.001, "max_image_mb": 0.001}, 4429, "rate_limited"),
    ],
)
def test_each_limit_has_its_close_code(serve: Any, run: Any, options: dict[str, Any], code: int, word: str) -> None:
    server = serve(**options)

    async def story() -> None:
        client = await server.connect()
        if code == 4429:
            with contextlib.suppress(ConnectionClosed):
                for _ in range(6):
                    await client.frame(b"\xff\xd8" + bytes(700))
        elif code == 4410:
            await client.say("ping")
        assert await client.closed() == code
        assert client.events[-1]["error"]["code"] == word
        await soon(lambda: not server.hub.sessions)
        assert metric(server, f'beholder_stream_closes_total{{code="{code}",model_name="tiny"}}') == 1

    run(story())


# ---- slow readers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience_s", [1000, 0.5])
def test_a_reader_that_stops_is_cut_off_and_nobody_else_notices(
    serve: Any, run: Any, service: Any, patience_s: float
) -> None:
    """Others are answered while the server waits for that reader, however long it does."""
    server = serve(stream_send_queue_kb=8, stream_send_timeout_s=patience_s, stream_idle_timeout_s=1000)
    service.words, service.delay_s = ("word " * 2000,) * 3000, 0.0005

    async def story() -> None:
        stuck = await server.connect(max_queue=1)
        await stuck.next()
        live = next(iter(server.hub.sessions.values()))
        await stuck.frame()
        await stuck.say("response.create")
        stuck.socket.transport.pause_reading()
        other = await server.connect()
        await other.next()
        most, num_full = 0, 0
        while live.close is None and num_full < 50:
            await other.say("ping", t=1)
            await other.until("pong")
            most = max(most, live.session.outbox.num_bytes)
            if patience_s == 1000:
                num_full += live.session.outbox.num_bytes > 8 * 1024
            await asyncio.sleep(0.01)
        assert most < 8 * 1024 + 16_384 * 2 + 1024  # the queue, one joined delta, one event
        if patience_s == 0.5:
            assert live.close.code == 1013
            await soon(lambda: service.generations[0].num_cancels > 0)
            await soon(lambda: len(server.server.server_state.connections) <= 2)
        stuck.cut()
        await other.socket.close()

    run(story())


# ---- lost connections -----------------------------------------------------------------------------------------------


def test_leaving_ends_the_work_within_a_step(server: Any, run: Any, service: Any) -> None:
    service.words, service.delay_s = ("word ",) * 10_000, 0.01

    async def story() -> None:
        for number, leave in enumerate(("cut", "close")):
            client = await server.connect()
            await client.frame()
            await client.say("response.create")
            await client.until("response.output_text.delta")
            if leave == "cut":
                client.cut()
            else:
                await client.socket.close()
            await soon(lambda number=number: service.generations[number].num_cancels > 0)  # type: ignore[misc]
            said = service.generations[number].num_said
            await asyncio.sleep(0.1)
            assert service.generations[number].num_said == said
        assert len(server.hub.sessions) == 1  # who closed does not come back

    run(story())


def test_leaving_while_a_frame_is_prepared_cancels_that_too(server: Any, run: Any, service: Any) -> None:
    service.submit_delay_s = service.look_delay_s = 60

    async def story() -> None:
        client = await server.connect()
        await client.frame()
        await client.say("response.create")
        await client.until("response.created")
        client.cut()
        await soon(lambda: service.num_submits_cancelled == 1)

    run(story())


def test_resuming_goes_on_where_the_line_broke(server: Any, run: Any, service: Any) -> None:
    service.held_after, service.num_held = 2, 1

    async def story() -> None:
        client = await server.connect()
        created = await client.next()
        await client.update(trigger={"mode": "continuous"}, max_tokens=4)
        await client.frame()
        await client.until("response.output_text.delta")
        client.cut()
        seen = client.events[-1]["seq"]
        await soon(lambda: next(iter(server.hub.sessions.values())).connection is None)
        back = await server.connect()
        await back.say(
            "session.resume",
            session_id=created["session_id"],
            resume_token=created["resume_token"],
            last_seq=seen,
        )
        resumed = await back.until("session.resumed")
        assert (resumed["session_id"], resumed["last_seq"], resumed["seq"]) == (created["session_id"], seen, 0)
        done = await back.until("response.done")
        events = client.events + back.events[back.events.index(resumed) + 1 :]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert done["status"] == "cancelled"
        assert done["text"] == said
        await back.frame()
        assert (await back.until("response.done"))["status"] == "incomplete"
        assert len(server.hub.sessions) == 1
        await back.socket.close()

    run(story())


def test_a_newer_connection_takes_over_and_the_response_goes_on(server: Any, run: Any, service: Any) -> None:
    service.held_after = 2

    async def story() -> None:
        old = await server.connect()
        created = await old.next()
        await old.frame()
        await old.say("response.create")
        await old.until("response.output_text.delta")
        new = await server.connect()
        resume = {"session_id": created["session_id"], "resume_token": created["resume_token"]}
        await new.say("session.resume", **resume, last_seq=old.events[-1]["seq"])
        await new.until("session.resumed")
        service.released.set()
        done = await new.until("response.done")
        assert (done["status"], done["text"]) == ("completed", TEXT)
        assert await old.closed() == 4409
        assert service.generations[0].num_cancels == 0
        await new.socket.close()

    run(story())


def test_only_who_knows_the_token_resumes(server: Any, run: Any) -> None:
    async def story() -> None:
        owner = await server.connect()
        created = await owner.next()
        for change in ({"resume_token": "guess"}, {"session_id": "sess-0"}, {"last_seq": 99}):
            thief = await server.connect()
            fields = {"session_id": created["session_id"], "resume_token": created["resume_token"], "last_seq": 1}
            await thief.say("session.resume", **{**fields, **change})
            assert await thief.closed() == 4404
            assert thief.events[-1]["error"]["fatal"] is True
        await owner.say("ping")
        await owner.until("pong")
        assert len(server.hub.sessions) == 1
        await owner.socket.close()

    run(story())


def test_a_session_that_nobody_resumes_is_forgotten(serve: Any, run: Any) -> None:
    server = serve(stream_resume_s=0.2)

    async def story() -> None:
        client = await server.connect()
        await client.next()
        client.cut()
        await soon(lambda: not server.hub.sessions)

    run(story())


# ---- failing and ending ---------------------------------------------------------------------------------------------


def test_what_the_engine_cannot_do_ends_the_response_and_not_the_session(server: Any, run: Any, service: Any) -> None:
    service.failure = ServiceError("the engine stopped", code="engine_restarting", retry_after_s=0.1)

    async def story() -> None:
        async with await server.connect() as client:
            await client.update(trigger={"mode": "continuous"})
            await client.frame()
            done = await client.until("response.done")
            assert (done["status"], done["error"]["code"]) == ("failed", "engine_restarting")
            assert done["text"] == "A small "
            service.failure = None
            await client.frame()
            assert (await client.until("response.done"))["status"] == "completed"

    run(story())


def test_a_refused_picture_is_named_by_its_frame(server: Any, run: Any, service: Any) -> None:
    service.refusal = ClientError("The picture is damaged", code="image_undecodable", param="messages[0].content[1]")

    async def story() -> None:
        async with await server.connect() as client:
            await client.frame(k="frame", id=41)
            await client.say("response.create")
            done = await client.until("response.done")
            assert (done["status"], done["error"]["param"]) == ("failed", "frame 41")
            await client.update(trigger={"mode": "on_change"})
            await client.frame(b"bad", k="frame", id=42)
            error = (await client.until("error"))["error"]
            assert (error["code"], error["param"]) == ("image_undecodable", "frame 42")

    run(story())


def test_a_drain_lets_the_response_finish_and_closes_with_1001(server: Any, run: Any, service: Any) -> None:
    service.held_after = 2

    async def story() -> None:
        client = await server.connect()
        lost = await server.connect()
        await lost.next()
        lost.cut()
        await client.frame()
        await client.say("response.create")
        await client.until("response.output_text.delta")
        server.server.should_exit = True
        server.call(lambda: server.hub.drain(PATIENCE_S))
        await client.until("session.going_away")
        service.released.set()
        assert await client.closed() == 1001
        kinds = [event["type"] for event in client.events]
        assert kinds.index("session.going_away") < kinds.index("response.done")
        assert client.events[-1]["text"] == TEXT
        await soon(lambda: not server.thread.is_alive())
        assert not server.hub.sessions

    run(story())


def test_metrics_tell_sessions_frames_and_ages(server: Any, run: Any, service: Any) -> None:
    async def story() -> None:
        async with await server.connect() as client:
            await client.update(trigger={"mode": "on_change"})
            await client.frame()
            await client.until("response.done")
            mailbox = next(iter(server.hub.sessions.values())).session.mailbox
            for number in range(1, 4):
                await client.frame(b"still", k="frame")
                await soon(lambda number=number: mailbox.dropped["unchanged"] == number)  # type: ignore[misc]
                await asyncio.sleep(0.05)  # more than 30 frames a second are not taken
            while (stats := await client.until("frames.stats"))["received"] < 4:
                pass
            assert stats["dropped"] == {"unchanged": 3}
            assert len(service.submitted) == 1
            assert metric(server, "beholder_stream_sessions") == 1
            assert metric(server, 'beholder_stream_frames_total{model_name="tiny",outcome="unchanged"}') == 3
            assert metric(server, "beholder_stream_frame_age_seconds_count") == 1
            response_id = client.of("response.created")[0]["response_id"]
            await client.say("feedback.create", response_id=response_id, rating="down")
            await client.until("feedback.created")
            assert metric(server, "beholder_stream_feedback_total") == 1
        await soon(lambda: not server.hub.sessions)
        assert metric(server, "beholder_stream_frames_received_total") == 4
        assert metric(server, 'beholder_stream_frames_total{model_name="tiny",outcome="captioned"}') == 1
        assert metric(server, 'beholder_stream_responses_total{model_name="tiny",status="completed"}') == 1

    run(story())


# ---- below the messages ----------------------------------------------------------------------------------------------


def masked(first: int, payload: bytes, length: int | None = None) -> bytes:
    """One frame of RFC 6455 from a client, whatever the standard says about it."""
    size = len(payload) if length is None else length
    head = bytes([first]) + (bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big"))
    return head + bytes(4) + payload  # masked with zeros


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([masked(0x89, bytes(126))], 1002),  # a ping longer than pings may be
        ([masked(0x09, b"x")], 1002),  # a ping in parts
        ([masked(0xC1, b"{}")], 1002),  # a reserved bit: compression that was not agreed upon
        ([masked(0x83, b"x")], 1002),  # a kind of frame that does not exist
        ([masked(0x80, b"x")], 1002),  # the rest of nothing
        ([masked(0x01, b"{"), masked(0x81, b"}")], 1002),  # a message inside a message
        ([b"\x81\x02{}"], 1002),  # without a mask
        ([masked(0x81, b"\xff\xfe")], 1007),  # no UTF-8
        ([masked(0x88, b"\x03")], 1002),  # half a close code
        ([masked(0x02, b""), masked(0x00, b"") * 5000], 1009),  # empty parts without end, which no bound on bytes sees
        ([b"\x82\xff" + (1 << 40).to_bytes(8, "big") + bytes(4)], 1009),  # announces a terabyte
    ],
)
def test_what_is_no_websocket_closes_its_connection_and_nothing_else(
    server: Any, run: Any, frames: list[bytes], code: int
) -> None:
    async def story() -> None:
        async with await server.connect() as other:
            await other.next()
            client = await server.connect()
            await client.next()
            for frame in frames:
                client.socket.transport.write(frame)
            assert await client.closed() == code
            await soon(lambda: sum(live.connection is not None for live in server.hub.sessions.values()) == 1)
            await other.say("ping", t=1)
            assert (await other.until("pong"))["t"] == 1

    run(story())


def test_pings_of_a_client_that_reads_no_answers_are_not_answered_for_ever(server: Any, run: Any) -> None:
    async def story() -> None:
        async with await server.connect() as other:
            await other.next()
            client = await server.connect()
            await client.next()
            client.socket.transport.pause_reading()
            pings = masked(0x89, bytes(125)) * 1000
            while sum(live.connection is not None for live in server.hub.sessions.values()) == 2:
                client.socket.transport.write(pings)
                await asyncio.sleep(0.01)
            await other.say("ping", t=1)
            assert (await other.until("pong"))["t"] == 1
            client.socket.transport.abort()

    run(story())


def test_a_flood_of_pings_and_of_tiny_parts_is_borne(server: Any, run: Any) -> None:
    async def story() -> None:
        async with await server.connect() as client:
            await client.next()
            client.socket.transport.write(masked(0x89, b"x") * 5000)
            event = b'{"type": "ping", "t": 7}'
            parts = [masked(0x01, event[:1]), *(masked(0x00, event[i : i + 1]) for i in range(1, len(event)))]
            client.socket.transport.write(b"".join(parts) + masked(0x80, b""))
            assert (await client.until("pong"))["t"] == 7

    run(story())
