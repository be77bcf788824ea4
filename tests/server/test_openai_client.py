"""The stock `openai` client against a real server: answers, streams, and the exception class of every failure."""

from __future__ import annotations

import openai
import pytest

from preprocess.errors import ClientError, ServiceError

TEXT = "A small red square on white."
MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
            {"type": "text", "text": "What is it?"},
        ],
    }
]


@pytest.fixture
def ai(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        yield client


def ask(ai, **fields):
    return ai.chat.completions.create(model="tiny", messages=MESSAGES, **fields)


def test_an_answer(ai, service):
    answer = ask(ai, temperature=0, seed=1, extra_body={"top_k": 3}, extra_headers={"x-request-id": "mine"})
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (26, 4)
    assert answer._request_id == "mine"
    assert service.last[1].top_k == 3


def test_a_stream(ai):
    chunks = list(ask(ai, stream=True, stream_options={"include_usage": True}, n=2))
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == TEXT
        assert own[0].delta.role == "assistant"
        assert own[-1].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_a_stream_with_the_clients_own_accumulator(ai):
    with ai.chat.completions.stream(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert len(final.choices[0].logprobs.content) == 6


def test_models(ai):
    assert [model.id for model in ai.models.list()] == ["tiny", "alias"]
    assert ai.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (ClientError("no", code="image_undecodable"), openai.BadRequestError),
        (ClientError("no", code="image_timeout", status=422), openai.UnprocessableEntityError),
        (ClientError("no", code="image_too_large", status=413), openai.APIStatusError),
        (ClientError("no", code="queue_full", status=429, retry_after_s=1), openai.RateLimitError),
        (ServiceError("no", code="engine_restarting"), openai.InternalServerError),
    ],
)
def test_every_refusal_has_its_exception(ai, service, refusal, kind, stream):
    service.refusal = refusal
    with pytest.raises(kind) as raised:
        ask(ai, stream=stream)
    assert (raised.value.status_code, raised.value.code) == (refusal.status, refusal.code)


def test_an_unknown_model_is_not_found(ai):
    with pytest.raises(openai.NotFoundError) as raised:
        ai.chat.completions.create(model="other", messages=MESSAGES)
    assert raised.value.code == "model_not_found"


def test_an_unsupported_field_names_itself(ai):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(ai, reasoning_effort="high")
    assert raised.value.param == "reasoning_effort"


def test_a_body_over_the_cap_is_a_413_and_the_connection_lives(ai):
    with pytest.raises(openai.APIStatusError) as raised:
        ai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * (8 << 20)}])
    assert (raised.value.status_code, raised.value.code) == (413, "body_too_large")
    assert ask(ai).choices[0].message.content == TEXT


def test_a_failure_in_the_middle_of_a_stream_raises(ai, service):
    service.failure = ServiceError("the engine stopped", code="engine_restarting")
    said = []
    with pytest.raises(openai.APIError, match="the engine stopped"):
        said.extend(chunk.choices[0].delta.content for chunk in ask(ai, stream=True))
    assert said == ["", "A ", "small "]


def test_the_key_is_asked_for(service, serve_app):
    from server.app import create_app
    from server.settings import Settings

    url = serve_app(create_app(Settings.load({"served_model_name": "tiny", "api_key": "k"}), service)).url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as wrong:
        with pytest.raises(openai.AuthenticationError) as raised:
            wrong.models.list()
        assert raised.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as right:
        assert right.models.list().data[0].id == "tiny"
