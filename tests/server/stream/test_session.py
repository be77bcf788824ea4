"""What a session decides, one rule a test: no sockets, the clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest
from driven_session import JPEG, Driven

from preprocess.errors import ClientError, ServiceError
from preprocess.wire import Delta, ImagePart, TextPart, VideoPart
from server.presets import load_presets
from server.request_models import DEFAULT_PROMPT, SAMPLING_FIELDS
from server.stream.client_events import Ask
from server.stream.work import Cancel, Close, State


@pytest.fixture
def driven() -> Driven:
    return Driven()


# ---- the session's beginning and its settings ----------------------------------------------------------------------


def test_the_first_event_tells_id_token_settings_and_limits(driven: Driven) -> None:
    (created,) = driven.events
    assert (created["type"], created["seq"]) == ("session.created", 1)
    assert (created["session_id"], created["resume_token"]) == ("s", "secret")
    assert created["session"]["trigger"]["mode"] == "manual"
    assert created["session"]["prompt"] == DEFAULT_PROMPT
    assert created["capabilities"]["presets"] == list(load_presets(""))
    assert created["limits"]["max_fps"] == 30


def test_an_update_changes_what_it_names_and_null_is_the_default_again(driven: Driven) -> None:
    driven.update(prompt="What now?", temperature=0.5, trigger={"mode": "interval"})
    driven.update(max_tokens=9)
    session = driven.of("session.updated")[-1]["session"]
    assert (session["prompt"], session["preset"], session["temperature"], session["max_tokens"]) == (
        "What now?",
        None,
        0.5,
        9,
    )
    assert session["trigger"] == {"mode": "interval", "interval_ms": 1000, "change_threshold": 4}
    driven.update(prompt=None, temperature=None, trigger=None)
    session = driven.of("session.updated")[-1]["session"]
    assert (session["prompt"], session["preset"]) == (DEFAULT_PROMPT, None)
    assert (session["temperature"], session["trigger"]["mode"]) == (None, "manual")


def test_an_update_changes_one_field_of_the_trigger_and_another_mode_begins_with_its_defaults(driven: Driven) -> None:
    def trigger(**fields: object) -> tuple[object, ...]:
        driven.update(trigger=fields)
        return tuple(driven.of("session.updated")[-1]["session"]["trigger"].values())

    assert trigger(mode="on_change", interval_ms=300) == ("on_change", 300, 4)
    assert trigger(change_threshold=9) == ("on_change", 300, 9)
    assert trigger(mode="on_change") == ("on_change", 300, 9)
    assert trigger(interval_ms=None) == ("on_change", 0, 9)
    assert trigger() == ("on_change", 0, 9)
    assert trigger(mode="interval") == ("interval", 1000, 4)
    assert trigger(interval_ms=20) == ("interval", 20, 4)
    assert trigger(mode="continuous") == ("continuous", 0, 4)
    assert trigger(mode=None) == ("manual", 0, 4)
    driven.update(trigger={"interval_ms": 5})
    assert "has no meaning with the trigger manual" in driven.error["message"]


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"promt": "x"}, "session.promt"),
        ({"prompt": ""}, "session.prompt"),
        ({"preset": "yes_no"}, "session.prompt"),
        ({"model": "other"}, "session.model"),
        ({"trigger": {"mode": "always"}}, "session.trigger.mode"),
        ({"trigger": {"mode": "manual", "interval_ms": 5}}, "session.trigger.interval_ms"),
        ({"trigger": {"mode": "interval", "interval_ms": 1}}, "session.trigger.interval_ms"),
        ({"trigger": {"mode": "on_change", "change_threshold": 101}}, "session.trigger.change_threshold"),
        ({"trigger": {"mode": "interval", "change_threshold": 3}}, "session.trigger.change_threshold"),
        ({"trigger": "interval"}, "session.trigger"),
        ({"overflow": "newest"}, "session.overflow"),
        ({"preempt": True, "trigger": {"mode": "continuous"}}, "session.preempt"),
        ({"context_frames": 5}, "session.context_frames"),
        ({"context_frames": -1}, "session.context_frames"),
        ({"detail": "max"}, "session.detail"),
        ({"pinned_ids": [7]}, "session.pinned_ids"),
        ({"response_format": {"type": "yaml"}}, "session.response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "session.response_format.json_schema"),
        ({"structured_outputs": {"choice": ["a"], "regex": "b"}}, "session.structured_outputs"),
        (
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
            "session.structured_outputs",
        ),
        ({"max_pixels": 0}, "session.max_pixels"),
        ({"max_pixels": 100_000_001}, "session.max_pixels"),
        ({"max_tokens": 4096}, "session.max_tokens"),
        ({"temperature": 3}, "session.temperature"),
        ({"top_p": "high"}, "session.top_p"),
    ],
)
def test_a_bad_update_is_refused_as_a_whole_naming_the_field(
    driven: Driven, session: dict[str, Any], param: str
) -> None:
    before = driven.session.settings
    driven.say("session.update", event_id="e7", session={"min_p": 0.25, **session})
    assert (driven.error["param"], driven.error["event_id"], driven.error["fatal"]) == (param, "e7", False)
    assert f"`{param}`" in driven.error["message"] or "model" in param
    assert driven.session.settings == before
    assert driven.session.state is State.CONNECTED


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("{", "invalid_json", "The message"),
        ('{"type": "session.updat"}', "unknown_event", "`session.update`"),
        ('{"type": "ping", "tt": 1}', "unknown_parameter", "`tt`"),
        ('{"type": "response.create", "response": {"promt": "x"}}', "unknown_parameter", "`response.promt`"),
        ('{"type": "response.create", "response": {"priority": 1}}', "unsupported_parameter", "`response.priority`"),
        ('{"type": "session.resume", "session_id": "s", "resume_token": "t", "last_seq": 1}', "resume_not_first", ""),
        ('{"event_id": "x"}', "invalid_type", "type"),
    ],
)
def test_what_is_not_understood_is_an_error_event_and_nothing_else(
    driven: Driven, text: str, code: str, hint: str
) -> None:
    driven.session.receive_text(text, driven.now)
    driven.take()
    assert driven.error["code"] == code
    assert hint in driven.error["message"]
    assert driven.session.state is State.CONNECTED
    assert not driven.actions


# ---- triggers ------------------------------------------------------------------------------------------------------


def test_manual_waits_to_be_asked_and_takes_the_newest_frame(driven: Driven) -> None:
    driven.frame(b"\xff\xd8 1")
    driven.frame(b"\xff\xd8 2")
    assert not driven.actions
    driven.say("response.create", response={"prompt": "What is it?", "metadata": {"k": "v"}})
    assert driven.shown() == [b"\xff\xd8 2"]
    assert driven.starts[-1].messages[-1].content[0] == TextPart("What is it?")
    driven.deltas("A ", "cat.")
    (done,) = driven.of("response.done")
    assert (done["status"], done["text"], done["metadata"]) == ("completed", "A cat.", {"k": "v"})
    assert done["usage"] == {
        "input_tokens": 20,
        "image_tokens": 16,
        "cached_tokens": 4,
        "output_tokens": 2,
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 5,
    }
    assert driven.dropped == {"replaced": 1}
    assert driven.session.mailbox.captioned == 1


def test_every_sampling_field_of_a_question_is_taken(driven: Driven) -> None:
    assert {*SAMPLING_FIELDS} <= {*Ask.__struct_fields__}
    driven.frame()
    given = {"temperature": 0.5, "top_k": 7, "seed": 3, "stop": ["x"], "skip_special_tokens": False, "ignore_eos": True}
    driven.say("response.create", response={**given, "max_completion_tokens": 5})
    options = driven.starts[-1].options
    assert (options.max_tokens, options.temperature, options.top_k, options.seed) == (5, 0.5, 7, 3)
    assert (options.stop, options.skip_special_tokens, options.ignore_eos) == (["x"], False, True)


def test_asking_again_without_a_new_frame_looks_at_the_same_one(driven: Driven) -> None:
    driven.frame()
    for _ in range(2):
        driven.say("response.create")
        driven.deltas("x")
    assert driven.shown(0) == driven.shown(1) == [JPEG]
    assert driven.session.mailbox.captioned == 1


def test_asking_before_any_frame_is_refused_unless_no_picture_is_wanted(driven: Driven) -> None:
    driven.say("response.create")
    assert driven.error["code"] == "no_frame"
    driven.say("response.create", response={"frame_ids": [], "prompt": "Hello?"})
    assert driven.shown() == []


def test_frames_are_named_by_id(driven: Driven) -> None:
    driven.update(context_frames=2)
    for number in (5, 9):
        driven.frame(b"\xff\xd8%d" % number, id=number)
        driven.say("response.create")
        driven.deltas("x")
    driven.say("response.create", response={"frame_ids": [5]})
    assert driven.shown() == [b"\xff\xd85"]
    assert driven.of("response.created")[-1]["frame_ids"] == [5]
    driven.say("response.create", response={"frame_ids": [6]})
    assert "5, 9" in driven.error["message"]


def test_continuous_starts_as_soon_as_it_is_free(driven: Driven) -> None:
    driven.update(trigger={"mode": "continuous"})
    driven.frame(b"\xff\xd8 1")
    driven.frame(b"\xff\xd8 2")
    driven.frame(b"\xff\xd8 3")
    assert len(driven.starts) == 1
    driven.deltas("x")
    assert driven.shown() == [b"\xff\xd8 3"]
    driven.deltas("y")
    assert len(driven.starts) == 2


def test_interval_keeps_its_distance(driven: Driven) -> None:
    driven.update(trigger={"mode": "interval", "interval_ms": 500})
    for _ in range(20):
        driven.frame()
        if driven.session.is_running:
            driven.deltas("x")
        driven.wait(0.1)
    assert len(driven.starts) == 4


def test_a_still_scene_costs_the_engine_nothing(driven: Driven) -> None:
    driven.update(trigger={"mode": "on_change", "change_threshold": 10})
    driven.frame()
    driven.looked(None, b"first")
    driven.deltas("A room.")
    for _ in range(9):
        driven.frame()
        assert driven.looks[-1].reference == b"first"
        driven.looked(9.9, b"other")
        driven.wait(0.1)
    assert len(driven.starts) == 1
    driven.wait(1)
    stats = driven.of("frames.stats")[-1]
    assert (stats["received"], stats["captioned"], stats["dropped"], stats["change"]) == (10, 1, {"unchanged": 9}, 9.9)
    driven.frame()
    driven.looked(10.0, b"changed")
    assert len(driven.starts) == 2
    assert driven.session.mailbox.pending == 1


def test_when_something_happened_the_newest_frame_is_captioned(driven: Driven) -> None:
    driven.update(trigger={"mode": "on_change"})
    driven.frame(b"\xff\xd8 1")
    driven.frame(b"\xff\xd8 2")
    driven.looked(None)
    assert driven.shown() == [b"\xff\xd8 2"]
    assert driven.looks[-1].data == b"\xff\xd8 2"  # what is said belongs to this one, so it is the next reference
    driven.looked(None, b"second")
    driven.deltas("x")
    driven.frame(b"\xff\xd8 3")
    assert driven.looks[-1].reference == b"second"
    assert driven.dropped == {"replaced": 1}


def test_a_change_that_was_not_told_counts_again(driven: Driven) -> None:
    driven.update(trigger={"mode": "on_change"})
    driven.frame()
    driven.looked(None)
    driven.fail(ServiceError("the engine stopped", code="engine_restarting", retry_after_s=2.0))
    driven.frame()
    assert len(driven.looks) == 1  # until the engine may be back
    driven.wait(2.1)
    assert driven.looks[-1].reference == b""


@pytest.mark.parametrize("preempt", [False, True])
def test_a_change_preempts_only_where_it_was_asked_for(driven: Driven, preempt: bool) -> None:
    driven.update(trigger={"mode": "on_change"}, preempt=preempt)
    driven.frame(b"\xff\xd8 1")
    driven.looked(None)
    driven.frame(b"\xff\xd8 2")
    assert len(driven.looks) == (2 if preempt else 1)
    if preempt:
        driven.looked(1)
        driven.frame(b"\xff\xd8 3")
        driven.looked(50)
        assert driven.of("response.done")[0]["status"] == "cancelled"
        assert driven.shown() == [b"\xff\xd8 3"]
    driven.deltas("x")
    assert driven.of("response.done")[-1]["status"] == "completed"


def test_a_trigger_never_ends_what_was_asked_for(driven: Driven) -> None:
    driven.update(trigger={"mode": "interval", "interval_ms": 10}, preempt=True)
    driven.frame()
    driven.say("response.create")  # ends the caption
    assert [event["status"] for event in driven.of("response.done")] == ["cancelled"]
    driven.wait(1)
    driven.frame()
    assert len(driven.of("response.done")) == 1
    driven.deltas("asked")
    assert len(driven.starts) == 3


def test_questions_wait_for_their_turn_up_to_a_limit(driven: Driven) -> None:
    driven.update(trigger={"mode": "continuous"})
    driven.frame()
    for number in range(9):
        driven.say("response.create", response={"prompt": f"question {number}"})
    assert (driven.error["code"], driven.error["retry_after_ms"]) == ("queue_full", 1000)
    for number in range(8):
        driven.frame()
        driven.deltas("x")
        assert driven.starts[-1].messages[-1].content[0] == TextPart(f"question {number}")


# ---- what a prompt is made of --------------------------------------------------------------------------------------


def test_the_question_comes_before_the_pictures_and_the_instructions_before_it(driven: Driven) -> None:
    driven.update(instructions="Be brief.", prompt="What?", detail="low")
    driven.frame()
    driven.say("response.create")
    system, user = driven.starts[-1].messages
    assert (system.role, system.content) == ("system", [TextPart("Be brief.")])
    assert user.content == [TextPart("What?"), ImagePart(data=JPEG, detail="low")]
    driven.deltas("x")
    driven.update(prompt_position="after")
    driven.say("response.create")
    assert driven.starts[-1].messages[-1].content[-1] == TextPart("What?")


def test_context_grows_to_twice_its_size_before_it_is_cut(driven: Driven) -> None:
    driven.update(context_frames=2, trigger={"mode": "continuous"})
    sizes = []
    for number in range(8):
        driven.now += 0.1
        driven.frame(b"\xff\xd8%d" % number)
        driven.deltas("x")
        shown = driven.shown()
        sizes.append(len(shown))
        assert shown[-1] == b"\xff\xd8%d" % number
        if len(shown) > 2:
            assert shown[:-1] == driven.shown(-2)  # the last prompt is the beginning of this one
    assert sizes == [1, 2, 3, 4, 2, 3, 4, 2]


def test_a_frame_that_got_no_answer_is_no_context(driven: Driven) -> None:
    driven.update(context_frames=2, trigger={"mode": "interval", "interval_ms": 10}, preempt=True)
    for number in range(3):  # each ends the one before, which has not begun
        driven.now += 0.1
        driven.frame(b"\xff\xd8%d" % number)
        assert driven.shown() == [b"\xff\xd8%d" % number]
    assert driven.dropped == {"cancelled": 2}
    driven.deltas("x")
    driven.now += 0.1
    driven.frame(b"\xff\xd83")
    driven.fail(ServiceError("Busy.", code="busy"))
    driven.wait(1)
    driven.frame(b"\xff\xd84")
    assert driven.shown() == [b"\xff\xd82", b"\xff\xd84"]
    driven.deltas("x", end=None)
    driven.say("response.create")  # the same frame again
    driven.deltas("x")
    driven.say("response.create", response={"frame_ids": [5, 3]})  # chosen frames are no context of others
    driven.deltas("x")
    driven.now += 0.1
    driven.frame(b"\xff\xd85")
    assert driven.shown() == [b"\xff\xd82", b"\xff\xd84", b"\xff\xd85"]


def test_only_the_frame_at_fault_is_no_picture(driven: Driven) -> None:
    driven.frame(b"\xff\xd8 plan", k="image", id=7)
    driven.frame(b"\xff\xd8 now")
    driven.say("response.create")
    driven.fail(ClientError("The picture is damaged", code="image_undecodable", param="messages[0].content[1]"))
    assert driven.of("response.done")[-1]["error"]["param"] == "frame 7"
    assert driven.dropped == {"failed": 1}


def test_pinned_pictures_are_in_every_prompt_until_taken_out(driven: Driven) -> None:
    driven.frame(b"\xff\xd8 plan", k="image", id=7)
    assert driven.of("session.updated")[-1]["session"]["pinned_ids"] == [7]
    driven.frame(b"\xff\xd8 now")
    driven.say("response.create")
    assert driven.shown() == [b"\xff\xd8 plan", b"\xff\xd8 now"]
    driven.deltas("x")
    driven.update(pinned_ids=[])
    driven.say("response.create")
    assert driven.shown() == [b"\xff\xd8 now"]
    driven.deltas("x")
    for number in range(8):
        driven.frame(b"\xff\xd8", k="image", id=number)
    assert driven.error["code"] == "too_many_images"


# ---- media ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"", "invalid_header"),
        (b"\x00", "invalid_header"),
        (b"\x10\x01" + b"x" * 5000, "invalid_header"),
        (b"\x00\x09{}", "invalid_header"),
        (b"\x00\x02{]x", "invalid_json"),
        (b'\x00\x0c{"k":"sound"}'[:14] + b"", "invalid_json"),
        (b'\x00\x0d{"k":"sound"}x', "invalid_value"),
        (b'\x00\x07{"q":1}x', "unknown_parameter"),
        (b'\x00\x0e{"mime":"a/b"}x', "unsupported_media_type"),
        (b'\x00\x09{"id":-1}x', "invalid_value"),
        (b'\x00\x0b{"ts":1e18}x', "invalid_value"),
        (b"\x00\x02{}", "image_empty"),
        (b"\x00\x00\xff\xd8", "invalid_json"),
        (b'\x00\x0d{"last":true}\xff\xd8', "invalid_value"),
        (b'\x00\x19{"k":"image","last":true}\xff\xd8', "invalid_value"),
    ],
)
def test_a_binary_message_that_cannot_be_read_is_an_error_event(driven: Driven, message: bytes, code: str) -> None:
    driven.frame(message)
    assert driven.error["code"] == code
    assert driven.session.mailbox.received == 0
    assert driven.session.state is State.CONNECTED


def test_a_bad_frame_is_told_counted_and_no_context(driven: Driven) -> None:
    driven.update(context_frames=1, trigger={"mode": "continuous"})
    driven.frame(b"\xff\xd8 bad")
    driven.fail(ClientError("The picture is damaged", code="image_undecodable"))
    (done,) = driven.of("response.done")
    assert (done["status"], done["error"]["code"]) == ("failed", "image_undecodable")
    assert driven.dropped == {"decode_error": 1}
    driven.frame(b"\xff\xd8 good")  # at once: the next frame is not at fault
    assert driven.shown() == [b"\xff\xd8 good"]


def test_ids_go_on_from_the_largest_with_0(driven: Driven) -> None:
    driven.update(trigger={"mode": "continuous"})
    driven.frame(id=(1 << 53) - 1, mime="Image/JPEG")
    driven.deltas("x")
    driven.frame()
    assert [created["frame_ids"] for created in driven.of("response.created")] == [[(1 << 53) - 1], [0]]


def test_frames_above_the_rate_are_dropped_and_counted(driven: Driven) -> None:
    for _ in range(120):
        driven.frame()
        driven.now += 1 / 60
    assert driven.session.mailbox.received - driven.dropped["rate"] == pytest.approx(60 + 7, abs=1)
    assert driven.session.state is State.CONNECTED


def test_a_camera_at_the_limit_loses_no_frame(driven: Driven) -> None:
    for _ in range(300):
        driven.frame()
        driven.now += 1 / 30
    assert "rate" not in driven.dropped


def test_a_queue_captions_every_frame_in_order_and_refuses_beyond_its_length() -> None:
    driven = Driven(stream_max_queue=2)
    driven.update(overflow="queue", trigger={"mode": "continuous"})
    for number in range(4):
        driven.frame(b"\xff\xd8%d" % number)
    assert driven.dropped == {"queue_full": 1}
    for number in range(3):
        assert driven.shown() == [b"\xff\xd8%d" % number]
        driven.deltas("x")


def test_frame_age_counts_from_the_camera_not_from_the_network(driven: Driven) -> None:
    driven.update(trigger={"mode": "continuous"})
    driven.frame(ts=1000)
    driven.deltas("x")
    driven.now += 1.0
    driven.frame(ts=1800)  # 200 ms longer on its way than the first
    assert driven.of("response.created")[-1]["frame_age_ms"] == pytest.approx(200)
    driven.now += 0.05
    driven.deltas("x")
    assert driven.of("response.done")[-1]["frame_age_ms"] == pytest.approx(250)


def test_the_parts_of_a_clip_are_one_frame(driven: Driven) -> None:
    driven.update(context_frames=2, trigger={"mode": "on_change"})
    driven.frame(b"first ", k="video")
    driven.frame(b"second ", k="video")
    assert driven.session.mailbox.received == 0
    assert driven.session.held_bytes == 13
    driven.frame(b"third", k="video", last=True, id=5, mime="video/mp4")
    assert not driven.looks
    assert driven.starts[-1].messages[-1].content[1:] == [VideoPart(data=b"first second third")]
    assert driven.of("response.created")[-1]["frame_ids"] == [5]
    driven.deltas("A cat runs.")
    driven.frame()
    driven.looked(None)
    assert driven.shown() == [JPEG]


def test_a_clip_too_large_is_refused_and_the_next_one_is_not() -> None:
    driven = Driven(max_video_mb=0.01)
    driven.update(trigger={"mode": "continuous"})
    for last in (False, True):
        driven.frame(bytes(9000), k="video", last=last)
    assert driven.error["code"] == "video_too_large"
    assert driven.session.held_bytes == 0
    driven.frame(b"small", k="video", last=True)
    assert len(driven.starts) == 1
    driven.fail(ClientError("This is no clip", code="video_format_unsupported"))
    assert driven.dropped == {"decode_error": 1}


# ---- limits and ends -----------------------------------------------------------------------------------------------


def test_too_many_messages_close_with_4429(driven: Driven) -> None:
    for _ in range(241):
        driven.say("ping")
    assert driven.actions == [Close(4429, "rate limited")]
    assert (driven.error["code"], driven.error["fatal"]) == ("rate_limited", True)


def test_too_many_bytes_close_with_4429() -> None:
    driven = Driven(stream_max_mb_per_s=0.01, stream_max_message_mb=0.01, max_image_mb=0.005)
    for _ in range(6):
        driven.frame(b"\xff\xd8" + b"x" * 5000)
    assert driven.actions == [Close(4429, "rate limited")]


def test_a_frame_too_large_is_dropped_and_the_connection_stays(driven: Driven) -> None:
    driven = Driven(max_image_mb=0.01)
    driven.frame(b"\xff\xd8" + bytes(20_000))
    assert (driven.error["code"], driven.dropped) == ("image_too_large", {"too_large": 1})
    assert driven.session.state is State.CONNECTED


def test_a_session_holds_only_so_many_bytes() -> None:
    driven = Driven(stream_max_held_mb=0.02, stream_max_queue=64)
    driven.update(overflow="queue")
    for _ in range(5):
        driven.frame(b"\xff\xd8" + bytes(6000))
    assert driven.dropped == {"too_large": 2}
    assert driven.session.held_bytes < 0.02 * (1 << 20)


def test_silence_closes_with_4408_and_a_ping_prevents_it(driven: Driven) -> None:
    for _ in range(5):
        driven.wait(50)
        driven.say("ping", t=3)
    assert driven.of("pong")[-1]["t"] == 3
    driven.wait(60)
    assert driven.actions == [Close(4408, "idle timeout")]
    assert driven.error["code"] == "idle_timeout"


def test_a_connection_that_takes_over_is_a_sign_of_life(driven: Driven) -> None:
    limit = driven.session.limits.idle_timeout_s
    driven.wait(limit - 1)
    driven.session.attach(driven.now)  # and the old connection was not known to be lost
    driven.wait(limit - 1)
    assert driven.session.state is State.CONNECTED
    driven.wait(1)
    assert driven.session.state is State.CLOSED


def test_a_session_says_that_it_ends_then_closes_with_4410() -> None:
    driven = Driven(stream_max_session_s=100)
    driven.wait(41)
    assert driven.of("session.going_away")[0]["time_left_ms"] == pytest.approx(59_000)
    driven.say("ping")
    driven.wait(59)
    assert driven.actions == [Close(4410, "session expired")]


def test_a_reader_that_never_reads_is_closed_with_1013_and_its_work_ends() -> None:
    driven = Driven(stream_send_queue_kb=4)
    driven.frame()
    driven.say("response.create")
    name = driven.starts[-1].response_id
    driven.session.on_started(name, 1, 1, 1, driven.now)
    for _ in range(50):
        driven.session.on_delta(name, Delta(name, "word " * 40, [1]), driven.now)
    actions = driven.session.take_actions()
    assert actions == [Cancel(name), Close(1013, "too slow a reader")]


def test_deltas_that_wait_are_joined_and_lose_nothing(driven: Driven) -> None:
    driven.frame()
    driven.say("response.create")
    name = driven.starts[-1].response_id
    for i in range(500):
        driven.session.on_delta(name, Delta(name, f"{i} ", [i]), driven.now)
    assert len(driven.session.outbox) == 1
    driven.deltas("end")
    assert "".join(event["delta"] for event in driven.of("response.output_text.delta")) == driven.events[-1]["text"]


def test_closing_finishes_what_was_asked_for(driven: Driven) -> None:
    driven.frame()
    driven.say("response.create")
    driven.say("response.create")
    driven.say("session.close")
    driven.frame()
    driven.deltas("one")
    driven.deltas("two")
    assert [event["type"] for event in driven.events[-2:]] == ["response.done", "session.closed"]
    assert driven.actions[-1] == Close(1000, "")
    assert driven.dropped == {"cancelled": 1}


def test_draining_finishes_what_runs_and_starts_nothing(driven: Driven) -> None:
    driven.update(trigger={"mode": "continuous"})
    driven.frame()
    driven.say("response.create", event_id="q")
    driven.session.drain(5.0, driven.now)
    driven.take()
    assert driven.of("session.going_away")[0]["reason"] == "draining"
    assert (driven.error["code"], driven.error["event_id"]) == ("draining", "q")
    driven.frame()
    driven.deltas("last words")
    assert driven.of("response.done")[-1]["text"] == "last words"
    assert driven.actions[-1] == Close(1001, "the server is shutting down")
    assert len(driven.starts) == 1


# ---- a lost connection ---------------------------------------------------------------------------------------------


def test_a_cut_connection_ends_the_work_at_once_and_keeps_the_account(driven: Driven) -> None:
    driven.update(trigger={"mode": "continuous"})
    driven.frame()
    driven.frame()
    driven.session.detach(driven.now)
    driven.take()
    assert isinstance(driven.actions[-1], Cancel)
    assert driven.of("response.done")[-1]["status"] == "cancelled"
    assert driven.dropped == {"disconnected": 2}
    assert driven.session.mailbox.pending == 0


def test_resuming_repeats_what_was_lost_and_nothing_else(driven: Driven) -> None:
    driven.frame()
    driven.say("response.create")
    driven.deltas("one ", "two ", end=None)
    seen = driven.events[-1]["seq"] - 1  # the last event was lost on its way
    driven.session.detach(driven.now)
    driven.events.clear()
    assert driven.session.outbox.rewind(seen) is None
    driven.session.attach(driven.now + 5)
    driven.take()
    assert [event["seq"] for event in driven.events] == list(range(seen + 1, seen + 1 + len(driven.events)))
    assert driven.events[-1]["text"] == "one two "
    driven.frame()
    driven.say("response.create")
    assert len(driven.starts) == 2


def test_what_is_no_longer_kept_is_told() -> None:
    driven = Driven(stream_send_queue_kb=4)
    for _ in range(100):
        driven.say("ping")
    first = driven.session.outbox.rewind(1)
    assert first is not None
    assert first > 2
    driven.events.clear()
    driven.take()
    assert driven.events[0]["seq"] == first
    with pytest.raises(ValueError, match="500"):
        driven.session.outbox.rewind(500)


def test_nobody_resumes_and_the_session_ends(driven: Driven) -> None:
    driven.session.detach(driven.now)
    driven.wait(29.9)
    assert driven.session.state is State.DETACHED
    driven.wait(0.2)
    assert driven.session.state is State.CLOSED


# ---- feedback, cancelling, failures --------------------------------------------------------------------------------


def test_cancelling_ends_with_exactly_one_done(driven: Driven) -> None:
    driven.say("response.cancel", event_id="c")
    assert (driven.error["code"], driven.error["event_id"]) == ("response_not_active", "c")
    driven.frame()
    driven.say("response.create")
    driven.deltas("some ", end=None)
    driven.say("response.cancel", response_id="another")
    assert driven.error["param"] == "response_id"
    driven.say("response.cancel", response_id=driven.starts[-1].response_id)
    (done,) = driven.of("response.done")
    assert (done["status"], done["text"], done["usage"]["output_tokens"]) == ("cancelled", "some ", 1)
    driven.deltas("late")
    assert len(driven.of("response.done")) == 1


def test_a_length_limit_leaves_a_response_incomplete(driven: Driven) -> None:
    driven.frame()
    driven.say("response.create", response={"max_tokens": 1})
    driven.deltas("A", end="length")
    assert driven.of("response.done")[0]["status"] == "incomplete"


def test_feedback_names_a_response_of_this_session(driven: Driven) -> None:
    driven.frame()
    driven.say("response.create")
    name = driven.starts[-1].response_id
    driven.say("feedback.create", response_id=name, rating="up", comment="nice", tags=["short"])
    assert driven.of("feedback.created")[0]["response_id"] == name
    for fields, param in (
        ({"response_id": "x", "rating": "up"}, "response_id"),
        ({"response_id": name, "rating": "great"}, "rating"),
        ({"response_id": name, "rating": "up", "comment": "x" * 3000}, "comment"),
    ):
        driven.say("feedback.create", **fields)
        assert driven.error["param"] == param


def test_token_ids_come_when_asked_for(driven: Driven) -> None:
    driven.update(return_token_ids=True)
    driven.frame()
    driven.say("response.create")
    driven.deltas("a", "b")
    assert [i for event in driven.of("response.output_text.delta") for i in event["token_ids"]] == [0, 1]
