"""Clips are prepared as the video processors of transformers prepare them: frames, grids, prompts and positions.

They need torchvision, so what they made was recorded (`tests/goldens/record_video_processors.py`); the clips come from
code on both sides. All is equal, but that they resize tensors and we Pillow's images: a few values differ by 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from tiny_models import FAMILIES
from tokenizers import Tokenizer

import preprocess.media
from preprocess.config import MediaLimits, PreprocessConfig
from preprocess.prepare import Preparer
from preprocess.timeline import Timeline
from preprocess.wire import GenerationOptions, Job, Lease, Message, Prepared, TextPart, VideoPart
from tests.goldens.coded_clips import CLIPS, CodedClip

GOLDENS: Final = Path(__file__).parent.parent / "goldens"
RECORD: Final[dict[str, Any]] = json.loads((GOLDENS / "video_processors.json").read_text())["families"]
PIXELS: Final = np.load(GOLDENS / "video_processors.npz")

TINY: Final = {"smolvlm": "smolvlm2", "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl"}
"""Family of the record → name of its tiny model."""

CASES: Final = [
    pytest.param(family, case, id=f"{family}, {case['settings']}, {case['clip']}")
    for family, record in RECORD.items()
    for case in record["clips"]
    if TINY[family] in FAMILIES
]


class Played:
    """A coded clip as if it had been decoded from a file. See `preprocess.video.Clip`."""

    def __init__(self, clip: CodedClip) -> None:
        self._clip = clip
        tick = 1 / (clip.fps * 512)  # as MP4 files have it
        self.timeline = Timeline.of(np.arange(clip.num_frames) * 512, 512, tick)

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
        for number in wanted:
            yield number, Image.fromarray(self._clip.frame(number))


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the preparer of a tiny model with recorded settings."""

    @cache
    def prepare(family: str, settings: str) -> Preparer:
        folder = FAMILIES[TINY[family]](tmp_path_factory.mktemp("golden"))
        values = RECORD[family]["settings"][settings]
        _write(folder / "video_preprocessor_config.json", **values)
        _write(folder / "preprocessor_config.json", **{key: values[key] for key in ("resample",) if key in values})
        config = json.loads((folder / "config.json").read_text())
        text, vision = config["text_config"], config["vision_config"]
        text["max_position_embeddings"] = 1 << 20
        if "patch_size" in values:
            vision["patch_size"] = values["patch_size"]
            _write(folder / "preprocessor_config.json", patch_size=values["patch_size"])
        _write(folder / "config.json", text_config=text, vision_config=vision)
        return Preparer(PreprocessConfig(str(folder), limits=MediaLimits(max_video_frames=768)), None)

    return prepare


def _write(file: Path, **changes: object) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**before, **changes}))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_a_clip_is_prepared_as_recorded(
    family: str, case: dict[str, Any], preparer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = CLIPS[case["clip"]]
    prepare: Preparer = preparer(family, case["settings"])
    monkeypatch.setattr(preprocess.media, "open_clip", lambda *_: Played(clip))
    question = [VideoPart(b"x"), TextPart(" what happens?")]
    prepared = prepare.prepare(Job("r", [Message("user", question)], GenerationOptions(), Lease(), 0.0))
    assert isinstance(prepared, Prepared), prepared

    tick = 1 / clip.fps
    assert prepared.clips[0].frame_times_s == [float(number * tick) for number in case["frames"]]
    assert _clip_in(case["prompt"]) in _counted(prepare, prepared)
    items = [np.frombuffer(item.pixels.inline, np.uint8).reshape(item.pixels.shape) for item in prepared.request.media]
    if "grid" in case:
        _, height, width, _ = items[0].shape
        patch = RECORD[family]["settings"][case["settings"]]["patch_size"]
        assert [len(items), height // patch, width // patch] == case["grid"]
    if "pixels" in case:
        _assert_near(items, PIXELS[case["pixels"]], case)


def _clip_in(prompt: str) -> str:
    """What stands for the clip in a recorded prompt, and the question after it."""
    found = re.search(r"(?:User: |user\n)(.* what happens\?)", prompt, re.DOTALL)
    assert found is not None
    return found[1]


def _counted(prepare: Preparer, prepared: Prepared) -> str:
    """Our prompt as the record writes prompts."""
    ids = np.frombuffer(prepared.request.prompt_ids, "<i8").tolist()
    tokenizer = Tokenizer.from_file(str(Path(prepare._config.model) / "tokenizer.json"))
    placeholders = r"(<\|video_pad\|>|<image>)+"
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return re.sub(placeholders, lambda run: f"{run[1]}*{len(run[0]) // len(run[1])}", text)


def _assert_near(items: list[npt.NDArray[np.uint8]], recorded: npt.NDArray[np.uint8], case: dict[str, Any]) -> None:
    frames = np.concatenate(items)
    ours = frames.transpose(0, 3, 1, 2) if "grid" not in case else _patches(frames, case["grid"])
    difference = np.abs(ours.astype(int) - recorded)
    assert difference.max() <= 1
    assert difference.mean() < 0.01


def _patches(frames: npt.NDArray[np.uint8], grid: list[int]) -> npt.NDArray[np.uint8]:
    """(2 t, height, width, 3) → (patches, values): as the Qwen processors lay patches out, merged ones together."""
    t, h, w = grid
    patch = frames.shape[1] // h
    cut = frames.reshape(t, 2, h // 2, 2, patch, w // 2, 2, patch, 3)
    return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, -1)
