"""`POST /v1/chat/completions`: what is accepted, what it becomes, and every refusal with its field."""

from __future__ import annotations

import json

import pytest

from preprocess.errors import ClientError, ServiceError
from preprocess.wire import GenerationOptions, ImagePart, Message, TextPart

PNG = "data:image/png;base64,iVBORw0KGgo="
TEXT = "A small red square on white."


def picture(url=PNG, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words):
    return {"type": "text", "text": words}


def events(response):
    """The data of every server-sent event."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


# ---- what a request becomes -----------------------------------------------------------------------------------------


def test_a_plain_question_is_answered(client, service):
    answer = client.chat("hello").json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 6,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 4, "image_tokens": 16},
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2},
    }
    assert service.last == (
        [Message("user", [TextPart("hello")])],
        GenerationOptions(),
        {"n": 1, "session_id": "", "priority": 0},
    )


def test_pictures_keep_their_place_in_every_turn(client, service):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [text("first"), picture(detail="high"), picture("DATA:,x"), text("which?")]},
        {"role": "assistant", "content": "the second", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": [picture(detail=None)]},
    ]
    assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert service.last[0] == [
        Message("system", [TextPart("be brief")]),
        Message(
            "user",
            [
                TextPart("first"),
                ImagePart(data_url=PNG, detail="high"),
                ImagePart(data_url="DATA:,x"),
                TextPart("which?"),
            ],
        ),
        Message("assistant", [TextPart("the second")]),
        Message("user", [ImagePart(data_url=PNG)]),
    ]


def test_every_sampling_field_reaches_the_engine(client, service):
    fields = {
        "max_tokens": 5,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"11": -5, "12": 2.5},
        "seed": -3,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    more = {"logprobs": True, "top_logprobs": 2, "n": 3, "session_id": "cam-1", "priority": -2}
    assert client.chat("x", **fields, **more).status_code == 200
    options = {**fields, "logit_bias": {11: -5.0, 12: 2.5}, "logprobs": 2}
    assert service.last[1] == GenerationOptions(**options)
    assert service.last[2] == {"n": 3, "session_id": "cam-1", "priority": -2}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3, "max_tokens": 3}, {"max_tokens": 3}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"stop": "end"}, {"stop": ["end"]}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"temperature": None, "stop": None, "seed": None, "tools": None, "response_format": None}, {}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    ],
)
def test_other_spellings_mean_the_same(client, service, fields, options):
    assert client.chat("x", **fields).status_code == 200
    assert service.last[1] == GenerationOptions(**options)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
        {"response_format": {"type": "text"}, "modalities": ["text"], "tools": [], "tool_choice": "none"},
        {"best_of": 1, "echo": False, "use_beam_search": False, "prompt_cache_key": "k", "chat_template_kwargs": {}},
        {"model": "tiny"},
        {"model": "alias"},
        {"stream": False, "stream_options": None},
    ],
)
def test_what_changes_nothing_is_accepted(client, fields):
    assert client.chat("x", **fields).json()["choices"][0]["message"]["content"] == TEXT


def test_the_session_may_come_as_a_header_and_the_body_counts_more(client, service):
    body = {"messages": [{"role": "user", "content": "x"}]}
    client.post("/v1/chat/completions", json=body, headers={"x-session-id": "h"})
    assert service.last[2]["session_id"] == "h"
    client.post("/v1/chat/completions", json={**body, "session_id": "b"}, headers={"x-session-id": "h"})
    assert service.last[2]["session_id"] == "b"


def test_length_logprobs_token_ids_and_choices_are_told(client):
    answer = client.chat("x", max_tokens=2, n=2, logprobs=True, top_logprobs=2, return_token_ids=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == [100, 101]
        first = choice["logprobs"]["content"][0]
        assert (first["token"], first["logprob"], first["bytes"]) == ("A ", -0.25, [65, 32])
        assert first["top_logprobs"][1] == {"token": "x", "logprob": -2.0, "bytes": [120]}
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens"] == 20


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_is_role_then_text_then_finish_then_usage_then_done(client):
    *chunks, done = events(client.chat("x", stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *texts, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in texts] == [
        {"content": word} for word in ("A ", "small ", "red ", "square ", "on ", "white.")
    ]
    assert all(chunk["choices"][0]["finish_reason"] is None and chunk["usage"] is None for chunk in texts)
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 26


def test_a_stream_without_include_usage_has_none(client):
    *chunks, done = events(client.chat("x", stream=True))
    assert done == "[DONE]"
    assert all("usage" not in json.loads(chunk) for chunk in chunks)


def test_choices_of_a_stream_are_told_apart_by_index(client):
    chunks = [json.loads(chunk) for chunk in events(client.chat("x", stream=True, n=2, logprobs=True))[:-1]]
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in own) == TEXT
        assert own[0]["delta"]["role"] == "assistant"
        assert own[-1]["finish_reason"] == "stop"
        assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in own) == 6


def test_a_refusal_of_a_stream_is_a_real_status(client, service):
    service.refusal = ClientError("busy", code="queue_full", status=429, retry_after_s=1.2)
    response = client.chat("x", stream=True)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    assert response.json()["error"] == {
        "message": "busy",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


def test_a_failed_stream_ends_with_an_error_and_without_done(client, service):
    service.failure = ServiceError("the engine stopped", code="engine_restarting")
    *chunks, last = events(client.chat("x", stream=True, stream_options={"include_usage": True}))
    assert json.loads(last) == {
        "error": {"message": "the engine stopped", "type": "server_error", "param": None, "code": "engine_restarting"}
    }
    assert "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks) == "A small "


def test_a_fault_of_ours_in_a_stream_tells_nothing_but_the_request_id(client, service, caplog):
    service.failure = ValueError("secret address 0x7f")
    response = client.chat("x", stream=True)
    error = json.loads(events(response)[-1])["error"]
    assert error["code"] == "internal_error"
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in response.text
    assert "secret" in caplog.text


def test_a_failed_answer_is_a_status_when_not_streamed(client, service):
    service.failure = ServiceError("the engine stopped", code="engine_restarting", retry_after_s=1)
    response = client.chat("x")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "engine_restarting"
    assert service.generations[-1].num_cancels


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_stops_without_its_end_is_an_error(client, service, stream):
    service.words = ()
    response = client.chat("x", stream=stream)
    error = json.loads(events(response)[-1])["error"] if stream else response.json()["error"]
    assert error["code"] == "aborted"
    assert "[DONE]" not in response.text


def test_a_fault_of_ours_is_a_500_that_tells_nothing_but_the_request_id(client, service, caplog):
    service.refusal = ValueError("secret address 0x7f")
    response = client.chat("x")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert "secret" not in response.text
    assert "secret" in caplog.text


def test_a_request_that_takes_too_long_is_a_504(client_of, service):
    from server.app import create_app
    from server.settings import Settings

    app = create_app(Settings.load({"request_timeout_s": 0.1}), service)
    service.submit_delay_s = 60
    assert client_of(app).chat("x").json()["error"]["code"] == "request_timeout"
    assert service.num_submits_cancelled == 1
    app = create_app(Settings.load({"request_timeout_s": 0.7}), service)
    service.submit_delay_s, service.held_after = 0, 2
    response = client_of(app).chat("x")
    assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    last = json.loads(events(client_of(app).chat("x", stream=True))[-1])
    assert last["error"]["code"] == "request_timeout"
    assert [generation.num_cancels > 0 for generation in service.generations] == [True, True]


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSALS = [
    # field, value, param, what the message says
    ("temperature", "hot", "temperature", "`temperature`: expected `number | null`, got `string`."),
    ("temperature", 2.5, "temperature", "`temperature` is 2.5; expected 0 to 2."),
    ("temperature", -1, "temperature", "`temperature` is -1; expected 0 to 2."),
    ("top_p", 0, "top_p", "`top_p` is 0; expected above 0 and at most 1."),
    ("top_p", 1.1, "top_p", "`top_p` is 1.1; expected above 0 and at most 1."),
    ("top_k", -2, "top_k", "`top_k` is -2; expected -1 to"),
    ("min_p", 1.5, "min_p", "`min_p` is 1.5; expected 0 to 1."),
    ("presence_penalty", 3, "presence_penalty", "expected -2 to 2"),
    ("frequency_penalty", -3, "frequency_penalty", "expected -2 to 2"),
    ("repetition_penalty", 0, "repetition_penalty", "expected above 0 and at most 10"),
    ("seed", 2**63, "seed", f"`seed` is {2**63}; expected {-(2**63)} to"),
    ("seed", 1.5, "seed", "`seed`: expected `integer | null`, got `number`."),
    ("seed", 10**400, "seed", "`seed`"),
    ("priority", 2**31, "priority", "`priority` is 2147483648"),
    ("n", 0, "n", "`n` is 0; expected 1 to 16."),
    ("n", 17, "n", "`n` is 17; expected 1 to 16."),
    ("max_tokens", 0, "max_tokens", "`max_tokens` is 0; expected 1 to"),
    ("max_completion_tokens", 0, "max_completion_tokens", "`max_completion_tokens` is 0; expected 1 to"),
    ("min_tokens", -1, "min_tokens", "`min_tokens` is -1"),
    ("stop", [""], "stop[0]", "`stop[0]` has 0 characters; expected 1 to 1000."),
    ("stop", "", "stop[0]", "`stop[0]` has 0 characters"),
    ("stop", ["x"] * 17, "stop", "`stop` holds 17 strings; at most 16"),
    ("stop", ["x", 3], "stop[1]", "expected `string`, got `integer`"),
    ("stop", {}, "stop", "`stop`: expected `string | array | null`, got `object`."),
    ("stop_token_ids", [-1], "stop_token_ids[0]", "`stop_token_ids[0]` is -1"),
    ("stop_token_ids", [1] * 257, "stop_token_ids", "holds 257 ids; at most 256"),
    ("logit_bias", {"5": 101}, "logit_bias[5]", "`logit_bias[5]` is 101; expected -100 to 100."),
    ("logit_bias", {"-5": 1}, "logit_bias[-5]", "is no token id"),
    ("logit_bias", {"cat": 1}, "logit_bias", "`logit_bias`: expected `integer`, got `string`."),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias", "holds 1025 tokens; at most 1024"),
    ("top_logprobs", 2, "top_logprobs", "needs `logprobs`"),
    ("stream_options", {"include_usage": True}, "stream_options", "needs `stream`"),
    ("stream", 1, "stream", "`stream`: expected `boolean | null`, got `integer`."),
    ("session_id", "a b", "session_id", "`session_id` is no session id"),
    ("session_id", "a" * 129, "session_id", "`session_id` is no session id"),
    ("model", "gpt-5", "model", "The model 'gpt-5' is not served here; expected tiny or alias."),
    ("temprature", 1, "temprature", "The field `temprature` is unknown. Did you mean `temperature`?"),
    ("zzz", 1, "zzz", "The field `zzz` is unknown."),
    ("messages", [], "messages", "`messages` is empty"),
    ("messages", "hi", "messages", "`messages`: expected `array`, got `string`."),
    ("messages", [3], "messages[0]", "expected `object`, got `integer`"),
    ("store", True, "store", "`store` is not supported except as false"),
    ("service_tier", "flex", "service_tier", '`service_tier` is not supported except as "auto"'),
    ("modalities", ["text", "audio"], "modalities", "`modalities` is not supported"),
    ("best_of", 2, "best_of", "`best_of` is not supported except as 1"),
    ("echo", True, "echo", "`echo` is not supported except as false"),
    *(
        (name, value, name, f"`{name}` is not supported")
        for name, value in {
            "functions": [{}],
            "function_call": "auto",
            "audio": {},
            "prediction": {},
            "reasoning_effort": "high",
            "verbosity": "low",
            "web_search_options": {},
            "suffix": "x",
            "use_beam_search": True,
            "length_penalty": 2,
            "prompt_logprobs": 1,
            "guided_json": {},
            "guided_regex": "a",
            "guided_choice": ["a"],
            "guided_grammar": "a",
            "bad_words": ["a"],
            "allowed_token_ids": [1],
            "chat_template": "x",
            "chat_template_kwargs": {"a": 1},
            "add_generation_prompt": False,
            "continue_final_message": True,
            "documents": [{}],
            "mm_processor_kwargs": {"a": 1},
            "logits_processors": ["x"],
            "truncate_prompt_tokens": 5,
        }.items()
    ),
]


@pytest.mark.parametrize(("field", "value", "param", "message"), REFUSALS, ids=[f"{r[0]}-{r[2]}" for r in REFUSALS])
def test_a_field_that_cannot_be_is_refused_by_name(client, service, field, value, param, message):
    body = {"messages": [{"role": "user", "content": "x"}], field: value}
    response = client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == (404 if field == "model" else 400)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert error["param"] == param
    assert service.submitted == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"max_tokens": 1, "min_tokens": 2}, "min_tokens"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(client, fields, param):
    response = client.chat("x", **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "bot", "content": "x"}, "messages[1].role", "is 'bot'; expected system, developer, user, assistant"),
        ({"role": "user"}, "messages[1].content", "is missing"),
        ({"content": "x"}, "messages[1]", "missing required field `role`"),
        ({"role": "user", "content": None}, "messages[1].content", "is missing"),
        ({"role": "user", "content": 3}, "messages[1].content", "expected `string | array | null`, got `integer`"),
        ({"role": "user", "content": []}, "messages[1].content", "is empty"),
        ({"role": "user", "content": [3]}, "messages[1].content[0]", "got `integer`"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[1].content[0]", "missing required field `type`"),
        (
            {"role": "user", "content": [text("x"), {"type": "input_audio", "input_audio": {}}]},
            "messages[1].content[1].type",
            "is 'input_audio'; expected text, image_url or video_url.",
        ),
        (
            {"role": "user", "content": [{"type": "text", "txt": "x"}]},
            "messages[1].content[0].txt",
            "Did you mean `text`?",
        ),
        (
            {"role": "user", "content": [text("x"), picture(4)]},
            "messages[1].content[1].image_url.url",
            "expected `string`, got `integer`",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": PNG}]},
            "messages[1].content[0].image_url",
            "expected `object`, got `string`",
        ),
        (
            {"role": "user", "content": [picture(detail="best")]},
            "messages[1].content[0].image_url.detail",
            "is 'best'; expected auto, low or high.",
        ),
        (
            {"role": "user", "content": [picture(uuid="x")]},
            "messages[1].content[0].image_url.uuid",
            "is unknown",
        ),
        *(
            (
                {"role": "user", "content": [picture(url)]},
                "messages[1].content[0].image_url.url",
                f"is a {url.partition(':')[0].lower()}: URL, and this server fetches nothing: send the picture itself",
            )
            for url in ("http://a.example/b.png", "HTTPS://a.example/b.png", "file:///etc/passwd", "ftp://a/b")
        ),
        (
            {"role": "user", "content": [picture("iVBORw0KGgo=")]},
            "messages[1].content[0].image_url.url",
            "is no URL; expected a data URL",
        ),
        ({"role": "user", "content": [picture("")]}, "messages[1].content[0].image_url.url", "holds no picture"),
        ({"role": "user", "content": [picture()] * 4}, "messages", "holds 4 pictures; at most 3"),
        ({"role": "user", "content": "x", "name": "bob"}, "messages[1].name", "is not supported"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls[0]", "missing"),
        ({"role": "user", "content": "x", "contents": "y"}, "messages[1].contents", "Did you mean `content`?"),
    ],
)
def test_a_message_that_cannot_be_is_refused_by_its_path(client, service, message, param, says):
    body = {"messages": [{"role": "system", "content": "x"}, message]}
    response = client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert service.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"hello",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": ' + b"[" * 200_000 + b"}}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}]} trailing',
        b"{}",
    ],
)
def test_a_body_that_is_no_request_is_a_400(client, body):
    response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_refusal_of_a_worker_comes_through_unchanged(client, service):
    service.refusal = ClientError("too dark", code="image_undecodable", status=422, param="messages[0].content[0]")
    response = client.chat([picture()])
    assert response.status_code == 422
    assert response.json()["error"] == {
        "message": "too dark",
        "type": "invalid_request_error",
        "param": "messages[0].content[0]",
        "code": "image_undecodable",
    }


# ---- size -----------------------------------------------------------------------------------------------------------


def test_a_body_over_the_cap_is_a_413_whether_declared_or_found(client):
    big = b'{"messages": "' + b"x" * (1 << 20) + b'"}'

    async def chunks():
        for start in range(0, len(big), 65_536):
            yield big[start : start + 65_536]

    declared = client.post("/v1/chat/completions", content=big)
    found = client.post("/v1/chat/completions", content=chunks())
    for response in (declared, found):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert "at most 1 MiB" in response.json()["error"]["message"]
    at_the_cap = client.chat("x" * ((1 << 20) - 200))
    assert at_the_cap.status_code == 200
