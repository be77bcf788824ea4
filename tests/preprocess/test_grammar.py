"""What shapes are taken, what is refused, and in whose words; hostile ones are refused soon."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from preprocess.errors import ClientError
from preprocess.grammar import GrammarCompiler
from preprocess.json_schema import KNOWN, MAX_DEPTH, clean_schema
from preprocess.wire import Grammar, Message, Prepared, Refused, TextPart


def compile_(kind: Any, text: object, **options: Any) -> str:
    text = text if isinstance(text, str) else json.dumps(text)
    return GrammarCompiler().compile(Grammar(kind, text, "shape", **options)).text


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", {}),
        ("json_schema", True),
        ("json_schema", {"type": "object", "title": "t", "x-own": 1, "uniqueItems": False, "$id": "http://a/b"}),
        ("json_schema", {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}),
        ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1, "a", None, {"b": []}]}}}),
        ("json_schema", {"oneOf": [{"type": "string"}, {"type": "integer"}]}),
        ("json_schema", {"type": "string", "pattern": "^a+$", "maxLength": 9}),
        ("json_schema", {"enum": [f"item {index}" for index in range(3000)]}),
        ("json_schema", nested(MAX_DEPTH - 1)),
        ("regex", r"[0-9]{3}-(a|b)*"),
        ("choice", ["yes", "no", 'quo"te', "line\nbreak", "größe"]),
        ("choice", [f"choice {index}" for index in range(1000)]),
        ("grammar", 'start: "a" | "b" start'),
        ("grammar", 'root ::= "a" digit+\ndigit ::= [0-9]'),
    ],
)
def test_what_can_be_honoured_compiles(kind: Any, text: object) -> None:
    assert compile_(kind, text)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, "`shape` at #/properties/a/not: `not` cannot be enforced"),
        ({"type": "array", "items": {"uniqueItems": True}}, "#/items/uniqueItems"),
        ({"anyOf": [{}, {"if": {}, "then": {}}]}, "#/anyOf/1/if"),
        ({"type": "array", "contains": {}}, "#/contains"),
        ({"type": "object", "propertyNames": {}}, "#/propertyNames"),
        ({"type": "object", "dependentRequired": {}}, "#/dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "#/unevaluatedProperties"),
        ({"type": "string", "nullable": True}, '"null"'),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance"),
        ({"type": "strin"}, "expected one of string"),
        ({"type": "string", "format": "iri"}, "#/format"),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "expected a number"),
        ({"type": "string", "minLength": -1}, "#/minLength"),
        ({"type": "integer", "multipleOf": 0}, "#/multipleOf"),
        ({"$ref": "http://example.org/schema"}, "only references inside"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"$ref": "#"}, "no answer can satisfy it"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "no answer can satisfy it: minimum (3)"),
        (False, "no answer can satisfy it"),
        ({"enum": []}, "#/enum"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "`oneOf` cannot be enforced"),
        ({"type": "object", "minProperties": 2}, "`minProperties`"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "back-references"),
        ([], "expected a schema"),
        (nested(MAX_DEPTH + 1), f"more than {MAX_DEPTH} deep"),
        ({"enum": list(range(5000))}, "more than 4,000"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_keyword_and_place(schema: Any, words: str) -> None:
    with pytest.raises(ClientError) as raised:
        compile_("json_schema", schema)
    assert words in raised.value.message
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "unsupported_schema", "shape")


def test_every_keyword_is_taken_or_refused_but_never_ignored() -> None:
    """The vocabularies of draft 2020-12: what narrows an answer must not get lost."""
    import jsonschema

    meta = jsonschema.Draft202012Validator
    for keyword in meta.VALIDATORS:
        if keyword in {"$ref", "$dynamicRef"}:
            continue
        schema = {keyword: _sample(keyword)}
        if keyword in KNOWN:
            assert keyword in clean_schema(schema, "s")
        else:
            with pytest.raises(ClientError, match=f"`{re.escape(keyword)}`"):
                clean_schema(schema, "s")


def _sample(keyword: str) -> Any:
    samples: dict[str, Any] = {
        "type": "string",
        "enum": [1],
        "required": ["a"],
        "pattern": "a",
        "format": "date",
        "uniqueItems": True,
        "multipleOf": 2,
    }
    if keyword in {"anyOf", "oneOf", "allOf", "prefixItems"}:
        return [{}]
    if keyword.startswith(("min", "max", "exclusive")):
        return 1
    return samples.get(keyword, {})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(a?){1000}a{1000}"),
        ("regex", "((a{100}){100}){100}"),
        ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
        (
            "json_schema",
            {
                "allOf": [
                    {"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]}
                    for i in range(6)
                ]
            },
        ),
    ],
)
def test_hostile_grammars_are_refused_soon(kind: Any, text: object) -> None:
    started = time.thread_time()
    with pytest.raises(ClientError) as raised:
        compile_(kind, text)
    assert raised.value.code == "grammar_too_complex"
    assert time.thread_time() - started < 5


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "", "expected 1 to 4,000"),
        ("regex", "(", "cannot be enforced"),
        ("choice", [], "expected 1 to 1,000"),
        ("choice", ["a", ""], "shape[1]"),
        ("grammar", "nonsense (((", "cannot be read as a grammar"),
        ("grammar", 'start: "a" <|im_end|>', "names tokens"),
        ("grammar", "start: other", "unknown name"),
        ("json_schema", "{", "is no JSON"),
        ("json_schema", "[" * 5000 + "]" * 5000, ""),
        ("json_schema", '"' + "x" * 70_000 + '"', "at most 65,536"),
    ],
)
def test_what_is_no_shape_at_all_is_refused(kind: Any, text: object, words: str) -> None:
    with pytest.raises(ClientError) as raised:
        compile_(kind, text)
    assert words in raised.value.message + str(raised.value.param)
    assert raised.value.status == 400


def test_a_job_carries_its_grammar_and_a_refusal_names_the_field(prepare: Any) -> None:
    messages = [Message("user", [TextPart("?")])]
    answer = prepare(messages, grammar=Grammar("choice", '["a"]', "structured_outputs.choice"))
    assert isinstance(answer, Prepared)
    assert "CHOICE" in answer.request.sampling.grammar
    answer = prepare(messages, grammar=Grammar("json_schema", '{"not": {}}', "response_format.json_schema.schema"))
    assert isinstance(answer, Refused)
    assert answer.param == "response_format.json_schema.schema"
    assert isinstance(prepare(messages), Prepared)


@pytest.mark.parametrize(
    ("kind", "text", "leading_space"),
    [
        ("choice", ["Yes", "No"], True),
        ("json_schema", {"type": "object"}, True),
        ("regex", "[a-z]+", True),
        ("grammar", 'start: "a"', True),
        ("regex", " ?[a-z]+", False),
        ("choice", [" a", "b"], False),
        ("regex", ".*", False),
    ],
)
def test_a_space_may_come_first_where_answers_follow_text(kind: Any, text: object, leading_space: bool) -> None:
    wanted = Grammar(kind, text if isinstance(text, str) else json.dumps(text), "shape")
    assert GrammarCompiler(after_text=True).compile(wanted).leading_space == leading_space
    assert not GrammarCompiler().compile(wanted).leading_space
