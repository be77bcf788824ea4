"""How clients ask for an answer in a shape: OpenAI's `response_format`, vLLM's `structured_outputs`.

Schemas stay the bytes that they came as: a preprocess worker reads them, never the event loop.
"""

from __future__ import annotations

from typing import Final

import msgspec


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a value that was not decoded is there at all, and is not null."""
    return bytes(memoryview(raw)[:5]) not in {b"", b"null"}


class TextFormat(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Any text: the same as no format."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag="json_object", forbid_unknown_fields=True):
    """Some JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named schema. `strict` changes nothing: an answer always keeps to it."""

    name: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag="json_schema", forbid_unknown_fields=True):
    """JSON under a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `json` (a schema, or its text), `regex`, `choice`, `grammar` and `json_object`."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class Shapes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both fields alone, for those that come without a body around them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


SHAPE_FIELDS: Final = tuple(field.name for field in msgspec.structs.fields(Shapes))
