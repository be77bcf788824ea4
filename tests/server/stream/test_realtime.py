"""The Realtime subset, driven by the stock openai client and, where that would hide something, by a bare socket."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from websockets.exceptions import InvalidStatus

from preprocess.errors import ClientError, ServiceError
from preprocess.wire import ImagePart, Message, TextPart
from server.stream.conversation import MAX_ITEMS

TEXT = "A small red square on white."
PICTURE = "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8 a picture").decode()


def openai(server: Any, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key=key, base_url=f"{server.url}/v1", websocket_base_url=f"ws://127.0.0.1:{server.port}/v1", max_retries=0
    )


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(content)}


ASKED = user({"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": PICTURE})


async def until(connection: Any, kind: str, events: list[Any] | None = None) -> Any:
    async for event in connection:
        if events is not None:
            events.append(event)
        if event.type == kind:
            return event
    raise AssertionError(f"no {kind}")


def test_the_stock_client_shows_a_picture_and_hears_about_it(server: Any, run: Any, service: Any) -> None:
    async def story() -> None:
        async with openai(server).realtime.connect(model="tiny") as connection:
            created = await until(connection, "session.created")
            assert created.session.model == "tiny"
            await connection.session.update(
                session={"type": "realtime", "instructions": "Be brief.", "output_modalities": ["text"]}
            )
            assert (await until(connection, "session.updated")).session.instructions == "Be brief."
            await connection.conversation.item.create(item=ASKED)  # type: ignore[arg-type]
            item = (await until(connection, "conversation.item.done")).item
            assert [part.type for part in item.content] == ["input_text", "input_image"]
            await connection.response.create(response={"metadata": {"a": "b"}})
            events: list[Any] = []
            done = (await until(connection, "response.done", events)).response
            assert [event.type for event in events if event.type != "response.output_text.delta"] == [
                "response.created",
                "rate_limits.updated",
                "response.output_item.added",
                "conversation.item.added",
                "response.content_part.added",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "conversation.item.done",
                "response.done",
            ]
            said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert said == TEXT == done.output[0].content[0].text
            assert (done.status, done.metadata) == ("completed", {"a": "b"})
            assert (done.usage.input_tokens, done.usage.input_token_details.cached_tokens) == (20, 4)
            assert done.usage.input_token_details.image_tokens == 16
            assert len({event.event_id for event in events}) == len(events)
        messages, options, _ = service.last
        assert [message.role for message in messages] == ["system", "user"]
        assert messages[1].content == [TextPart("What is it?"), ImagePart(data_url=PICTURE)]
        assert options.max_tokens == 256

    run(story())


def test_a_conversation_remembers_and_forgets(server: Any, run: Any, service: Any) -> None:
    async def story() -> None:
        async with openai(server).realtime.connect(model="tiny") as connection:
            await connection.conversation.item.create(item=ASKED)  # type: ignore[arg-type]
            await connection.response.create()
            answered = await until(connection, "response.done")
            await connection.conversation.item.create(item=user({"type": "input_text", "text": "And now?"}))  # type: ignore[arg-type]
            await connection.response.create()
            await until(connection, "response.done")
            assert [message.role for message in service.last[0]] == ["user", "assistant", "user"]
            assert service.last[0][1].content == [TextPart(TEXT)]
            item_id = answered.response.output[0].id
            await connection.conversation.item.retrieve(item_id=item_id)
            assert (await until(connection, "conversation.item.retrieved")).item.content[0].text == TEXT
            await connection.conversation.item.delete(item_id=item_id)
            await until(connection, "conversation.item.deleted")
            await connection.response.create(response={"conversation": "none"})
            await until(connection, "response.done")
            assert [message.role for message in service.last[0]] == ["user", "assistant"]
            await connection.response.create(response={"input": [user({"type": "input_text", "text": "Alone"})]})  # type: ignore[list-item]
            await until(connection, "response.done")
            assert service.last[0][0].content == [TextPart("Alone")]

    run(story())


def test_cancelling_ends_with_a_done_that_says_so(server: Any, run: Any, service: Any) -> None:
    service.held_after = 2

    async def story() -> None:
        async with openai(server).realtime.connect(model="tiny") as connection:
            await connection.response.cancel()
            assert (await until(connection, "error")).error.code == "response_cancel_not_active"
            await connection.conversation.item.create(item=ASKED)  # type: ignore[arg-type]
            await connection.response.create()
            await until(connection, "response.output_text.delta")
            await connection.response.create(event_id="second")
            error = (await until(connection, "error")).error
            assert (error.code, error.event_id) == ("conversation_already_has_active_response", "second")
            await connection.response.cancel()
            done = (await until(connection, "response.done")).response
            assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
            assert service.generations[0].num_cancels > 0

    run(story())


def test_a_failure_and_a_length_limit_are_told(server: Any, run: Any, service: Any) -> None:
    async def story() -> None:
        async with openai(server).realtime.connect(model="tiny") as connection:
            await connection.conversation.item.create(item=ASKED)  # type: ignore[arg-type]
            await connection.response.create(response={"max_output_tokens": 2})
            done = (await until(connection, "response.done")).response
            assert (done.status, done.status_details.reason) == ("incomplete", "max_output_tokens")
            service.failure = ServiceError("the engine stopped", code="engine_restarting")
            await connection.response.create()
            done = (await until(connection, "response.done")).response
            assert (done.status, done.status_details.error.code) == ("failed", "engine_restarting")
            service.failure = None
            await connection.response.create()
            assert (await until(connection, "response.done")).response.status == "completed"

    run(story())


def test_the_buffer_keeps_the_newest_picture_and_the_response_sees_it(server: Any, run: Any, service: Any) -> None:
    async def story() -> None:
        async with openai(server).realtime.connect(model="tiny") as connection:
            await connection.conversation.item.create(item=user({"type": "input_text", "text": "What now?"}))  # type: ignore[arg-type]
            for image in (PICTURE, base64.b64encode(b"newest").decode()):
                await connection.send({"type": "input_image_buffer.append", "image": image})  # type: ignore[arg-type]
            await connection.response.create()
            await until(connection, "response.done")
            (message,) = service.last[0]
            newest = "data:application/octet-stream;base64," + base64.b64encode(b"newest").decode()
            assert message.content == [TextPart("What now?"), ImagePart(data_url=newest)]
            mailbox = next(iter(server.hub.sessions.values())).session.mailbox
            assert (mailbox.received, mailbox.captioned, mailbox.dropped["replaced"]) == (2, 1, 1)

    run(story())


def test_pictures_are_taken_as_the_session_says_and_a_response_may_say_otherwise(
    server: Any, run: Any, service: Any
) -> None:
    async def story() -> None:
        async with openai(server).realtime.connect(model="tiny") as connection:

            async def say(kind: str, **fields: Any) -> None:
                await connection.send({"type": kind, **fields})  # type: ignore[arg-type]

            async def seen(**response: Any) -> tuple[list[ImagePart], Any]:
                await say("response.create", response=response)
                await until(connection, "response.done")
                messages, options, _ = service.last
                parts = [part for message in messages for part in message.content]
                return [part for part in parts if isinstance(part, ImagePart)], options

            own = {"max_pixels": 1000, "detail": "low", "top_k": 5, "seed": 1}
            await say("session.update", session={"type": "realtime", "beholder": own})
            await say("conversation.item.create", item=ASKED)
            (picture,), options = await seen()
            assert (picture.max_pixels, picture.detail, options.top_k) == (1000, "low", 5)
            await say("input_image_buffer.append", image=PICTURE)
            pictures, options = await seen(beholder={"max_pixels": 50, "seed": 2})
            assert [picture.max_pixels for picture in pictures] == [1000, 50]
            assert (pictures[1].detail, options.top_k, options.seed) == ("low", 5, 2)
            asked = user({"type": "input_image", "image_url": PICTURE, "detail": "high"})
            (picture,), _ = await seen(input=[asked], beholder={"max_pixels": 7})
            assert (picture.max_pixels, picture.detail) == (7, "high")
            await say("response.create", response={"beholder": {"max_pixels": 7}})
            error = (await until(connection, "error")).error
            assert (error.code, error.param) == ("invalid_value", "response.beholder.max_pixels")

    run(story())


@pytest.mark.parametrize("camera", [False, True])
def test_a_picture_that_cannot_be_decoded_leaves_the_conversation(
    server: Any, run: Any, service: Any, camera: bool
) -> None:
    async def story() -> None:
        async with openai(server).realtime.connect(model="tiny") as connection:
            await connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
            for text in ("One.", "Two."):  # a turn of two items
                await connection.conversation.item.create(item=user({"type": "input_text", "text": text}))  # type: ignore[arg-type]
            if camera:
                await connection.send({"type": "input_image_buffer.append", "image": PICTURE})  # type: ignore[arg-type]
            else:
                await connection.conversation.item.create(item=ASKED)  # type: ignore[arg-type]
            place = f"messages[1].content[{2 if camera else 3}]"
            service.refusal = ClientError("It is no picture.", code="image_undecodable", param=place)
            await connection.response.create()
            events: list[Any] = []
            done = (await until(connection, "response.done", events)).response
            bad = [event.item.id for event in events if event.type == "conversation.item.done"][-1]
            assert [event.item_id for event in events if event.type == "conversation.item.deleted"] == [bad]
            assert done.status_details.error.code == "image_undecodable"
            service.refusal = None
            await connection.response.create()
            assert (await until(connection, "response.done")).response.status == "completed"
            assert service.last[0][1].content == [TextPart("One."), TextPart("Two.")]
            mailbox = next(iter(server.hub.sessions.values())).session.mailbox
            assert mailbox.dropped["decode_error"] == camera

    run(story())


def test_a_response_may_be_about_its_instructions_alone_or_about_items_by_their_ids(
    server: Any, run: Any, service: Any
) -> None:
    async def story() -> None:
        async with openai(server).realtime.connect(model="tiny") as connection:
            await connection.session.update(
                session={"type": "realtime", "audio": {"input": {"turn_detection": None}}, "instructions": "Greet."}
            )
            assert (await until(connection, "session.updated")).session.instructions == "Greet."
            await connection.response.create()
            await until(connection, "response.done")
            assert service.last[0] == [Message("system", [TextPart("Greet.")])]
            for name in ("a", "b"):
                item = user({"type": "input_text", "text": name})
                await connection.conversation.item.create(item={**item, "id": name})  # type: ignore[typeddict-item]
            asked = [{"type": "item_reference", "id": "b"}, user({"type": "input_text", "text": "And this?"})]
            await connection.response.create(
                response={"conversation": "none", "input": asked}  # type: ignore[typeddict-item]
            )
            await until(connection, "response.done")
            assert service.last[0][1].content == [TextPart("b"), TextPart("And this?")]
            await connection.response.create(response={"conversation": "none", "input": []})
            await until(connection, "response.done")
            assert service.last[0] == [Message("system", [TextPart("Greet.")])]

    run(story())


def test_a_full_conversation_is_told_before_a_response_begins(serve: Any, run: Any) -> None:
    async def story() -> None:
        async with await serve(stream_max_messages_per_s=1000).connect(
            "/v1/realtime", subprotocols=["realtime"]
        ) as client:
            for i in range(MAX_ITEMS):
                item = user({"type": "input_text", "text": "x"}) | {"id": f"i{i}"}
                await client.say("conversation.item.create", item=item)
            await client.say("response.create")
            assert (await client.until("error"))["error"]["code"] == "conversation_full"
            await client.say("conversation.item.delete", item_id="i7")
            await client.say("response.create")
            assert (await client.until("response.done"))["response"]["status"] == "completed"

    run(story())


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        (
            {"type": "session.update", "session": {"beholder": {"max_pixels": 0}}},
            "invalid_value",
            "session.beholder.max_pixels",
        ),
        (
            {
                "type": "conversation.item.create",
                "item": user({"type": "input_text", "text": "x", "image_url": PICTURE}),
            },
            "invalid_value",
            "item.content[0].image_url",
        ),
        (
            {
                "type": "conversation.item.create",
                "item": user({"type": "input_image", "text": "x", "image_url": PICTURE}),
            },
            "invalid_value",
            "item.content[0].text",
        ),
        ({"type": "input_audio_buffer.append", "audio": ""}, "unsupported_event", "type"),
        ({"type": "session.updated"}, "unknown_event", "type"),
        ({"type": "session.update", "session": {"voice": "x"}}, "unknown_parameter", "session.voice"),
        ({"type": "session.update", "session": {"tools": [{}]}}, "unsupported_parameter", "session.tools"),
        (
            {"type": "session.update", "session": {"audio": {"output": {"voice": "x"}}}},
            "unsupported_parameter",
            "session.audio",
        ),
        (
            {"type": "session.update", "session": {"output_modalities": ["audio"]}},
            "unsupported_parameter",
            "session.output_modalities",
        ),
        ({"type": "session.update", "session": {"max_output_tokens": 0}}, "invalid_value", "session.max_output_tokens"),
        (
            {"type": "session.update", "session": {"beholder": {"temperature": 9}}},
            "invalid_value",
            "session.beholder.temperature",
        ),
        ({"type": "response.create"}, "conversation_empty", None),
        ({"type": "response.create", "response": {"input": []}}, "conversation_empty", None),
        (
            {"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "x"}]}},
            "item_not_found",
            "response.input[0].id",
        ),
        (
            {"type": "response.create", "response": {"input": [{"type": "item_reference", "id": "x", "role": "user"}]}},
            "invalid_value",
            "response.input[0]",
        ),
        (
            {"type": "conversation.item.create", "previous_item_id": "x", "item": ASKED},
            "item_not_found",
            "previous_item_id",
        ),
        ({"type": "conversation.item.delete", "item_id": "x"}, "item_not_found", "item_id"),
        (
            {"type": "conversation.item.create", "item": {"type": "function_call"}},
            "unsupported_parameter",
            "item.type",
        ),
        (
            {
                "type": "conversation.item.create",
                "item": user({"type": "input_image", "image_url": "https://example.org/a.jpg"}),
            },
            "remote_url_not_supported",
            "item.content[0].image_url",
        ),
        (
            {"type": "conversation.item.create", "item": user({"type": "input_audio"})},
            "unsupported_parameter",
            "item.content[0].type",
        ),
        ({"type": "input_image_buffer.append", "image": "http://x/y.png"}, "remote_url_not_supported", "image"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: Any, run: Any, event: dict[str, Any], code: str, param: str | None
) -> None:
    async def story() -> None:
        async with await server.connect("/v1/realtime", subprotocols=["realtime"]) as client:
            await client.next()
            await client.socket.send(json.dumps({**event, "event_id": "mine"}))
            error = (await client.until("error"))["error"]
            assert (error["code"], error["param"], error["event_id"]) == (code, param, "mine")

    run(story())


def test_json_nested_too_deeply_is_an_error_and_the_session_goes_on(server: Any, run: Any) -> None:
    async def story() -> None:
        async with await server.connect("/v1/realtime", subprotocols=["realtime"]) as client:
            await client.next()
            await client.socket.send(
                '{"type": "conversation.item.create", "item": ' + "[" * 100_000 + "]" * 100_000 + "}"
            )
            assert (await client.until("error"))["error"]["code"] == "invalid_json"
            await client.say("response.create")
            assert (await client.until("error"))["error"]["code"] == "conversation_empty"

    run(story())


def test_another_model_and_binary_messages_do_not_pass(server: Any, run: Any) -> None:
    async def story() -> None:
        with pytest.raises(InvalidStatus) as refused:
            await server.connect("/v1/realtime?model=gpt-realtime", subprotocols=None)
        assert refused.value.response.status_code == 404
        client = await server.connect("/v1/realtime", subprotocols=None)
        await client.frame()
        assert await client.closed() == 1003

    run(story())


def test_the_key_is_asked_for_and_leaving_frees_everything(serve: Any, run: Any, service: Any) -> None:
    server = serve(api_key="sesame")
    service.held_after = 2

    async def story() -> None:
        async with openai(server, key="sesame").realtime.connect(model="tiny") as connection:
            await connection.conversation.item.create(item=ASKED)  # type: ignore[arg-type]
            await connection.response.create()
            await until(connection, "response.output_text.delta")
        while not service.generations[0].num_cancels or server.hub.sessions:  # the test has its time
            await asyncio.sleep(0.01)
        client = await server.connect("/v1/realtime", subprotocols=None)
        assert await client.closed() == 4401

    run(story())
