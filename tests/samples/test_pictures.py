"""The index of pictures and clips says what is there."""

import json
from pathlib import Path

import av
import pytest
from PIL import Image

from samples.training.pictures import CLIP_SIZE, RATE, REELS, SECONDS, SHEETS, SIZE, index


@pytest.mark.parametrize(("folder", "sources"), [("pictures", SHEETS), ("clips", REELS)])
def test_index_and_folder_agree(samples: Path, folder: str, sources: list) -> None:
    text = (samples / folder / "contents.json").read_text()
    assert text == index(sources)
    entries = json.loads(text)
    assert len(entries) == 12
    files = {path.name for path in (samples / folder).iterdir()} - {"contents.json"}
    assert {entry["file"] for entry in entries} == files
    assert all(entry["licence"] and entry["question"] and entry["answer"] for entry in entries)


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.file)
def test_a_picture_opens_in_its_size(samples: Path, sheet) -> None:
    with Image.open(samples / "pictures" / sheet.file) as image:
        image.load()
        assert image.size == SIZE


@pytest.mark.parametrize("reel", REELS, ids=lambda reel: reel.file)
def test_a_clip_has_all_its_frames(samples: Path, reel) -> None:
    with av.open(str(samples / "clips" / reel.file)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        assert (stream.width, stream.height) == CLIP_SIZE
        assert len(frames) == SECONDS * RATE
        assert float(frames[-1].pts * stream.time_base) == pytest.approx(SECONDS - 1 / RATE, abs=0.01)
