"""Large JSON bodies: long pictures never become strings of the server, and nothing else is changed by that."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocess.data_url import decode_data_url
from preprocess.errors import ClientError
from preprocess.wire import GenerationOptions, ImagePart, Job, Lease, Look, Message, Preview, TextPart, VideoPart
from preprocess.wire.framing import FRAME_BYTES, frames_of, job_of
from server.intake import Call, caption_call, caption_from_json, chat_call
from server.json_body import (
    _HEAD,
    LIFT_BYTES,
    MAX_SKELETON_BYTES,
    MAX_VALUES,
    STRINGS_A_TURN,
    JsonBody,
    Lifter,
    _head_bytes,
    _unescaped,
)
from server.routes.connection import THREAD_BYTES
from server.settings import Settings

SETTINGS = Settings(served_model_name=("m",))
LARGE = base64.b64encode(bytes(range(256)) * 512).decode()  # 171 kB
URL = f"data:image/png;base64,{LARGE}"


def read(raw: bytes, chunk_bytes: int = 65_536) -> JsonBody:
    lifter = Lifter()
    for start in range(0, len(raw), chunk_bytes):
        for _ in lifter.feed(raw[start : start + chunk_bytes]):
            pass
    return asyncio.run(lifter.finish())


def chat(raw: bytes, chunk_bytes: int = 65_536) -> Call:
    body = read(raw, chunk_bytes)
    return asyncio.run(body.read(lambda raw: chat_call(raw, SETTINGS), lambda call: call.messages))


def asks(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **more}


def picture(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def clip(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, "max_frames": 4}}


def content(part: object) -> str:
    assert isinstance(part, ImagePart | VideoPart)
    return part.data_url + part.rest.decode("latin-1")


def test_a_long_picture_leaves_the_body_and_comes_back_in_its_place() -> None:
    other = URL[:-8] + "AAAAAAAA"
    raw = json.dumps(asks(picture(), {"type": "text", "text": "what?"}, clip(other), picture("data:,short"))).encode()
    assert len(read(raw).skeleton) < 4_000
    call = chat(raw)
    first, text, second, short = call.messages[0].content
    assert (content(first), text, content(second)) == (URL, TextPart("what?"), other)
    assert isinstance(first, ImagePart)
    assert len(first.data_url) < 2_000
    assert short == ImagePart(data_url="data:,short")
    assert isinstance(second, VideoPart)
    assert second.max_frames == 4


def test_a_picture_of_ordinary_size_is_not_handed_to_a_thread_which_takes_longer_than_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = json.dumps(asks(picture())).encode()
    monkeypatch.setattr(asyncio, "to_thread", None)
    assert content(chat(raw).messages[0].content[0]) == URL
    with pytest.raises(TypeError):  # what takes long is
        chat(json.dumps(asks(picture("data:," + "A" * 2 * THREAD_BYTES))).encode())


@pytest.mark.parametrize(
    "fields", [{"image": LARGE}, {"images": [URL, LARGE, "data:,x"], "prompt": "?"}, {"video": URL}]
)
def test_captions_take_long_pictures_in_every_field(fields: dict[str, Any]) -> None:
    raw = json.dumps(fields).encode()
    body = read(raw)
    call = asyncio.run(
        body.read(lambda raw: caption_call(caption_from_json(raw), [], SETTINGS), lambda call: call.messages)
    )
    assert len(body.skeleton) < 4_000
    whole = caption_call(caption_from_json(raw), [], SETTINGS)
    parts, expected = call.messages[0].content, whole.messages[0].content
    assert [content(part) for part in parts[:-1]] == [content(part) for part in expected[:-1]]
    assert parts[-1] == expected[-1]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1000, 1_000_000])
@pytest.mark.parametrize(
    "written",
    [
        lambda url: json.dumps(url).replace("/", "\\/"),  # as PHP does
        lambda url: json.dumps("\r\n".join(url[i : i + 76] for i in range(0, len(url), 76))),
        lambda url: '"' + "".join(f"\\u{ord(character):04x}" for character in url) + '"',
    ],
)
def test_escapes_in_a_picture_are_understood_however_it_is_cut(written: Any, chunk_bytes: int) -> None:
    data = bytes(range(256)) * 80
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert len(url) > LIFT_BYTES
    raw = b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": %s}}]}]}'
    (part,) = chat(raw % written(url).encode(), chunk_bytes).messages[0].content
    assert isinstance(part, ImagePart)
    assert part.rest
    assert decode_data_url(content(part), 1 << 20) == data


CHARACTERS = st.sampled_from(["a", "n", "\\\\", "\\/", "\\n", "\\u002f", "\\ud83d\\ude00", "\ufffd", "é", "😀"])


@given(st.lists(CHARACTERS).map("".join), st.integers(1, 30))
def test_what_pieces_say_does_not_depend_on_where_they_end(written: str, piece_bytes: int) -> None:
    raw = written.encode()
    pieces = [raw[start : start + piece_bytes] for start in range(0, len(raw), piece_bytes)]
    assert b"".join(_unescaped(pieces)) == json.loads(f'"{written}"').encode()


def test_something_long_that_is_no_picture_is_as_it_was() -> None:
    text = 'say "hi" \\ and "\\"' * 900
    tool = {"type": "function", "function": {"name": "f", "parameters": {"url": "a" * 17_000, "image": text}}}
    raw = json.dumps(asks(picture(), tools=[tool])).encode()
    call, whole = chat(raw), chat_call(raw, SETTINGS)
    assert call.options == whole.options
    assert content(call.messages[0].content[0]) == URL


@pytest.mark.parametrize("sign", ["é", "界", "😀"])
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("shift", range(4))
def test_long_words_in_a_pictures_place_are_refused_as_words(sign: str, ascii_only: bool, shift: int) -> None:
    raw = json.dumps(asks(picture("a" * shift + sign * 9_000)), ensure_ascii=ascii_only).encode()
    with pytest.raises(ClientError, match="is no URL"):  # which the client wrote, and no damaged JSON
        chat(raw)


@given(st.integers(1018, 1026), st.sampled_from(["é", "😀", "\\\\", "\\u00e9", "\\ud83d\\ude00", "\x7f"]))
def test_a_head_ends_within_no_character(shift: int, character: str) -> None:
    content = ("a" * shift + character * 9).encode()
    found = _HEAD.match(content)
    assert found is not None
    assert _head_bytes(content) == found.end()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8) | st.sampled_from(['"', "\\", '\\"', "\\\\"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["url", "image", "text", 'a"b', ":"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES, st.integers(1, 40), st.booleans())
def test_json_without_long_strings_is_not_touched(value: Any, chunk_bytes: int, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert read(raw, chunk_bytes).skeleton == raw


@given(VALUES, st.sampled_from(["url", "image", "images", "video"]), st.integers(500, 50_000), st.booleans())
def test_whatever_stands_beside_a_long_picture_stays(value: Any, key: str, chunk_bytes: int, in_list: bool) -> None:
    raw = json.dumps({"before": value, key: [URL, value] if in_list else URL, "after": value}).encode()
    body = read(raw, chunk_bytes)
    found = msgspec.json.decode(body.skeleton)
    assert (found["before"], found["after"]) == (value, value)
    assert len(body.skeleton) < len(raw) - len(URL) + 2_000


@pytest.mark.parametrize("end", [-1, -3, -6, -100_000, 5])
def test_a_body_that_ends_too_early_is_no_json(end: int) -> None:
    with pytest.raises(ClientError) as refusal:
        chat(json.dumps(asks(picture())).encode()[:end])
    assert refusal.value.code == "invalid_json"


def test_more_text_than_any_context_takes_is_refused_while_it_arrives() -> None:
    lifter = Lifter()
    list(lifter.feed(b'{"messages": [{"role": "user", "content": "'))
    for _ in range(MAX_SKELETON_BYTES // 65_536 - 1):
        list(lifter.feed(b"a" * 65_536))
    with pytest.raises(ClientError, match="besides pictures") as refusal:
        list(lifter.feed(b"a" * 65_536))
    assert refusal.value.status == 413


@pytest.mark.parametrize("item", [b"0,", b"{},", b"[[", b'{"a":'])
def test_more_values_than_any_request_needs_are_refused(item: bytes) -> None:
    with pytest.raises(ClientError, match="values") as refusal:
        read(b'{"metadata": [' + item * (MAX_VALUES + 1))
    assert (refusal.value.status, refusal.value.code) == (400, "too_many_values")


def test_others_get_a_turn_however_many_strings_there_are() -> None:
    num_strings = 20 * STRINGS_A_TURN
    turns = sum(1 for _ in Lifter().feed(b'["' + b'a"  "' * num_strings))
    assert turns >= 19


def test_large_media_travel_as_frames_of_their_own_and_uncopied() -> None:
    large, rest = b"x" * FRAME_BYTES, b"y" * FRAME_BYTES
    parts = [
        TextPart("?"),
        ImagePart(data=large),
        ImagePart(data_url="data:,", rest=rest, detail="low"),
        VideoPart(data=b"small"),
    ]
    job = Job("r", [Message("user", [TextPart("hi")]), Message("user", parts)], GenerationOptions(), Lease(), 0.0)
    frames = frames_of(job)
    assert len(frames[0]) < 1_000
    assert frames[1] is large
    assert frames[2] is rest
    received = job_of(frames)
    assert isinstance(received, Job)
    assert received.messages[0] == job.messages[0]
    joined = ImagePart(data_url="data:," + rest.decode(), detail="low")
    assert received.messages[1].content == [parts[0], parts[1], joined, parts[3]]


@pytest.mark.parametrize("size", [10, FRAME_BYTES])
def test_looks_and_previews_travel_likewise(size: int) -> None:
    for job in (Look("r", b"x" * size, b"ref"), Preview("r", VideoPart(data=b"x" * size))):
        frames = frames_of(job)
        assert len(frames) == (1 if size == 10 else 2)
        assert job_of(frames) == job
