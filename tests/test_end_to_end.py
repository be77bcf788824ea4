"""The whole service as its users meet it: `beholder serve` with all its processes, and the stock openai client."""

from __future__ import annotations

import base64
import concurrent.futures
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image, ImageDraw
from serving import ENDLESS, Served

ANSWER = 24


def picture(seed: int) -> bytes:
    """A PNG that differs in every tile from those of other seeds."""
    image = Image.new("RGB", (320, 240), ((37 * seed) % 256, (91 * seed) % 256, (53 * seed) % 256))
    ImageDraw.Draw(image).ellipse((20 * seed, 30, 20 * seed + 90, 190), fill=(255, 240 - 30 * seed, 40))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def image_part(data: bytes, **extra: str) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url, **extra}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    with Served(tiny_model, held=True, dtype="float32", api_key="secret", max_waiting=4, max_running=4) as server:
        server.client.headers["Authorization"] = "Bearer secret"
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def model_name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def create(client: openai.OpenAI, model_name: str) -> Any:
    def call(*parts: dict[str, Any], **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": list(parts)}]
        return client.chat.completions.create(
            model=model_name, messages=messages, max_tokens=ANSWER, extra_body={"ignore_eos": True}, **options
        )

    return call


def test_a_stream_says_what_the_whole_answer_says(create: Any) -> None:
    parts = (image_part(picture(1)), text_part("what is it?"))
    whole = create(*parts)
    chunks = list(create(*parts, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == ANSWER
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_two_pictures_swapped_are_another_question(create: Any) -> None:
    first, second = image_part(picture(2)), image_part(picture(3))
    question = text_part("which came first?")
    assert (
        create(first, second, question).choices[0].message.content
        != create(second, first, question).choices[0].message.content
    )


def test_the_same_picture_asked_twice_is_computed_once(create: Any, served: Served) -> None:
    parts = (image_part(picture(4)), text_part("what colour is it?"))
    first = create(*parts)
    again = create(*parts)
    assert first.usage.prompt_tokens_details.cached_tokens < 10
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.choices[0].message.content == first.choices[0].message.content


def test_another_question_about_a_picture_reuses_the_picture(create: Any) -> None:
    create(image_part(picture(5)), text_part("what colour is it?"))
    other = create(image_part(picture(5)), text_part("how many are there?"))
    vision = other.usage.prompt_tokens_details.image_tokens
    assert other.usage.prompt_tokens_details.cached_tokens > vision > 0


def test_detail_high_shows_the_model_more(create: Any) -> None:
    low = create(image_part(picture(6), detail="low"), text_part("read it"))
    high = create(image_part(picture(6), detail="high"), text_part("read it"))
    assert high.usage.prompt_tokens_details.image_tokens > low.usage.prompt_tokens_details.image_tokens


def test_a_seed_says_the_same_alone_and_among_others(create: Any) -> None:
    parts = (image_part(picture(1)), text_part("tell a story"))
    alone = create(*parts, seed=11, temperature=1.0)
    many = create(*parts, seed=11, temperature=1.0, n=4)
    assert many.choices[0].message.content == alone.choices[0].message.content
    assert len({choice.message.content for choice in many.choices}) > 1


def test_a_growing_conversation_never_computes_its_past_again(client: openai.OpenAI, model_name: str) -> None:
    messages: list[Any] = []
    before = 0
    for turn in range(4):
        content = [image_part(picture(7)), text_part("first")] if turn == 0 else f"question {turn}"
        messages.append({"role": "user", "content": content})
        answer = client.chat.completions.create(model=model_name, messages=messages, max_tokens=6)
        details = answer.usage.prompt_tokens_details if answer.usage else None
        assert details is not None
        assert (details.cached_tokens or 0) >= before
        # The template may write the end of an answer otherwise than the model did: only what was asked must be there.
        before = answer.usage.prompt_tokens - 1 if answer.usage else 0
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, served: Served, model_name: str) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=served.url + "/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.chat.completions.create(model="gpt-5", messages=messages)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.chat.completions.create(model=model_name, messages=messages, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError, match="picture"):
        client.chat.completions.create(
            model=model_name,
            messages=[{"role": "user", "content": [image_part(b"GIF89a nonsense")]}],  # type: ignore[list-item,misc]
        )


def test_more_than_the_queue_holds_is_refused_with_retry_after(
    client: openai.OpenAI, served: Served, model_name: str
) -> None:
    """Four answers are written, four wait, and none ends before the others have heard that there is no room."""

    def one(number: int) -> Any:
        messages: Any = [{"role": "user", "content": f"request {number}"}]
        try:
            client.chat.completions.create(
                model=model_name, messages=messages, max_tokens=ENDLESS, extra_body={"ignore_eos": True}
            )
        except openai.RateLimitError as error:
            return error
        return None

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(one, number) for number in range(40)]
        try:
            served.wait_for(lambda: sum(each.done() for each in asked) >= 32)
        finally:
            served.release("answers")
        refused = [error for each in asked if (error := each.result()) is not None]
    served.hold("answers")
    assert 32 <= len(refused) < 40
    for error in refused:
        assert error.code == "queue_full"
        assert int(error.response.headers["retry-after"]) >= 1
