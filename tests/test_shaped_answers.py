"""Answers in a shape as users get them: the stock openai client and curl's forms against the whole service."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import psutil
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field
from serving import Served


class Placard(BaseModel):
    """Small enough for a model that writes at random."""

    model_config = ConfigDict(extra="forbid")

    title: str = Field(max_length=8)
    year: int | None = Field(ge=0, le=9999)
    medium: Literal["oil", "ink"]
    tags: list[Literal["red", "blue"]] = Field(max_length=2)


def picture(seed: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (40 * seed % 256, 99, 7 * seed)).save(out, "PNG")
    return out.getvalue()


def content(*seeds: int) -> list[dict[str, Any]]:
    urls = ["data:image/png;base64," + base64.b64encode(picture(seed)).decode() for seed in seeds]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*images, {"type": "text", "text": "What is it?"}]


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    with Served(tiny_model, dtype="float32", max_running=8, kv_tokens=3000) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *seeds: int, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": content(*seeds or (1,))}]
    options: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "max_tokens": 200,
        "temperature": 1.0,
        **fields,
    }
    return client.chat.completions.create(messages=messages, **options)


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)], ids=["one picture", "several"])
def test_parse_gives_the_pydantic_model(client: openai.OpenAI, seeds: tuple[int, ...]) -> None:
    completion = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content(*seeds)}],  # type: ignore[typeddict-item]
        response_format=Placard,
        max_tokens=200,
        temperature=1.0,
        seed=5,
        n=3,
        logprobs=True,
        top_logprobs=2,
    )
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Placard)
        assert choice.logprobs is not None
        assert choice.logprobs.content
        text = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
        assert text.decode().removeprefix(" ").startswith(choice.message.content or "?")
    assert len({choice.message.content for choice in completion.choices}) > 1


def test_a_stream_is_parsed_too_and_says_the_same(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": content(4)}],
        "response_format": Placard,
        "max_tokens": 200,
        "seed": 8,
        "temperature": 1.0,
    }
    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") > 5
    whole = client.chat.completions.parse(**options)
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert isinstance(whole.choices[0].message.parsed, Placard)


def test_too_few_tokens_are_said_to_be_too_few(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": content(1)}],  # type: ignore[typeddict-item]
            response_format=Placard,
            max_tokens=5,
        )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"choice": ["red", "blue", "green"]}, "red|blue|green"),
        ({"regex": "[0-9]{4}-[a-c]"}, "[0-9]{4}-[a-c]"),
        ({"grammar": 'root ::= "(" [0-9] ")"'}, r"\([0-9]\)"),
        ({"json": {"enum": [[1, 2], [7], "a"]}, "disable_any_whitespace": True}, r'\[1,2\]|\[7\]|"a"'),
    ],
)
def test_vllms_spellings(client: openai.OpenAI, shape: dict[str, Any], expected: str) -> None:
    said = set()
    for seed in range(6):
        choice = ask(client, seed, seed=seed, extra_body={"structured_outputs": shape, "ignore_eos": True}).choices[0]
        assert choice.finish_reason == "stop"
        assert re.fullmatch(expected, choice.message.content), choice.message.content
        said.add(choice.message.content)
    assert len(said) > 1


def test_a_stop_string_cuts_and_says_so(client: openai.OpenAI) -> None:
    shape = {"structured_outputs": {"regex": "[a-c]{3}-[a-c]{3}"}}
    choice = ask(client, stop=["-"], extra_body=shape).choices[0]
    assert re.fullmatch("[a-c]{3}", choice.message.content)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "-")


def test_captions_keep_to_a_schema(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": Placard.model_json_schema()}}
    fields = {"response_format": json.dumps(schema), "temperature": 1, "max_tokens": 200}
    for seed in range(4):
        answer = served.caption(picture(seed), seed=seed, **fields).json()
        assert answer["finish_reason"] == "stop", answer
        Placard.model_validate_json(answer["text"])


def test_refusals_name_field_keyword_and_place(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert (raised.value.code, raised.value.param) == ("unsupported_schema", "response_format.json_schema.schema")
    assert "#/properties/a/uniqueItems" in raised.value.message


def test_many_shapes_at_once_beside_free_text(client: openai.OpenAI) -> None:
    def one(seed: int) -> tuple[int, str]:
        extra: dict[str, Any] = {} if seed % 3 == 0 else {"structured_outputs": {"json": Placard.model_json_schema()}}
        if seed % 3 == 2:
            extra = {"structured_outputs": {"choice": ["red", "blue"]}}
        return seed, ask(client, seed, seed=seed, extra_body=extra).choices[0].message.content

    with ThreadPoolExecutor(12) as pool:
        for seed, text in pool.map(one, range(24)):
            if seed % 3 == 1:
                Placard.model_validate_json(text)
            elif seed % 3 == 2:
                assert text in {"red", "blue"}


def test_hostile_grammars_hold_nobody_up(client: openai.OpenAI, served: Served) -> None:
    """Others are answered meanwhile, and all together cost no more than some seconds of the processors."""

    def spent_s() -> float:
        pids = [pid for role in ("engine", "preprocess", "server") for pid in served.pids(role)]
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(each.user + each.system for each in times)

    before_s = spent_s()
    hostile = [
        {"regex": "((a{100}){100}){100}"},
        {"regex": "(a?){1000}a{1000}"},
        {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(6)]}},
        {"grammar": "start: start start | /[a-z]/"},
        {"regex": r"\p{L}{1,500}"},
        {"json": {"type": "integer", "multipleOf": 9973}},
    ]

    def attack(shape: dict[str, Any]) -> None:
        try:
            ask(client, extra_body={"structured_outputs": shape}, max_tokens=60)
        except openai.APIStatusError as error:
            assert error.status_code == 400, error  # noqa: PT017

    with ThreadPoolExecutor(6) as pool:
        attacks = [pool.submit(attack, shape) for shape in hostile]
        while not all(attack.done() for attack in attacks):
            assert ask(client, max_tokens=4).choices[0].finish_reason in {"stop", "length"}
        for done in attacks:
            done.result()
    assert spent_s() - before_s < 20
