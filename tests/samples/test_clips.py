"""The bundled model watches the sample clips, from their files to its words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from beholder import Beholder, Clip, webvtt
from preprocess.config import MediaLimits
from preprocess.video import open_clip

CLIPS = Path(__file__).parents[2] / "samples" / "clips"
CONTENTS: list[dict[str, Any]] = json.loads((CLIPS / "contents.json").read_text())


@pytest.fixture(scope="module")
def beholder() -> Iterator[Beholder]:
    with Beholder(CLIPS.parent / "model", threads=1) as beholder:
        yield beholder


def test_it_says_what_happens(beholder: Beholder) -> None:
    """All were right when they were drawn; floating point differs between machines, so one may be wrong."""
    wrong = []
    for entry in CONTENTS:
        answer = beholder.caption(CLIPS / entry["file"], entry["question"], temperature=0)
        assert len(answer.clips[0].frame_times_s) == 4
        if answer.text != entry["answer"]:
            wrong.append((entry["file"], answer.text, entry["answer"]))
    assert len(wrong) <= 1, wrong


def test_other_frames_give_other_words(beholder: Beholder, tmp_path: Path) -> None:
    """It is the frames that it goes by: the same ones backwards move the other way."""
    clip = open_clip((CLIPS / "car.mp4").read_bytes(), MediaLimits())
    frames: list[Image.Image] = [image for _, image in clip.frames(range(0, clip.timeline.num_frames, 4))]
    backwards = tmp_path / "car.png"
    frames[-1].save(backwards, save_all=True, append_images=frames[-2::-1], duration=4000 // len(frames))
    answer = beholder.caption(Clip(backwards), "In which direction does the car move?", temperature=0)
    assert answer.text == "The car moves to the left."


def test_parts_of_a_clip_have_captions(beholder: Beholder) -> None:
    cues = beholder.timed_captions(CLIPS / "rocket.mp4", "What happens?", segment_s=2, temperature=0)
    assert [(cue.start, cue.end) for cue in cues] == [(0, 2), (2, 4)]
    assert all("rocket" in cue.text for cue in cues)
    assert webvtt(cues).count("rocket") == 2
