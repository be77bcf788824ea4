"""Random schemas × a random model, in mixed batches: whatever finishes keeps to its schema.

A few in every run; ``make schemas`` takes a thousand (`SCHEMAS=…` sets how many).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import beholder as api
from preprocess.wire import GenerationOptions, Grammar, Message, TextPart

NUM_SCHEMAS = int(os.environ.get("SCHEMAS", "64"))
BATCH = 16

Schema = Any
names = st.sampled_from(["a", "b", "title", "größe", 'q"uote', "back\\slash", "sp ace", ""])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-50, 50) | st.sampled_from([0.5, -2.25, 1e3]) | names,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=3,
)


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    """An object with a random part of the keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


def with_type(kind: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    return some(**keywords).map(lambda schema: {"type": kind, **schema})


strings = st.one_of(
    with_type("string", minLength=st.integers(0, 4), maxLength=st.integers(2, 12)),
    with_type("string", pattern=st.sampled_from(["^[a-c]+$", "x", "^\\d{2,3}$", "^(red|blue) ?$", "[^\\w]", "^ä?$"])),
    with_type("string", format=st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"])),
)
numbers = st.one_of(
    with_type("integer", minimum=st.integers(-200, 10), maximum=st.integers(5, 3000)),
    with_type("integer", exclusiveMinimum=st.integers(-20, 10), multipleOf=st.sampled_from([2, 5, 7])),
    with_type("number", minimum=st.integers(-20, 0), exclusiveMaximum=st.sampled_from([1, 2.5, 1000])),
)
leaves = st.one_of(
    strings,
    numbers,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {}, True]),
    st.lists(values, min_size=1, max_size=4).map(lambda items: {"enum": items}),
    values.map(lambda value: {"const": value}),
)


def objects(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    def with_required(schema: Schema) -> st.SearchStrategy[Schema]:
        known = sorted(schema.get("properties", {}))
        chosen = st.lists(st.sampled_from(known), unique=True) if known else st.just([])
        return chosen.map(lambda required: {**schema, "required": required})

    return with_type(
        "object",
        properties=st.dictionaries(names, inner, max_size=3),
        additionalProperties=st.booleans() | inner,
        patternProperties=st.dictionaries(st.sampled_from(["^x-", "^[0-9]+$"]), inner, max_size=1),
        minProperties=st.integers(0, 2),
    ).flatmap(with_required)


def larger(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        objects(inner),
        objects(inner),
        with_type("array", items=inner, minItems=st.integers(0, 2), maxItems=st.integers(1, 4)),
        several.map(lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}),
        several.map(lambda items: {"anyOf": items}),
        several.map(lambda items: {"oneOf": items}),
        st.tuples(inner, inner).map(lambda pair: {"allOf": list(pair)}),
        some(**dict.fromkeys(("not", "contains", "if", "propertyNames"), inner)),
        inner.map(
            lambda schema: {
                "type": "object",
                "properties": {"value": schema, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                "required": ["value", "next"],
            }
        ),
    )


schemas = st.recursive(leaves, larger, max_leaves=6)


@pytest.fixture(scope="module")
def beholder(tiny_model: Path) -> Iterator[api.Beholder]:
    with api.Beholder(tiny_model, dtype="float32", threads=1, max_running=BATCH) as beholder:
        yield beholder


@pytest.fixture(scope="module")
def bias(tiny_model: Path) -> dict[int, float]:
    """A random model hardly ever ends a string or a list: help it."""
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    return {tokenizer.token_to_id(token): 7.0 for token in ('"', "}", "]")}


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Counter[str]]:
    counter: Counter[str] = Counter()
    yield counter
    print(f"\n{sum(counter.values())} random schemas: {dict(counter)}")
    tried = sum(counter.values()) - counter["refused"]
    assert counter["stop"] > 0.7 * tried, counter
    assert counter["refused"] < 0.5 * sum(counter.values()), counter


def check(schema: Schema, answer: str) -> None:
    jsonschema.Draft202012Validator(schema).validate(json.loads(answer))


@pytest.mark.timeout(1800)
def test_finished_answers_keep_to_their_schemas(
    beholder: api.Beholder, bias: dict[int, float], outcomes: Counter[str]
) -> None:
    seed = 0

    @settings(
        max_examples=-(-NUM_SCHEMAS // BATCH),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(schemas, min_size=BATCH, max_size=BATCH))
    def run(batch: list[Schema]) -> None:
        nonlocal seed
        running = []
        for schema in batch:
            seed += 1
            options = GenerationOptions(
                max_tokens=300,
                temperature=1.0,
                seed=seed,
                logit_bias=bias,
                grammar=Grammar("json_schema", json.dumps(schema), "schema"),
            )
            try:
                running.append((schema, beholder._submit([Message("user", [TextPart("?")])], options)))
            except api.ClientError as error:
                if error.code not in {"unsupported_schema", "grammar_too_complex"}:
                    raise
                outcomes["refused"] += 1
        for schema, request in running:
            answer = beholder._finish(request)
            outcomes[answer.finish_reason] += 1
            if answer.finish_reason == "stop":
                check(schema, answer.text)
            else:
                assert answer.usage.completion_tokens == 300

    run()
