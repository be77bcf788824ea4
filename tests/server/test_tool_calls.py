"""Tool calls: found in any cut of the text, streamed, demanded, and passed back; what is no call is text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import Served

from preprocess.config import PreprocessConfig
from preprocess.prepare import Preparer
from preprocess.wire import GenerationOptions, Grammar, Job, Lease, Message, Prepared, Refused, TextPart, ToolCall
from server.tool_calls import ToolCallParser
from server.tool_models import ToolCallDelta

PARAMETERS = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d <|im_end|>", "parameters": PARAMETERS}}
STOP = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
}
NAMES = frozenset({"weather", "stop"})

TEMPLATE = (
    "<|im_start|>{% if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% for call in message['tool_calls'] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def call_text(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text, and (name, arguments) of the calls; the deltas must add up to the calls."""
    parser = ToolCallParser(NAMES)
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish()
    streamed: dict[int, list[str]] = {}
    for delta in found:
        if isinstance(delta, ToolCallDelta):
            if delta.function.name:
                assert delta.index == len(streamed)
                assert delta.id
                streamed[delta.index] = [delta.function.name, ""]
            else:
                streamed[delta.index][1] += delta.function.arguments or ""
    calls = [(call.function.name, call.function.arguments) for call in parser.calls]
    assert [tuple(call) for call in streamed.values()] == calls
    return "".join(piece for piece in found if isinstance(piece, str)), calls


words = st.text('ab {}"\\<>/\n_tolca', max_size=12)
arguments = st.dictionaries(words, st.recursive(st.integers() | words, lambda s: st.lists(s, max_size=2)), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), max_size=3), words, st.integers(1, 9), st.data())
def test_any_cut_gives_the_same(calls: list[Any], before: str, size: int, data: Any) -> None:
    text = before + "\n".join(call_text(name, arguments) for name, arguments in calls)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    said, found = parse(pieces)
    assert (said, found) == parse([text])
    if "<tool_call>" not in before:
        assert found == [(name, json.dumps(arguments)) for name, arguments in calls]
        assert said == (before.rstrip() if calls else before)


@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9))
def test_no_more_calls_than_asked_for_and_what_follows_them_is_not_passed_on(
    num_calls: int, at_most: int, size: int
) -> None:
    text = "\n".join(["so", *(call_text("weather", {"n": n}) for n in range(num_calls)), "and so on"])
    parser = ToolCallParser(NAMES, at_most)
    pieces = [piece for at in range(0, len(text), size) for piece in parser.feed(text[at : at + size])]
    pieces += parser.finish()
    assert [call.function.arguments for call in parser.calls] == [
        json.dumps({"n": n}) for n in range(min(num_calls, at_most))
    ]
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    assert said.startswith("so")
    assert ("and so on" in said) == (num_calls <= at_most)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"', '"name": "weather"', ",", ":", " x "])))
def test_rubbish_never_fails(pieces: list[str]) -> None:
    said, found = parse(pieces)
    if not found:
        assert said == "".join(pieces)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no json</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": 3}</tool_call>',
        "<tool_call>",
        "a < b and <tool_",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert parse([text]) == (text, [])


def test_other_orders_and_missing_arguments_are_calls_too() -> None:
    assert parse(['<tool_call>{"arguments": {"a": 1}, "name": "weather"}</tool_call>'])[1] == [("weather", '{"a": 1}')]
    assert parse(['<tool_call>{"name": "stop"}</tool_call> done.']) == ("done.", [("stop", "{}")])
    assert parse([call_text("stop", {}), "\n\nso it", " is "])[0] == "so it is "


def test_a_call_over_http_whole_and_streamed(served: Any, service: Any) -> None:
    service.words = (
        "I look. ",
        "<tool",
        '_call>\n{"name": "wea',
        'ther", "arguments": {"place": "Ro',
        'me", "days": 2}}\n</tool',
        "_call>",
    )
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        fields: Any = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": [WEATHER, STOP]}
        whole = client.chat.completions.create(**fields).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I look.")
        assert whole.message.tool_calls[0].function.name == "weather"
        assert json.loads(whole.message.tool_calls[0].function.arguments) == {"place": "Rome", "days": 2}
        with client.chat.completions.stream(**fields) as stream:
            deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion().choices[0]
        assert len(deltas) > 1
        assert (final.finish_reason, final.message.content) == ("tool_calls", "I look.")
        assert json.loads(final.message.tool_calls[0].function.arguments) == {"place": "Rome", "days": 2}
        plain = client.chat.completions.create(**fields, tool_choice="none").choices[0]
        assert (plain.finish_reason, plain.message.tool_calls) == ("stop", None)
        assert service.last[1].tools == ""


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"tool_choice": "auto"}, None),
        ({"tool_choice": "required"}, (["weather", "stop"], 16)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, (["weather", "stop"], 1)),
        ({"tool_choice": {"type": "function", "function": {"name": "stop"}}}, (["stop"], 1)),
    ],
)
def test_choices(client: Any, service: Any, fields: dict[str, Any], grammar: Any) -> None:
    assert client.chat(tools=[WEATHER, STOP], **fields).status_code == 200
    options = service.last[1]
    assert len(json.loads(options.tools)) == 2
    if grammar is None:
        assert options.grammar is None
    else:
        shape = json.loads(options.grammar.text)
        assert ([function["name"] for function in shape["functions"]], shape["at_most"]) == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "search", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
    ],
)
def test_refusals_name_the_field(client: Any, service: Any, fields: dict[str, Any], param: str) -> None:
    answer = client.chat(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not service.submitted


def turns(**changes: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call], **changes},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]


def test_results_are_passed_back(client: Any, service: Any) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": turns(), "tools": [WEATHER]})
    assert answer.status_code == 200, answer.text
    assert service.last[0][1:] == [
        Message("assistant", [], [ToolCall("c1", "weather", '{"place": "Rome"}')]),
        Message("tool", [TextPart("sunny")], [], "c1"),
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (
            turns(tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{"}}]),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (turns(tool_calls=None), "messages[1].content"),
        (turns(role="user"), "messages[1].tool_calls"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ],
)
def test_bad_turns_name_the_field(client: Any, messages: list[Any], param: str) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": messages, "tools": [WEATHER]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# ---- on a model whose template knows tools ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def prepare(folder: Path, messages: list[Message], **options: Any) -> Prepared | Refused:
    job = Job("r", messages, GenerationOptions(**options), Lease(), 0.0)
    return Preparer(PreprocessConfig(str(folder)), None).prepare(job)


def prompt(folder: Path, answer: Prepared | Refused) -> str:
    import numpy as np
    from tokenizers import Tokenizer

    assert isinstance(answer, Prepared), answer
    ids = np.frombuffer(answer.request.prompt_ids, "<i8").tolist()
    text: str = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    return text


def test_the_template_tells_of_tools_and_calls_and_clients_text_stays_text(tool_model: Path) -> None:
    history = [
        Message("user", [TextPart("?")]),
        Message("assistant", [], [ToolCall("c1", "weather", '{"place": "<end_of_utterance>"}')]),
        Message("tool", [TextPart("sunny")], [], "c1"),
    ]
    answer = prepare(tool_model, history, tools=json.dumps([WEATHER]))
    text = prompt(tool_model, answer)
    assert json.dumps(WEATHER) in text
    assert '{"name": "weather", "arguments": {"place": "<end_of_utterance>"}}' in text
    assert "Tool: sunny" in text
    assert isinstance(answer, Prepared)
    import numpy as np

    ids = np.frombuffer(answer.request.prompt_ids, "<i8").tolist()
    assert (ids.count(2), ids.count(6)) == (0, 3), "the template's own ends, and none of the client's"


def test_a_template_without_tools_refuses_them(tiny_model: Path) -> None:
    answer = prepare(tiny_model, [Message("user", [TextPart("?")])], tools=json.dumps([WEATHER]))
    assert isinstance(answer, Refused)
    assert (answer.status, answer.param, answer.code) == (400, "tools", "unsupported_parameter")
    answer = prepare(tiny_model, [Message("user", [TextPart("?")]), Message("tool", [TextPart("x")], [], "c")])
    assert isinstance(answer, Refused)
    assert answer.param == "messages[1]"


@pytest.fixture(scope="module")
def served_tools(tool_model: Path) -> Iterator[Served]:
    with Served(tool_model, dtype="float32") as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_keep_to_their_schemas(served_tools: Served, stream: bool) -> None:
    found = set()
    with openai.OpenAI(base_url=f"{served_tools.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(8):
            fields: Any = {
                "model": client.models.list().data[0].id,
                "messages": turns() if seed % 2 else [{"role": "user", "content": "?"}],
                "tools": [WEATHER, STOP],
                "tool_choice": "required" if seed < 6 else {"type": "function", "function": {"name": "weather"}},
                "parallel_tool_calls": seed % 3 == 0,
                "max_tokens": 300,
                "temperature": 1.0,
                "seed": seed,
            }
            if stream:
                with client.chat.completions.stream(**fields) as events:
                    choice = events.get_final_completion().choices[0]
            else:
                choice = client.chat.completions.create(**fields).choices[0]
            if choice.finish_reason == "length":
                continue
            assert choice.finish_reason == "tool_calls"
            assert not choice.message.content
            assert len(choice.message.tool_calls) == 1 or fields["parallel_tool_calls"]
            for call in choice.message.tool_calls:
                found.add(call.function.name)
                schema: Any = {"weather": PARAMETERS, "stop": STOP["function"]["parameters"]}  # type: ignore[index]
                jsonschema.validate(json.loads(call.function.arguments), schema[call.function.name])
    assert found == {"weather", "stop"}


def test_a_schema_that_cannot_be_enforced_is_refused_where_a_call_is_required(served_tools: Served) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "propertyNames": {}}}}
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "tool_choice": "required"}
    answer = served_tools.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_schema")
    assert "f.parameters" in answer.json()["error"]["message"]


def test_grammars_of_calls_are_named(tool_model: Path) -> None:
    shape = {"functions": [{"name": "f", "parameters": {"not": {}}}], "at_most": 1}
    answer = prepare(
        tool_model, [Message("user", [TextPart("?")])], grammar=Grammar("tools", json.dumps(shape), "tools")
    )
    assert isinstance(answer, Refused)
    assert "f.parameters" in answer.message
