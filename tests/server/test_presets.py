"""Presets: listed, applied, outweighed by the request, and added by people; broken files are refused at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import beholder as api
from preprocess.wire import Grammar, ImagePart, TextPart
from server.app import create_app
from server.options.option import SettingsError
from server.presets import load_presets
from server.settings import Settings

OWN = {"title": "Own", "description": "d", "prompt": "In {prompt}, what is it?", "sampling": {"temperature": 0.5}}
NAMES = [
    "alt_text",
    "describe",
    "hazards",
    "list_objects",
    "museum_placard",
    "one_line",
    "placard_in_words",
    "read_text",
    "yes_no",
]


def texts(service: Any) -> list[str]:
    return [part.text for part in service.last[0][-1].content if isinstance(part, TextPart) and part.text]


def test_every_preset_is_listed_and_can_be_asked_for(client: Any, service: Any) -> None:
    listed = client.get("/v1/presets").json()
    assert [preset["id"] for preset in listed["data"]] == NAMES
    for preset in listed["data"]:
        assert client.get(f"/v1/presets/{preset['id']}").json() == preset
        body = {"image": "AAAA", "preset": preset["id"], "prompt": "Is it red?" if preset["id"] == "yes_no" else None}
        assert client.post("/v1/captions", json=body).status_code == 200
        options = service.last[1]
        assert options.max_tokens == preset["sampling"]["max_tokens"]
        assert (options.grammar is not None) == ("response_format" in preset or "structured_outputs" in preset)


def test_the_museum_placard_has_its_schema(client: Any, service: Any) -> None:
    client.post("/v1/captions", json={"image": "AAAA", "preset": "museum_placard"})
    grammar = service.last[1].grammar
    assert isinstance(grammar, Grammar)
    schema = json.loads(grammar.text)
    assert list(schema["properties"]) == ["title", "artist", "year", "medium", "text"] == schema["required"]


def test_the_request_counts_more_than_the_preset(client: Any, service: Any) -> None:
    body = {"image": "AAAA", "preset": "list_objects", "max_completion_tokens": 9, "temperature": 1.5}
    client.post("/v1/captions", json={**body, "structured_outputs": {"regex": "a"}, "prompt": "Only small ones."})
    options = service.last[1]
    assert (options.max_tokens, options.temperature, options.grammar.kind) == (9, 1.5, "regex")
    assert texts(service) == ["List the objects as JSON.\nOnly small ones."]


def test_a_form_names_a_preset(client: Any, service: Any) -> None:
    answer = client.post("/v1/captions", files={"file": ("a.png", b"x")}, data={"preset": "yes_no", "prompt": "Red?"})
    assert answer.status_code == 200
    assert texts(service) == ["Red? Answer yes or no."]


def test_chat_puts_the_preset_into_the_last_user_turn(client: Any, service: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "Is it red?"}, image]
    assert client.chat(content, preset="yes_no").status_code == 200
    assert texts(service) == ["Is it red? Answer yes or no."]
    assert [isinstance(part, ImagePart) for part in service.last[0][-1].content] == [False, True, False]
    assert service.last[1].grammar == Grammar("choice", '["Yes", "No"]', "structured_outputs.choice")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"preset": "placard"}, 404, "preset"),
        ({"preset": "yes_no"}, 400, "prompt"),
        ({"preset": 3}, 400, "preset"),
    ],
)
def test_refusals(client: Any, body: dict[str, Any], status: int, param: str) -> None:
    answer = client.post("/v1/captions", json={"image": "AAAA", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert client.get("/v1/presets/nothing").status_code == 404


def test_people_add_their_own_and_replace_ours(tmp_path: Path, service: Any, client_of: Any) -> None:
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    (tmp_path / "describe.json").write_text(json.dumps({**OWN, "prompt": "Look."}))
    client = client_of(create_app(Settings.load({"served_model_name": "t", "presets": str(tmp_path)}), service))
    assert [preset["id"] for preset in client.get("/v1/presets").json()["data"]] == [*NAMES, "own"]
    client.post("/v1/captions", json={"image": "AAAA", "preset": "own", "prompt": "Rome"})
    assert (texts(service), service.last[1].temperature) == (["In Rome, what is it?"], 0.5)
    client.post("/v1/captions", json={"image": "AAAA", "preset": "describe"})
    assert texts(service) == ["Look."]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{", "a.json"),
        ("a.json", json.dumps({**OWN, "extra": 1}), "extra"),
        ("a.json", json.dumps({**OWN, "sampling": {"temprature": 1}}), "temprature"),
        ("a.json", json.dumps({**OWN, "sampling": {"temperature": 9}}), "`temperature` is 9"),
        ("a.json", json.dumps({**OWN, "response_format": {"type": "yaml"}}), "response_format.type"),
        ("Bad Name.json", json.dumps(OWN), "expected a name"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError) as raised:
        load_presets(str(tmp_path))
    assert words in str(raised.value)
    with pytest.raises(SettingsError, match="is no folder"):
        load_presets(str(tmp_path / "nothing"))


def test_presets_in_python(tiny_model: Path) -> None:
    with api.Beholder(tiny_model, dtype="float32", threads=1) as beholder:
        image = Image.new("RGB", (48, 32), "red")
        assert beholder.caption(image, "Is it red?", preset="yes_no").text in {"Yes", "No"}
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "Is it red?"}]
        assert beholder.chat([{"role": "user", "content": parts}], preset="yes_no").text in {"Yes", "No"}
        objects = beholder.caption(image, preset="list_objects", max_tokens=300, temperature=1.0, seed=3)
        if objects.finish_reason == "stop":
            assert isinstance(json.loads(objects.text)["objects"], list)
