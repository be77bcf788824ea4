"""Uploads: an id for a picture, usable wherever a picture is; bounded in bytes and time, and no oracle for anybody."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from preprocess.errors import ClientError
from preprocess.wire import ImagePart
from server.app import create_app
from server.image_store import IMAGE_ID, ImageStore
from server.settings import Settings

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def upload(client: Any, data: bytes = PNG) -> Any:
    return client.post("/v1/images", content=data, headers={"content-type": "image/png"})


def pictures(service: Any) -> list[bytes]:
    return [part.data for message in service.last[0] for part in message.content if isinstance(part, ImagePart)]


def test_upload_use_show_delete(client: Any, service: Any) -> None:
    answer = upload(client)
    image = answer.json()
    assert answer.status_code == 201
    assert (image["object"], image["bytes"]) == ("image", len(PNG))
    assert IMAGE_ID.fullmatch(image["id"])
    assert image["expires_at"] - image["created_at"] == 3600
    form = client.post("/v1/images", files={"file": ("a.png", PNG)}).json()
    assert form["id"] == image["id"], "the same bytes, the same id"

    content = [
        {"type": "image_url", "image_url": {"url": image["id"], "detail": "low"}},
        {"type": "text", "text": "?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    ]
    assert client.chat(content).status_code == 200
    assert pictures(service) == [PNG, b""]
    assert service.last[0][0].content[0].detail == "low"
    assert client.post("/v1/captions", json={"image": image["id"]}).status_code == 200
    assert pictures(service) == [PNG]
    assert client.post("/v1/captions", json={"images": [image["id"], "AAAA"]}).status_code == 200
    assert pictures(service) == [PNG, b""]

    assert client.get(f"/v1/images/{image['id']}").json()["bytes"] == len(PNG)
    assert client.request("DELETE", f"/v1/images/{image['id']}").json() == {
        "id": image["id"],
        "deleted": True,
        "object": "image",
    }
    assert client.get(f"/v1/images/{image['id']}").status_code == 404


@pytest.mark.parametrize("body", ["chat", "caption"])
def test_an_unknown_id_is_a_404_that_names_the_place(client: Any, service: Any, body: str) -> None:
    unknown = "file-" + "0" * 32
    if body == "chat":
        text = {"type": "text", "text": "?"}
        answer = client.chat([text, {"type": "image_url", "image_url": {"url": unknown}}])
        param = "messages[0].content[1]"
    else:
        answer = client.post("/v1/captions", json={"images": ["AAAA", unknown]})
        param = "images[1]"
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "image_not_found", param)
    assert not service.submitted


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"content": b"%PDF-1.7 hello", "headers": {"content-type": "image/png"}}, 400, None),
        ({"content": b"", "headers": {"content-type": "image/png"}}, 400, "image_missing"),
        ({"content": PNG, "headers": {"content-type": "text/plain"}}, 415, "unsupported_media_type"),
        ({"files": {"file": ("a.png", PNG)}, "data": {"x": "y"}}, 400, "unknown_parameter"),
        ({"files": [("file", ("a.png", PNG)), ("file", ("b.png", PNG))]}, 400, "too_many_images"),
        ({"content": PNG + bytes(600_000), "headers": {"content-type": "image/png"}}, 413, "image_too_large"),
    ],
)
def test_refusals(client: Any, options: dict[str, Any], status: int, code: str | None) -> None:
    answer = client.post("/v1/images", **options)
    assert answer.status_code == status, answer.text
    assert code in {None, answer.json()["error"]["code"]}


def test_uploads_can_be_off(service: Any, client_of: Any) -> None:
    client = client_of(create_app(Settings.load({"served_model_name": "t", "image_store_mb": 0}), service))
    assert (upload(client).status_code, upload(client).json()["error"]["code"]) == (404, "uploads_off")


def test_the_key_is_asked_for(service: Any, client_of: Any) -> None:
    client = client_of(create_app(Settings.load({"served_model_name": "t", "api_key": "k"}), service))
    assert upload(client).status_code == 401


def test_ids_differ_between_servers() -> None:
    """Who has a picture cannot work out its id and ask whether it is there."""
    assert ImageStore(100, 1).id_of(PNG) != ImageStore(100, 1).id_of(PNG)


def test_what_is_not_used_is_forgotten() -> None:
    now = 0.0
    store = ImageStore(1000, 10, lambda: now)
    store.put("a", b"1")
    store.put("b", b"2")
    now = 9.0
    store.get("a")
    now = 11.0
    assert store.get("a").data == b"1"
    with pytest.raises(ClientError, match="Upload it again"):
        store.get("b")


class Model(RuleBasedStateMachine):
    """The store against a list of (id, size, last use), least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = ImageStore(50, 20, lambda: self.now)
        self.expected: list[tuple[str, int, float]] = []

    def expire(self) -> None:
        self.expected = [item for item in self.expected if item[2] + 20 > self.now]

    def drop(self, image_id: str) -> None:
        self.expected = [item for item in self.expected if item[0] != image_id]

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(image_id=st.sampled_from("abcdef"), size=st.integers(1, 30))
    def put(self, image_id: str, size: int) -> None:
        self.store.put(image_id, bytes(size))
        self.expire()
        self.drop(image_id)
        while sum(item[1] for item in self.expected) + size > 50:
            self.expected.pop(0)
        self.expected.append((image_id, size, self.now))

    @rule(image_id=st.sampled_from("abcdef"))
    def get(self, image_id: str) -> None:
        self.expire()
        known = [item for item in self.expected if item[0] == image_id]
        if known:
            assert len(self.store.get(image_id).data) == known[0][1]
            self.drop(image_id)
            self.expected.append((image_id, known[0][1], self.now))
        else:
            with pytest.raises(ClientError):
                self.store.get(image_id)

    @rule(image_id=st.sampled_from("abcdef"))
    def delete(self, image_id: str) -> None:
        known = any(item[0] == image_id for item in self.expected)
        assert self.store.delete(image_id) == known
        self.drop(image_id)

    @invariant()
    def bounded(self) -> None:
        assert self.store.num_bytes == sum(item[1] for item in self.expected) <= 50
        assert list(self.store._images) == [item[0] for item in self.expected]

    @rule()
    def too_large(self) -> None:
        with pytest.raises(ClientError) as raised:
            self.store.put("z", bytes(51))
        assert raised.value.status == 413


TestModel = Model.TestCase
