"""Clips through the real processes: what HTTP says is what the Python API says, and what kills a worker is a 422."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clips import clip
from PIL import Image
from serving import Served

from beholder import Beholder, Clip, srt

CLIP = clip("mp4", 100)
GREEDY: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    with Served(tiny_model, workers=1, threads=1, dtype="float32", arena_mb=1) as served:
        yield served


@pytest.fixture(scope="module")
def offline(tiny_model: Path) -> Iterator[Beholder]:
    with Beholder(tiny_model, threads=1, dtype="float32") as beholder:
        yield beholder


def ask(served: Served, data: bytes, **fields: Any) -> Any:
    return served.client.post("/v1/captions", files={"video": ("clip", data)}, data={**GREEDY, **fields})


def test_the_same_words_as_in_one_process(served: Served, offline: Beholder) -> None:
    answer = ask(served, CLIP, prompt="What happens?").json()
    expected = offline.caption(CLIP, "What happens?", **GREEDY)
    assert answer["text"] == expected.text
    assert answer["clip"]["frame_times_s"] == expected.clips[0].frame_times_s
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 16


def test_a_chat_with_a_clip_and_a_picture(served: Served, offline: Beholder) -> None:
    def part(kind: str, data: bytes) -> dict[str, Any]:
        return {"type": kind, kind: {"url": f"data:;base64,{base64.b64encode(data).decode()}"}}

    picture = io.BytesIO()
    Image.new("RGB", (60, 40), "green").save(picture, "PNG")
    content = [part("image_url", picture.getvalue()), part("video_url", CLIP), {"type": "text", "text": "Compare."}]
    messages = [{"role": "user", "content": content}]
    answer = served.client.post("/v1/chat/completions", json={"messages": messages, **GREEDY}).json()
    assert answer["choices"][0]["message"]["content"] == offline.chat(messages, **GREEDY).text
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 20


def test_subtitles(served: Served, offline: Beholder) -> None:
    answer = ask(served, CLIP, format="srt", segment_s=1)
    assert answer.text == srt(offline.timed_captions(CLIP, segment_s=1, **GREEDY))
    assert answer.text.count("-->") == 4
    assert ask(served, CLIP, format="srt", segment_s=1, stream=True).text == answer.text


def test_more_frames_than_the_lease_has_room_for(served: Served, offline: Beholder) -> None:
    """A clip's lease is for the model's usual 64; the rest travels inline."""
    data = clip("mp4", 250)
    answer = ask(served, data, fps=10, format="timed_json", segment_s=1).json()
    cues = offline.timed_captions(Clip(data, fps=10), segment_s=1, **GREEDY)
    assert [(cue["start"], cue["end"], cue["text"]) for cue in answer["segments"]] == [
        (cue.start, cue.end, cue.text) for cue in cues
    ]
    assert len(answer["clip"]["frame_times_s"]) == 100
    assert served.metric("beholder_clip_frames_sum") >= 100


def test_a_clip_that_takes_too_long_is_refused_and_service_goes_on(tiny_model: Path) -> None:
    with Served(tiny_model, workers=1, threads=1, dtype="float32", preprocess_deadline_s=2.5) as served:
        answer = ask(served, endless())
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "video_timeout")
        assert "A clip of this request took too long" in answer.json()["error"]["message"]
        served.wait_for_line("the preprocess 0 process is up again")
        assert ask(served, clip("mp4", 5)).status_code == 200


def endless() -> bytes:
    """A GIF of a few hundred KiB in which 1,000 frames of four million pixels are drawn over each other."""
    buffer = io.BytesIO()
    Image.new("P", (2048, 2048)).save(buffer, "GIF")
    still = buffer.getvalue()
    start = still.index(b"\x2c")  # the one picture begins here, and the file's trailer ends it
    return still[:start] + (b"\x21\xf9\x04\x00\x05\x00\x00\x00" + still[start:-1]) * 1000 + b";"
