"""What a session asks and in which shape it wants the answer: prompts, presets, shapes; and how much may be sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from driven_session import JPEG, Driven
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.wire import Delta, ImagePart, TextPart, VideoPart
from server.options.option import SettingsError
from server.presets import load_presets
from server.request_models import DEFAULT_PROMPT
from server.stream.client_events import Ask
from server.stream.settings_events import SessionPatch
from server.stream.work import CloseCode, State

OBJECT = {"type": "json_schema", "json_schema": {"name": "o", "schema": {"type": "object"}}}


@pytest.fixture
def driven() -> Driven:
    return Driven()


def asked(driven: Driven, **response: Any) -> tuple[str, Any]:
    """Ask; the text of the question and the options it went with."""
    driven.frame()
    driven.say("response.create", response=response)
    start = driven.starts[-1]
    driven.deltas("x")
    (text,) = [part.text for part in start.messages[-1].content if isinstance(part, TextPart)]
    return text, start.options


def comparable(options: Any) -> dict[str, Any]:
    """Options as plain values; of a schema what it says and not how it is spaced."""
    plain: dict[str, Any] = msgspec.to_builtins(options)
    if plain["grammar"] and plain["grammar"]["kind"] == "json_schema":
        plain["grammar"]["text"] = json.loads(plain["grammar"]["text"])
    return plain


def shown(driven: Driven) -> dict[str, Any]:
    session: dict[str, Any] = driven.of("session.updated")[-1]["session"]
    return session


# ---- presets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(load_presets("")))
def test_every_preset_of_the_server_is_one_of_its_sessions(driven: Driven, name: str) -> None:
    preset = load_presets("")[name]
    driven.update(preset=name, **({"prompt": "Is it?"} if "{prompt}" in preset.prompt else {}))
    prompt, options = asked(driven)
    assert prompt == preset.prompt.replace("{prompt}", "Is it?")
    assert options.max_tokens == preset.sampling.get("max_tokens")
    assert options.temperature == preset.sampling.get("temperature")
    assert (options.grammar is not None) == bool(preset.response_format or preset.structured_outputs)
    assert shown(driven)["max_tokens"] == options.max_tokens


def test_a_folder_of_presets_is_served_too_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "shelf.json"
    sampling = {"max_completion_tokens": 9000, "skip_special_tokens": False, "seed": 4}
    file.write_text(json.dumps({"title": "S", "description": "", "prompt": "Empty?", "sampling": sampling}))
    driven = Driven(presets=str(tmp_path))
    assert "shelf" in driven.events[0]["capabilities"]["presets"]
    driven.update(preset="shelf")
    prompt, options = asked(driven)
    assert (prompt, options.seed, options.skip_special_tokens) == ("Empty?", 4, False)
    assert options.max_tokens == driven.events[0]["limits"]["max_response_tokens"]  # as much as there may be
    load_presets.cache_clear()
    file.write_text("{")
    with pytest.raises(SettingsError, match="shelf"):
        Driven(presets=str(tmp_path))
    load_presets.cache_clear()


def test_a_prompt_goes_where_the_preset_has_its_place_and_alone_ends_it(driven: Driven) -> None:
    driven.update(preset="one_line", prompt="Name the colours.")
    assert asked(driven)[0] == "Describe the picture in one short sentence.\nName the colours."
    driven.update(prompt="What now?")
    prompt, options = asked(driven)
    assert (prompt, options.max_tokens, options.temperature) == ("What now?", 256, None)
    assert (shown(driven)["prompt"], shown(driven)["preset"]) == ("What now?", None)
    driven.update(preset="one_line")
    assert (shown(driven)["prompt"], shown(driven)["max_tokens"], shown(driven)["temperature"]) == (None, 48, 0)
    driven.update(preset=None)
    assert (asked(driven)[0], shown(driven)["prompt"]) == (DEFAULT_PROMPT, DEFAULT_PROMPT)


def test_what_the_session_sets_counts_more_than_its_preset_until_null_takes_it_back(driven: Driven) -> None:
    driven.update(max_tokens=7, preset="one_line", temperature=0.5)
    assert [shown(driven)[name] for name in ("max_tokens", "temperature")] == [7, 0.5]
    driven.update(max_tokens=None)
    assert [shown(driven)[name] for name in ("max_tokens", "temperature")] == [48, 0.5]
    driven.update(preset="alt_text")
    assert [shown(driven)[name] for name in ("max_tokens", "temperature")] == [96, 0.5]


def test_a_response_asks_its_own_question_without_the_preset_of_the_session(driven: Driven) -> None:
    driven.update(preset="list_objects", seed=11)
    prompt, options = asked(driven, prompt="How many people?")
    assert (prompt, options.grammar, options.max_tokens, options.seed) == ("How many people?", None, 256, 11)
    prompt, options = asked(driven, preset="yes_no", prompt="Is it dark?", max_tokens=3)
    assert (prompt, options.grammar.kind, options.max_tokens) == ("Is it dark? Answer yes or no.", "choice", 3)
    prompt, options = asked(driven, temperature=0.75)
    assert (prompt, options.grammar.kind, options.temperature) == ("List the objects as JSON.", "json_schema", 0.75)


@pytest.mark.parametrize(
    ("event", "param", "code"),
    [
        ({"type": "session.update", "session": {"preset": "one_lin"}}, "session.preset", "preset_not_found"),
        ({"type": "response.create", "response": {"preset": "caption"}}, "response.preset", "preset_not_found"),
        ({"type": "response.create", "response": {"preset": "yes_no"}}, "response.prompt", "invalid_value"),
        (
            {"type": "response.create", "response": {"max_completion_tokens": 9}},
            "response.max_completion_tokens",
            "invalid_value",
        ),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_by_name(event: dict[str, Any], param: str, code: str) -> None:
    driven = Driven(stream_max_response_tokens=8)
    driven.frame()
    driven.session.receive_text(json.dumps(event), driven.now)
    driven.take()
    assert driven.error["param"] == param
    assert driven.error["code"] == code
    assert not driven.starts


# ---- shapes ---------------------------------------------------------------------------------------------------------


def test_a_shape_of_the_session_is_every_answer_s_and_one_of_the_response_replaces_it(driven: Driven) -> None:
    driven.update(response_format=OBJECT)
    assert shown(driven)["response_format"]["json_schema"]["schema"] == {"type": "object"}
    grammar = asked(driven)[1].grammar
    assert (grammar.kind, grammar.param) == ("json_schema", "session.response_format.json_schema.schema")
    grammar = asked(driven, structured_outputs={"choice": ["a", "b"]})[1].grammar
    assert (grammar.kind, grammar.param) == ("choice", "response.structured_outputs.choice")
    assert asked(driven, response_format={"type": "text"})[1].grammar is None
    driven.update(response_format=None, structured_outputs={"regex": "[a-c]+"})
    assert (asked(driven)[1].grammar.text, shown(driven)["response_format"]) == ("[a-c]+", {"type": "text"})


def test_text_of_ones_own_takes_a_preset_its_shape(driven: Driven) -> None:
    driven.update(preset="list_objects", response_format={"type": "text"})
    assert asked(driven)[1].grammar is None
    driven.update(response_format=None)
    assert asked(driven)[1].grammar.kind == "json_schema"


@pytest.mark.parametrize(
    "session",
    [
        {},
        {"preset": "list_objects"},
        {"preset": "yes_no", "prompt": "Is it?", "temperature": 0.5},
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
        {"structured_outputs": {"json": {"type": "array"}, "disable_any_whitespace": True}, "stop": ["a"]},
        {"trigger": {"mode": "on_change", "change_threshold": 9}, "max_pixels": 5000, "context_frames": 2},
        {"trigger": {"mode": "on_change", "interval_ms": 7.5}},
        {"trigger": {"mode": "interval", "interval_ms": 20}},
        {"trigger": {"mode": "continuous"}},
    ],
)
def test_the_settings_may_be_sent_back_as_they_are_shown(driven: Driven, session: dict[str, Any]) -> None:
    driven.update(**session)
    before = driven.session._configuration
    again = shown(driven)
    driven.update(**again)
    after = driven.session._configuration
    assert after.question.prompt == before.question.prompt
    assert comparable(after.question.options) == comparable(before.question.options)
    assert after.shown.trigger == before.shown.trigger
    assert not driven.of("error")


def test_a_preset_with_a_shape_holds_through_changes_preemption_and_a_lost_connection(driven: Driven) -> None:
    driven.update(preset="list_objects", trigger={"mode": "on_change"}, preempt=True, context_frames=1)
    driven.frame(b"\xff\xd8 1")
    driven.looked(None)
    driven.frame(b"\xff\xd8 2")
    driven.looked(50)  # ends the first
    driven.say("response.create", response={"prompt": "Why?"})  # ends the second
    driven.say("response.create")  # ends that one
    assert [event["status"] for event in driven.of("response.done")] == ["cancelled"] * 3
    driven.session.detach(driven.now)
    driven.now += 1
    driven.session.attach(driven.now)
    driven.take()
    driven.frame(b"\xff\xd8 3")
    driven.looked(None)
    kinds = [start.options.grammar and start.options.grammar.kind for start in driven.starts]
    assert kinds == ["json_schema", "json_schema", None, "json_schema", "json_schema"]
    driven.deltas("{}")
    done = driven.of("response.done")
    assert [event["response_id"] for event in done] == [e["response_id"] for e in driven.of("response.created")]
    driven.session.mailbox.check()


def test_a_question_about_the_frame_that_is_being_looked_at_is_its_one_response(driven: Driven) -> None:
    driven.update(trigger={"mode": "on_change"})
    driven.frame()
    look = driven.looks[-1]
    driven.say("response.create")
    driven.session.on_looked(look.look_id, None, driven.now)  # type: ignore[arg-type]  # too late: nobody asks
    driven.deltas("asked")
    driven.wait(1)
    assert (len(driven.starts), driven.session.mailbox.captioned, driven.session.mailbox.pending) == (1, 1, 0)


@pytest.mark.parametrize("ends", ["drain", "session.close"])
def test_a_frame_whose_response_runs_is_captioned_though_the_session_ends(driven: Driven, ends: str) -> None:
    driven.update(trigger={"mode": "on_change"})
    driven.frame(b"\xff\xd8 1")
    driven.frame(b"\xff\xd8 2")
    driven.looked(None)  # the second is captioned, and looked at for the frames to come
    if ends == "drain":
        driven.session.drain(5.0, driven.now)
        driven.take()
    else:
        driven.say(ends)
    driven.deltas("x")
    assert (driven.session.mailbox.captioned, driven.dropped) == (1, {"replaced": 1})


# ---- how much is sent -----------------------------------------------------------------------------------------------


def test_max_pixels_goes_along_with_every_picture(driven: Driven) -> None:
    driven.update(max_pixels=10_000)
    driven.frame(k="image", id=1)
    driven.frame(b"a clip", k="video", last=True)
    driven.say("response.create")
    pinned, clip = driven.starts[-1].messages[-1].content[1:]
    assert pinned == ImagePart(data=JPEG, max_pixels=10_000)
    assert clip == VideoPart(data=b"a clip", max_pixels=10_000)


def test_clients_hear_of_their_limits_when_less_than_half_is_left_and_when_it_is_over(driven: Driven) -> None:
    driven.say("ping")
    driven.wait(2)
    assert not driven.of("rate_limits.updated")
    for _ in range(6):
        driven.frame()
    driven.wait(0)
    (told,) = driven.of("rate_limits.updated")
    limits = {limit["name"]: limit for limit in told["rate_limits"]}
    assert list(limits) == ["messages", "bytes", "frames"]
    assert (limits["frames"]["limit"], limits["frames"]["remaining"]) == (7.5, 1.5)
    assert limits["frames"]["reset_seconds"] == pytest.approx(6 / 30, abs=1e-3)
    driven.wait(0.5)
    driven.frame()
    assert len(driven.of("rate_limits.updated")) == 1  # at most one a second
    for _ in range(3):
        driven.wait(1)
    assert len(driven.of("rate_limits.updated")) == 2
    assert driven.events[-1]["type"] != "error"
    last = driven.of("rate_limits.updated")[-1]["rate_limits"][2]
    assert last["remaining"] == last["limit"]


def test_settings_that_wait_for_a_slow_reader_are_reckoned_with() -> None:
    driven = Driven(stream_send_queue_kb=64)
    text = "word " * 6000
    for _ in range(4):
        driven.session.receive_text(
            json.dumps({"type": "session.update", "session": {"instructions": text}}), driven.now
        )
    assert driven.session.state is State.CLOSED
    assert driven.session.take_actions()[-1].code == CloseCode.OVERLOAD


def test_an_answer_in_a_shape_is_told_as_any_other(driven: Driven) -> None:
    driven.update(preset="list_objects")
    driven.frame()
    driven.say("response.create")
    name = driven.starts[-1].response_id
    driven.session.on_delta(name, Delta(name, '{"objects":', [1]), driven.now)
    driven.session.on_delta(name, Delta(name, ' ["cup"]}', [2], finish_reason="stop"), driven.now)
    driven.take()
    assert json.loads(driven.of("response.done")[-1]["text"]) == {"objects": ["cup"]}


# ---- anything -------------------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["text", "json_schema", "yes_no", "on_change", "a{9999999}", "(", "queue"]),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "mode", "json_schema", "schema", "name", "choice", "regex", "json", "grammar", "a"]
            ),
            inside,
            max_size=3,
        )
    ),
    max_leaves=6,
)
FIELDS = sorted({*SessionPatch.__struct_fields__, *Ask.__struct_fields__})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["session.update", "response.create"]),
            st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=3),
        ),
        max_size=6,
    )
)
@settings(max_examples=200, deadline=None)
def test_whatever_a_field_holds_it_is_taken_or_refused_by_name(events: list[tuple[str, dict[str, Any]]]) -> None:
    driven = Driven()
    driven.frame()
    for kind, fields in events:
        before, num_errors = driven.session.settings, len(driven.of("error"))
        name = "session" if kind == "session.update" else "response"
        driven.say(kind, **{name: fields})
        assert driven.session.state is State.CONNECTED
        if len(driven.of("error")) > num_errors:
            assert driven.session.settings == before
            assert driven.error["code"] not in {"internal_error", "unknown_event"}
            if driven.error["code"] != "invalid_json":  # JSON may escape what is no Unicode
                assert driven.error["param"].startswith(name), driven.error
        elif name == "session":
            assert driven.events[-1]["type"] == "session.updated"


@pytest.mark.parametrize("depth", [100, 5_000, 100_000])
def test_deep_json_is_refused_or_kept_as_it_is(driven: Driven, depth: int) -> None:
    schema = "[" * depth + "]" * depth
    text = f'{{"type": "session.update", "session": {{"structured_outputs": {{"json": {schema}}}}}}}'
    driven.session.receive_text(text, driven.now)
    assert driven.session.state is State.CONNECTED
    assert driven.session.outbox.take() is not None


@pytest.mark.parametrize(
    "text", ['{"type": "session.update", "session": {"prompt": "\\ud800"}}', '{"type": "\\udfff"}']
)
def test_text_that_is_no_unicode_is_refused(driven: Driven, text: str) -> None:
    driven.session.receive_text(text, driven.now)
    driven.take()
    assert driven.error["code"] == "invalid_json"
