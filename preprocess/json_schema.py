"""Which JSON schemas can be honoured, and in what form the grammar library wants them. Refusals name keyword and place.

An answer made under a schema must validate against it, so nothing that narrows the answer may be ignored: a keyword
of JSON Schema that cannot be enforced is refused, and only annotations (`title`, `x-…`, what no draft knows) pass.
Called by `preprocess.grammar`, in a preprocess worker: schemas are hostile until they have been through here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from preprocess.errors import ClientError

MAX_TEXT: Final = 64 << 10
"""Longest schema, grammar or list of choices, in characters."""
MAX_DEPTH: Final = 32
MAX_NODES: Final = 4_000
"""Subschemas and constant values in one schema."""
MAX_PATTERN: Final = 1_000
MAX_COUNT: Final = 100_000
"""Of `minLength`, `maxItems` and their kind."""
MAX_MULTIPLE_OF: Final = 10_000

TYPES: Final = ("string", "integer", "number", "boolean", "null", "object", "array")
FORMATS: Final = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_UNSUPPORTED: Final = {
    "not": "",
    "if": "",
    "then": "",
    "else": "",
    "contains": "",
    "minContains": "",
    "maxContains": "",
    "propertyNames": "",
    "dependencies": "",
    "dependentRequired": "",
    "dependentSchemas": "",
    "unevaluatedItems": "",
    "unevaluatedProperties": "",
    "$dynamicRef": "",
    "$dynamicAnchor": "",
    "$recursiveRef": "",
    "$recursiveAnchor": "",
    "$anchor": " Refer to subschemas by their place (#/$defs/…).",
    "nullable": ' Write {"type": ["string", "null"]} instead.',
    "x-guidance": "",
    "extends": "",
    "disallow": "",
    "divisibleBy": "",
}
"""Keywords of some draft of JSON Schema, or of the library, that are not enforced, with a word of help."""


class _Walk:
    """One pass over a schema: counts, checks, and builds the cleaned copy."""

    def __init__(self, param: str) -> None:
        self.param = param
        self.num_nodes = 0

    def refuse(self, path: str, what: str) -> ClientError:
        return ClientError(f"`{self.param}` at {path}: {what}", code="unsupported_schema", param=self.param)

    def enter(self, path: str, depth: int) -> None:
        self.num_nodes += 1
        if depth > MAX_DEPTH:
            raise self.refuse(path, f"the schema is nested more than {MAX_DEPTH} deep.")
        if self.num_nodes > MAX_NODES:
            raise self.refuse(path, f"the schema has more than {MAX_NODES:,} subschemas and values.")

    def schema(self, schema: Any, path: str, depth: int) -> Any:
        self.enter(path, depth)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self.refuse(path, f"expected a schema (an object), got {_kind(schema)}.")
        clean: dict[str, Any] = {}
        for keyword, value in schema.items():
            place = f"{path}/{keyword[:60]}"
            if keyword in _UNSUPPORTED:
                raise self.refuse(place, f"`{keyword}` cannot be enforced.{_UNSUPPORTED[keyword]}")
            check = _CHECKS.get(keyword)
            if check is not None:
                clean[keyword] = check(self, value, place, depth)
        if isinstance(clean.get("items"), list):  # a tuple, as drafts before 2020 spelled it
            clean["prefixItems"] = clean.pop("items")
            if "additionalItems" in clean:
                clean["items"] = clean["additionalItems"]
        clean.pop("additionalItems", None)
        if clean.get("uniqueItems") is False:
            del clean["uniqueItems"]
        certain = len(set(clean.get("required", ())))
        if clean.get("minProperties", 0) > certain + 1:  # of free names two could be the same, and count once
            raise self.refuse(
                f"{path}/minProperties",
                f"`minProperties` can be enforced up to one more than the {certain} that are `required`.",
            )
        return clean

    def schemas(self, value: Any, path: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.refuse(path, "expected a list of at least one schema.")
        return [self.schema(item, f"{path}/{index}", depth + 1) for index, item in enumerate(value)]

    def members(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(path, f"expected an object of schemas, got {_kind(value)}.")
        return {name: self.schema(item, f"{path}/{name[:60]}", depth + 1) for name, item in value.items()}

    def items(self, value: Any, path: str, depth: int) -> Any:
        return self.schemas(value, path, depth) if isinstance(value, list) else self.schema(value, path, depth + 1)

    def constant(self, value: Any, path: str, depth: int) -> Any:
        self.enter(path, depth)
        if isinstance(value, dict):
            return {name: self.constant(item, path, depth + 1) for name, item in value.items()}
        if isinstance(value, list):
            return [self.constant(item, path, depth + 1) for item in value]
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refuse(path, "a number is not finite.")
        return value

    def enum(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, list) or not value:
            raise self.refuse(path, "expected a list of at least one value.")
        return [self.constant(item, path, depth + 1) for item in value]

    def type(self, value: Any, path: str, depth: int) -> Any:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name in TYPES for name in names):
            raise self.refuse(path, f"expected one of {', '.join(TYPES)}, or a list of them.")
        return value

    def required(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refuse(path, "expected a list of names.")
        self.num_nodes += len(value)
        return value

    def reference(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            raise self.refuse(path, "only references inside the schema (#/$defs/…) can be followed.")
        return value

    def pattern(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, str) or len(value) > MAX_PATTERN:
            raise self.refuse(path, f"expected a regular expression of at most {MAX_PATTERN:,} characters.")
        return value

    def patterns(self, value: Any, path: str, depth: int) -> Any:
        schemas = self.members(value, path, depth)
        for pattern in schemas:
            self.pattern(pattern, path, depth)
        return schemas

    def format(self, value: Any, path: str, depth: int) -> Any:
        if not isinstance(value, str) or value not in FORMATS:
            raise self.refuse(path, f"`format` can be {', '.join(FORMATS)}; others cannot be enforced.")
        return value

    def count(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            raise self.refuse(path, f"expected a whole number from 0 to {MAX_COUNT:,}.")
        return value

    def number(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
            raise self.refuse(path, "expected a number between -1e15 and 1e15.")
        return value

    def multiple_of(self, value: Any, path: str, depth: int) -> Any:
        number = self.number(value, path, depth)
        if not 1e-4 <= number <= MAX_MULTIPLE_OF:
            raise self.refuse(path, f"`multipleOf` can be 0.0001 to {MAX_MULTIPLE_OF:,}.")
        return number

    def unique_items(self, value: Any, path: str, depth: int) -> Any:
        if value is not False:
            raise self.refuse(path, "`uniqueItems` cannot be enforced.")
        return value


def clean_schema(schema: Any, param: str) -> Any:
    """The schema with what can be enforced, and nothing else, in the spelling of draft 2020-12.

    Args:
        schema: As decoded from JSON.
        param: The request field that it came in, for refusals.

    Raises:
        ClientError: It cannot be honoured; keyword and place are named.
    """
    walk = _Walk(param)
    clean = walk.schema(schema, "#", 0)
    if clean is False:
        raise walk.refuse("#", "no answer can satisfy it.")
    return {} if clean is True else clean


def _kind(value: Any) -> str:
    kinds = {str: "a string", list: "a list", type(None): "null", int: "a number", float: "a number"}
    return kinds.get(type(value), "something else")


_CHECKS: Final[dict[str, Callable[[_Walk, Any, str, int], Any]]] = {
    "type": _Walk.type,
    "enum": _Walk.enum,
    "const": _Walk.constant,
    "anyOf": _Walk.schemas,
    "oneOf": _Walk.schemas,
    "allOf": _Walk.schemas,
    "$ref": _Walk.reference,
    "$defs": _Walk.members,
    "definitions": _Walk.members,
    "properties": _Walk.members,
    "patternProperties": _Walk.patterns,
    "additionalProperties": lambda walk, value, path, depth: walk.schema(value, path, depth + 1),
    "required": _Walk.required,
    "minProperties": _Walk.count,
    "maxProperties": _Walk.count,
    "items": _Walk.items,
    "prefixItems": _Walk.schemas,
    "additionalItems": lambda walk, value, path, depth: walk.schema(value, path, depth + 1),
    "minItems": _Walk.count,
    "maxItems": _Walk.count,
    "uniqueItems": _Walk.unique_items,
    "minLength": _Walk.count,
    "maxLength": _Walk.count,
    "pattern": _Walk.pattern,
    "format": _Walk.format,
    "minimum": _Walk.number,
    "maximum": _Walk.number,
    "exclusiveMinimum": _Walk.number,
    "exclusiveMaximum": _Walk.number,
    "multipleOf": _Walk.multiple_of,
}
"""Keyword → what checks its value and gives the cleaned one."""

KNOWN: Final = frozenset(_CHECKS) - {"uniqueItems", "additionalItems"}
"""Keywords that are enforced."""
