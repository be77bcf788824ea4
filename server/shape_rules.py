"""The rules that turn a request's shape into a `Grammar` for the worker, which compiles it or refuses it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import msgspec

from preprocess.errors import ClientError
from preprocess.json_schema import MAX_TEXT
from preprocess.wire import Grammar
from server.complaints import invalid, of_validation
from server.shape_models import (
    SHAPE_FIELDS,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    Shapes,
    StructuredOutputs,
    is_given,
)

_ANY_OBJECT: Final = '{"type": "object"}'


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar | None:
    """The grammar that a request asks for, if any.

    Raises:
        ClientError: Two shapes, none where one was promised, or one of absurd size.
    """
    if isinstance(response_format, JsonSchemaFormat):
        param = "response_format.json_schema.schema"
        schema = response_format.json_schema.schema
        wanted = Grammar("json_schema", _text(schema, param) if is_given(schema) else _ANY_OBJECT, param)
    elif isinstance(response_format, JsonObjectFormat):
        wanted = Grammar("json_schema", _ANY_OBJECT, "response_format")
    else:
        return None if structured is None else _structured(structured)
    if structured is not None:
        raise invalid("structured_outputs", "`response_format` and `structured_outputs` were both given.")
    return wanted


def _structured(structured: StructuredOutputs) -> Grammar:
    wanted: list[Grammar] = []
    any_whitespace = not structured.disable_any_whitespace
    if is_given(structured.json):
        param = "structured_outputs.json"
        text = _text(structured.json, param)
        if text.startswith('"'):
            text = json.loads(text)
        wanted.append(Grammar("json_schema", text, param, any_whitespace))
    if structured.json_object:
        wanted.append(Grammar("json_schema", _ANY_OBJECT, "structured_outputs.json_object", any_whitespace))
    if structured.regex is not None:
        wanted.append(Grammar("regex", structured.regex, "structured_outputs.regex"))
    if structured.choice is not None:
        param = "structured_outputs.choice"
        _check_length(sum(map(len, structured.choice)), param)
        wanted.append(Grammar("choice", json.dumps(structured.choice), param))
    if structured.grammar is not None:
        wanted.append(Grammar("grammar", structured.grammar, "structured_outputs.grammar"))
    if len(wanted) != 1:
        raise invalid(
            "structured_outputs",
            f"`structured_outputs` asks for {len(wanted)} shapes; expected one of json, regex, choice, grammar and "
            "json_object.",
        )
    _check_length(len(wanted[0].text), wanted[0].param)
    return wanted[0]


def _text(raw: msgspec.Raw, param: str) -> str:
    """The text of a value that was not decoded."""
    data = bytes(raw)
    _check_length(len(data), param)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise invalid(param, f"`{param}` is no UTF-8.") from None


def _check_length(length: int, param: str) -> None:
    if length > MAX_TEXT:
        raise ClientError(
            f"`{param}` has {length:,} characters; at most {MAX_TEXT:,} are accepted.",
            code="grammar_too_complex",
            param=param,
        )


def shapes_of(values: Mapping[str, object]) -> dict[str, object]:
    """The same values with shapes that came as Python values, or as a pydantic model, converted.

    Raises:
        ClientError: One is not as expected.
    """
    converted = dict(values)
    for name in SHAPE_FIELDS:
        value = converted.get(name)
        if value is None or isinstance(value, msgspec.Struct):
            continue
        if isinstance(value, type) and callable(schema := getattr(value, "model_json_schema", None)):
            value = {"type": "json_schema", "json_schema": {"name": value.__name__, "schema": schema()}}
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise invalid(name, f"`{name}` is no JSON; expected dictionaries, lists, strings and numbers.") from None
        converted[name] = shape_from_text(name, text)
    return converted


def shape_from_text(name: str, text: str) -> object:
    """A shape that came as text, such as a form field.

    Raises:
        ClientError: It is not as expected.
    """
    try:
        shapes = msgspec.json.decode(f"{{{json.dumps(name)}: {text}}}", type=Shapes)
    except msgspec.ValidationError as error:
        raise of_validation(error, Shapes) from None
    except (msgspec.DecodeError, RecursionError):
        raise invalid(name, f"`{name}` is no JSON; in a form it is JSON as text.") from None
    return getattr(shapes, name)
