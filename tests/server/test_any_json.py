"""Property: whatever JSON arrives, the answer is a 2xx or a well-formed 4xx, and never a 500."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.request_models import CaptionRequest, ChatRequest

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
URLS = st.sampled_from(["data:image/png;base64,AAAA", "data:", "http://a/b", "AAAA", "", ":", "data:,"])
PARTS = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)}),
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": st.fixed_dictionaries({"url": URLS})}),
    st.dictionaries(st.sampled_from(["type", "text", "image_url", "detail", "x"]), ANY_JSON, max_size=3),
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "user", "assistant", "tool"]),
                "content": st.text(max_size=8) | st.lists(PARTS, max_size=3),
            }
        ),
        st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), ANY_JSON, max_size=3),
        ANY_JSON,
    ),
    max_size=3,
)


def fields_of(model):
    names = [field.name for field in msgspec.structs.fields(model)]
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=6), ANY_JSON, max_size=4)


CHATS = ANY_JSON | st.builds(
    lambda messages, fields: {**fields, "messages": messages}, MESSAGES | ANY_JSON, fields_of(ChatRequest)
)
CAPTIONS = ANY_JSON | st.builds(
    lambda url, fields: {"image": url, **fields}, URLS | ANY_JSON, fields_of(CaptionRequest)
)


def check(app, path, body, content_type="application/json"):
    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return await client.post(path, content=body, headers={"content-type": content_type})

    response = asyncio.run(send())
    if response.status_code == 200:
        return
    assert 400 <= response.status_code < 500, (body, response.text)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    assert 0 < len(error["message"]) < 2000
    assert "0x" not in error["message"] or b"0x" in body


PROFILE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


@given(body=CHATS)
@PROFILE
def test_any_json_to_chat(app, body):
    check(app, "/v1/chat/completions", json.dumps(body).encode())


@given(body=CAPTIONS)
@PROFILE
def test_any_json_to_captions(app, body):
    check(app, "/v1/captions", json.dumps(body).encode())


@given(body=st.binary(max_size=200))
@settings(PROFILE, max_examples=60)
def test_any_bytes_to_chat(app, body):
    check(app, "/v1/chat/completions", body)


PIECES = st.sampled_from(
    [b"--b", b"\r\n", b"--", b'Content-Disposition: form-data; name="file"; filename="a"', b"x", b":", b";", b"\0"]
)


@given(pieces=st.lists(PIECES, max_size=12))
@settings(PROFILE, max_examples=100)
def test_any_form_to_captions(app, pieces):
    check(app, "/v1/captions", b"".join(pieces), "multipart/form-data; boundary=b")


@pytest.mark.parametrize("value", [True, -1, 10**30, 1.5, "x", "é" * 300, [], [None], {}, {"a": None}], ids=repr)
def test_any_value_in_any_field_of_chat(app, value):
    for field in msgspec.structs.fields(ChatRequest):
        body = {"messages": [{"role": "user", "content": "x"}], field.name: value}
        check(app, "/v1/chat/completions", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"", "it is empty"),
        (b"{", "it ends too early"),
        (b"{nope}", "it goes wrong at byte 1"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "no Unicode"),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', "no Unicode"),
    ],
)
def test_what_is_no_json_is_told_in_our_words(client, body, detail):
    error = client.post("/v1/chat/completions", content=body).json()["error"]
    assert error["code"] == "invalid_json"
    assert detail in error["message"]
    assert "malformed" not in error["message"]
