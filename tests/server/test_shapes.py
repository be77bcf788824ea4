"""Requests for a shape: which grammar each spelling stands for, and which are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from preprocess.errors import ClientError
from preprocess.wire import Grammar
from server.sampling_rules import sampling_options

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
PARAM = "response_format.json_schema.schema"


def schema_format(schema: Any = SCHEMA, **extra: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **extra}}


SPELLINGS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type": "object"}', "response_format")),
    ({"response_format": schema_format()}, Grammar("json_schema", json.dumps(SCHEMA), PARAM)),
    ({"response_format": schema_format(strict=True)}, Grammar("json_schema", json.dumps(SCHEMA), PARAM)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        Grammar("json_schema", '{"type": "object"}', PARAM),
    ),
    (
        {"structured_outputs": {"json": SCHEMA}},
        Grammar("json_schema", json.dumps(SCHEMA), "structured_outputs.json"),
    ),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        Grammar("json_schema", json.dumps(SCHEMA), "structured_outputs.json", any_whitespace=False),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        Grammar("json_schema", '{"type": "object"}', "structured_outputs.json_object"),
    ),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]', "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": "start: X"}}, Grammar("grammar", "start: X", "structured_outputs.grammar")),
]


def same(grammar: Grammar | None, expected: Grammar | None) -> bool:
    if grammar is None or expected is None:
        return grammar is expected
    texts = [json.loads(g.text) if g.kind in {"json_schema", "choice"} else g.text for g in (grammar, expected)]
    return (
        texts[0] == texts[1]
        and [(g.kind, g.param, g.any_whitespace) for g in (grammar, expected)].count(
            (expected.kind, expected.param, expected.any_whitespace)
        )
        == 2
    )


@pytest.mark.parametrize(("fields", "expected"), SPELLINGS)
def test_every_spelling_in_chat_captions_forms_and_python(
    client: Any, service: Any, fields: dict[str, Any], expected: Grammar | None
) -> None:
    assert client.chat(**fields).status_code == 200
    assert same(service.last[1].grammar, expected)
    assert client.post("/v1/captions", json={"image": "AAAA", **fields}).status_code == 200
    assert same(service.last[1].grammar, expected)
    form = {name: json.dumps(value) for name, value in fields.items() if value is not None}
    answer = client.post("/v1/captions", files={"file": ("a.png", b"x")}, data=form)
    assert answer.status_code == 200, answer.text
    assert same(service.last[1].grammar, expected)
    assert same(sampling_options(fields).grammar, expected)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "expected text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "unknown"),
        ({"response_format": schema_format(strickt=True)}, "response_format.json_schema.strickt", "`strict`"),
        ({"structured_outputs": {}}, "structured_outputs", "asks for 0 shapes"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "asks for 2 shapes"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag", "unknown"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "string"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "both",
        ),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex", "at most 65,536"),
        ({"response_format": schema_format({"x": "y" * 70_000})}, PARAM, "at most 65,536"),
        ({"guided_json": {}}, "guided_json", "not supported"),
    ],
)
def test_refusals_name_the_field(client: Any, service: Any, fields: dict[str, Any], param: str, words: str) -> None:
    answer = client.chat(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
    assert not service.submitted
    if "guided_json" not in fields:
        with pytest.raises(ClientError) as raised:
            sampling_options(fields)
        assert words in raised.value.message


def test_python_takes_a_pydantic_model() -> None:
    class Placard(BaseModel):
        title: str
        year: int | None

    grammar = sampling_options({"response_format": Placard}).grammar
    assert grammar is not None
    assert json.loads(grammar.text) == Placard.model_json_schema()


def test_a_form_field_that_is_no_json_is_refused(client: Any) -> None:
    answer = client.post("/v1/captions", files={"file": ("a.png", b"x")}, data={"response_format": "json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
