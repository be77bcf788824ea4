"""`POST /v1/captions`: three shapes of request, three shapes of answer, and every refusal."""

from __future__ import annotations

import hashlib
import json

import pytest

from preprocess.errors import ClientError, ServiceError
from preprocess.wire import GenerationOptions, ImagePart, Message, TextPart

TEXT = "A small red square on white."
JPEG = b"\xff\xd8\xff\xe0 not really"
PROMPT = TextPart("Describe the picture.")


def raw(client, query="", data=JPEG, content_type="image/jpeg", **headers):
    return client.post(f"/v1/captions{query}", content=data, headers={"content-type": content_type, **headers})


def form(client, files=(("file", ("a.jpg", JPEG)),), query="", **fields):
    return client.post(f"/v1/captions{query}", files=list(files), data=fields)


def test_a_raw_picture_is_described(client, service):
    answer = raw(client).json()
    digest = hashlib.sha256(JPEG).hexdigest()
    image = {"width": 32, "height": 24, "sha256": digest, "num_tokens": 16}
    assert answer.pop("id").startswith("caption-")
    assert isinstance(answer.pop("created"), int)
    timings = answer.pop("timings")
    assert answer == {
        "object": "caption",
        "model": "tiny",
        "text": TEXT,
        "image": image,
        "images": [image],
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 6,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 4, "image_tokens": 16},
            "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2},
        },
    }
    assert timings.pop("total_ms") >= timings.pop("ttft_ms") > 0
    assert timings == {
        "image_decode_ms": 1.5,
        "preprocess_ms": 2.5,
        "queue_ms": 1,
        "vision_ms": 2,
        "prefill_ms": 3,
        "token_decode_ms": 4,
    }
    assert service.last[:2] == (
        [Message("user", [ImagePart(data=JPEG), PROMPT])],
        GenerationOptions(),
    )


@pytest.mark.parametrize("content_type", ["image/png", "IMAGE/WEBP", "application/octet-stream", "image/x; q=1"])
def test_the_declared_type_of_a_raw_picture_does_not_matter(client, content_type):
    assert raw(client, content_type=content_type).status_code == 200


def test_a_form_takes_several_files_under_any_names(client, service):
    files = [("left", ("a.jpg", JPEG)), ("right", ("b", b"other")), ("left", ("c", b"\r\n--x\r\n"))]
    fields = {"prompt": "Wéll?", "max_tokens": "3", "temperature": "0", "ignore_eos": "true", "detail": "low"}
    answer = form(client, files, stop=["a", "b"], session_id="cam", priority="1", **fields).json()
    assert "image" not in answer
    assert len(answer["images"]) == 3
    messages, options, more = service.last
    assert messages == [
        Message(
            "user",
            [
                ImagePart(data=JPEG, detail="low"),
                ImagePart(data=b"other", detail="low"),
                ImagePart(data=b"\r\n--x\r\n", detail="low"),
                TextPart("Wéll?"),
            ],
        )
    ]
    assert options == GenerationOptions(max_tokens=3, temperature=0, ignore_eos=True, stop=["a", "b"])
    assert more == {"n": 1, "session_id": "cam", "priority": 1}


def test_the_query_takes_the_same_fields(client, service):
    assert raw(client, "?prompt=Who%3F&top_k=4&stop=a&stop=b&model=alias").status_code == 200
    assert service.last[0][0].content[-1] == TextPart("Who?")
    assert service.last[1] == GenerationOptions(top_k=4, stop=["a", "b"])
    assert form(client, query="?format=text", prompt="x").text == TEXT + "\n"


@pytest.mark.parametrize(
    ("body", "urls"),
    [
        ({"image": "data:image/png;base64,AAAA"}, ["data:image/png;base64,AAAA"]),
        ({"image": "AAAA"}, ["data:application/octet-stream;base64,AAAA"]),
        ({"images": ["AAAA", "data:,x"]}, ["data:application/octet-stream;base64,AAAA", "data:,x"]),
    ],
)
def test_json_takes_data_urls_and_bare_base64(client, service, body, urls):
    assert client.post("/v1/captions", json={**body, "prompt": "x", "seed": 4}).status_code == 200
    assert service.last[0][0].content == [*(ImagePart(data_url=url) for url in urls), TextPart("x")]
    assert service.last[1] == GenerationOptions(seed=4)


def test_json_takes_fields_of_the_query_too(client, service):
    assert client.post("/v1/captions?format=text&seed=4", json={"image": "AAAA"}).text == TEXT + "\n"
    assert service.last[1].seed == 4
    twice = client.post("/v1/captions?seed=4", json={"image": "AAAA", "seed": 5})
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "seed")


def test_the_session_may_come_as_a_header(client, service):
    raw(client, **{"x-session-id": "h"})
    assert service.last[2]["session_id"] == "h"


# ---- answers --------------------------------------------------------------------------------------------------------


def test_text_is_plain(client):
    response = raw(client, "?format=text")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.text == TEXT + "\n"
    streamed = raw(client, "?format=text&stream=true")
    assert streamed.headers["content-type"] == "text/plain; charset=utf-8"
    assert "content-length" not in streamed.headers
    assert streamed.text == TEXT + "\n"


def test_a_stream_of_events_ends_with_the_whole_answer(client):
    response = raw(client, "?stream=true")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, whole, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"caption.chunk"}
    assert "".join(chunk["text"] for chunk in chunks) == TEXT
    whole = json.loads(whole.removeprefix("data: "))
    assert (whole["object"], whole["text"], whole["id"]) == ("caption", TEXT, chunks[0]["id"])


def test_a_failed_stream_of_events_ends_with_an_error(client, service):
    service.failure = ServiceError("the engine stopped", code="engine_restarting")
    response = raw(client, "?stream=true")
    assert json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "engine_restarting"
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("query", ["", "?format=text"])
def test_a_failed_answer_is_a_status(client, service, query):
    service.failure = ServiceError("the engine stopped", code="engine_restarting")
    response = raw(client, query)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_restarting")


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "param", "says"),
    [
        ("?promt=x", "promt", "Did you mean `prompt`?"),
        ("?prompt=a&prompt=b", "prompt", "was given twice"),
        ("?stream=maybe", "stream", "expected `boolean | null`, got `string`"),
        ("?format=xml", "format", "is 'xml'; expected json, text, timed_json, srt or vtt."),
        ("?detail=best", "detail", "is 'best'; expected auto, low or high."),
        ("?max_tokens=0", "max_tokens", "is 0; expected 1 to"),
        ("?max_tokens=many", "max_tokens", "expected `integer | null`"),
        ("?temperature=3", "temperature", "is 3; expected 0 to 2."),
        ("?temperature=nan", "temperature", "is nan; expected 0 to 2."),
        ("?seed=99999999999999999999", "seed", "expected"),
        ("?stop=", "stop[0]", "has 0 characters"),
        ("?n=2", "n", "is unknown"),
        ("?logprobs=true", "logprobs", "is unknown"),
        ("?image=x", "image", "is text; expected a file"),
    ],
)
def test_a_query_field_that_cannot_be_is_refused_by_name(client, service, query, param, says):
    response = raw(client, query)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]
    assert service.submitted == []


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "image", "There is no picture in the request"),
        ({"images": []}, "image", "There is no picture in the request"),
        ({"image": ""}, "image", "holds no picture"),
        ({"image": "A", "images": ["A"]}, "images", "were both given"),
        ({"image": 3}, "image", "expected `string | null`, got `integer`"),
        ({"images": ["A", 3]}, "images[1]", "expected `string`, got `integer`"),
        ({"image": "https://a.example/b.png"}, "image", "is a https: URL, and this server fetches nothing"),
        ({"images": ["A", "file:///etc/passwd"]}, "images[1]", "is a file: URL"),
        ({"images": ["A"] * 4}, "images", "holds 4 pictures; at most 3"),
        ({"image_url": "x"}, "image_url", "Did you mean `image`?"),
        ({"image": "A", "model": "other"}, "model", "is not served here"),
    ],
)
def test_a_json_field_that_cannot_be_is_refused_by_name(client, service, body, param, says):
    response = client.post("/v1/captions", json=body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert says in error["message"]
    assert service.submitted == []


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/x-www-form-urlencoded", "audio/mp4", "multipart/mixed"]
)
def test_another_content_type_is_refused_with_what_to_do(client, content_type):
    response = raw(client, content_type=content_type)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "curl -F" in response.json()["error"]["message"]


@pytest.mark.parametrize("data", [b"", None])
def test_an_empty_picture_is_refused(client, data):
    response = raw(client, data=data) if data is not None else form(client, [("file", ("a.jpg", b""))])
    assert (response.status_code, response.json()["error"]["code"]) == (400, "image_empty")


def test_too_large_a_picture_is_refused_by_its_field(client, service):
    files = [("good", ("a", b"x")), ("bad", ("b", b"x" * (600 << 10)))]
    response = form(client, files)
    assert (response.status_code, response.json()["error"]["param"]) == (413, "bad")
    assert "at most 0.5 MiB" in response.json()["error"]["message"]
    assert service.submitted == []


def test_too_many_files_are_refused(client):
    response = form(client, [("file", ("a.jpg", JPEG))] * 4)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_images")
    assert "The form holds more than 3 pictures" in response.json()["error"]["message"]  # found while it is read


@pytest.mark.parametrize(
    ("send", "field"),
    [
        (lambda client: raw(client), "body"),
        (lambda client: form(client, [("left", ("a", b"x"))]), "left"),
        (lambda client: client.post("/v1/captions", json={"image": "AAAA"}), "image"),
    ],
)
def test_a_workers_refusal_names_the_field_of_this_request(client, service, send, field):
    service.refusal = ClientError("too dark", code="image_undecodable", param="messages[0].content[0]")
    assert send(client).json()["error"]["param"] == field
    service.refusal = ClientError("too long", code="x", param="messages[0].content[1]")
    assert send(client).json()["error"]["param"] == "prompt"
    service.refusal = ClientError("too long", code="x", param="messages")
    assert send(client).json()["error"]["param"] == "messages"


def test_files_of_one_name_are_told_apart(client, service):
    service.refusal = ClientError("too dark", code="image_undecodable", param="messages[0].content[1]")
    response = form(client, [("file", ("a", b"x")), ("file", ("b", b"y"))])
    assert response.json()["error"]["param"] == "file[1]"
    assert [part.data for part in service.last[0][0].content[:2]] == [b"x", b"y"]


@pytest.mark.parametrize("shape", ["raw", "form", "json"])
def test_a_body_over_the_cap_is_a_413_in_every_shape(client, shape):
    big = b"x" * (2 << 20)
    if shape == "raw":
        response = raw(client, data=big)
    elif shape == "form":
        response = form(client, [("file", ("a.jpg", big))])
    else:
        response = client.post("/v1/captions", json={"image": big.decode()})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (PART, "multipart/form-data"),
        (PART, "multipart/form-data; boundary="),
        (PART, "multipart/form-data; boundary=" + "b" * 300),
        (PART, "multipart/form-data; boundary=b"),  # cut off
        (PART[:-4], "multipart/form-data; boundary=b"),
        (b"", "multipart/form-data; boundary=b"),
        (b"junk", "multipart/form-data; boundary=b"),
        (PART + b"--b--\r\n", "multipart/form-data; boundary=other"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b"),
        (b"--b\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b"),
        (b"--b\r\n" + b"X-H: " + b"a" * 20_000 + b"\r\n\r\nx\r\n--b--\r\n", "multipart/form-data; boundary=b"),
        (
            b'--b\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nx\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n\xff\r\n--b--\r\n',
            "multipart/form-data; boundary=b",
        ),
        (
            b'--b\r\nContent-Disposition: form-data; name="stop"\r\n\r\nx\r\n' * 70 + b"--b--\r\n",
            "multipart/form-data; boundary=b",
        ),
    ],
)
def test_a_broken_form_is_a_400(client, service, body, content_type):
    response = raw(client, data=body, content_type=content_type)
    assert response.status_code == 400
    assert response.json()["error"]["code"] in {"invalid_form", "invalid_value"}
    assert service.submitted == []


def test_a_form_writes_no_files(client, monkeypatch):
    import tempfile

    def refuse(*_, **__):
        raise AssertionError("a temporary file was made")

    for name in ("TemporaryFile", "SpooledTemporaryFile", "NamedTemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, refuse)
    assert form(client, [("file", ("a.jpg", b"x" * (400 << 10)))]).status_code == 200
