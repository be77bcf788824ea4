"""SmolVLM2's clips as transformers would have them: which frames, how large, and the words around them."""

from __future__ import annotations

import importlib
import json
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preprocess.errors import ServiceError
from preprocess.families import load_family
from preprocess.families.clips import ClipFamily
from preprocess.model_folder import ModelFolder
from preprocess.number_words import in_words
from preprocess.timeline import Timeline

RATES = [24, 25, 30, 60, 1, 7, Fraction(30000, 1001), Fraction(24000, 1001)]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with settings for clips."""
    path = tmp_path_factory.mktemp("clips") / "model"
    shutil.copytree(tiny_model, path)
    _set(path, video_sampling={"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 64}})
    return path


def _set(folder: Path, **changes: object) -> None:
    file = folder / "preprocessor_config.json"
    kept = {name: value for name, value in {**json.loads(file.read_text()), **changes}.items() if value is not None}
    file.write_text(json.dumps(kept))


def clips_of(folder: Path) -> ClipFamily:
    clips = load_family(ModelFolder(folder)).clips
    assert clips is not None
    return clips


@pytest.fixture(scope="module")
def family(folder: Path) -> ClipFamily:
    return clips_of(folder)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The two modules of transformers; their classes want torchvision and num2words, these functions do not."""
    from transformers.video_utils import VideoMetadata

    package = "transformers.models.smolvlm"  # itself it hands out a stand-in that asks for torchvision
    return SimpleNamespace(
        video=importlib.import_module(f"{package}.video_processing_smolvlm"),
        text=importlib.import_module(f"{package}.processing_smolvlm"),
        Metadata=VideoMetadata,
    )


def steady(num_frames: int, rate: Fraction | int) -> Timeline:
    tick = 1 / (Fraction(rate) * 512)  # as MP4 files have it
    return Timeline.of(np.arange(num_frames) * 512, 512, tick)


@given(
    num_frames=st.integers(1, 4000),
    rate=st.sampled_from(RATES),
    fps=st.sampled_from([0.5, 1, 2, 3.3]),
    max_frames=st.sampled_from([1, 4, 8, 64]),
)
@example(num_frames=100, rate=60, fps=3.3, max_frames=8)  # five and a half frames by floats, less by fractions
@settings(max_examples=200, deadline=None)
def test_the_same_frames_are_sampled(
    family: ClipFamily, reference: Any, num_frames: int, rate: Fraction | int, fps: float, max_frames: int
) -> None:
    metadata = reference.Metadata(
        total_num_frames=num_frames, fps=float(rate), duration=num_frames / float(rate), video_backend="pyav"
    )
    own = SimpleNamespace(num_frames=max_frames, fps=fps)
    expected = reference.video.SmolVLMVideoProcessor.sample_frames(own, metadata)
    assert family.sample(steady(num_frames, rate), fps, max_frames) == expected.tolist()


@pytest.mark.parametrize(
    ("num_frames", "expected"),
    [(25, [0]), (50, [0, 49]), (100, [0, 33, 66, 99]), (250, [0, 35, 71, 106, 142, 177, 213, 249])],
)
def test_frames_by_hand(family: ClipFamily, num_frames: int, expected: list[int]) -> None:
    assert family.sample(steady(num_frames, 25), 0, 0) == expected


def test_a_second_at_both_ends_of_a_long_clip_is_left_out(family: ClipFamily) -> None:
    sampled = family.sample(steady(25 * 60, 25), 0, 0)
    assert (sampled[0], sampled[-1], len(sampled)) == (25, 25 * 59, 8)


def test_a_slide_show_gives_each_slide_once(family: ClipFamily) -> None:
    slides = Timeline.of(np.array([0, 9_000, 9_040, 20_000]), 10_000, Fraction(1, 1000))
    assert family.sample(slides, 0, 0) == [0, 2, 3]


@pytest.mark.parametrize("size", [(64, 64), (640, 480), (480, 640), (1920, 1080), (100, 99), (333, 2), (2, 333)])
def test_frames_have_the_same_sizes(folder: Path, reference: Any, size: tuple[int, int]) -> None:
    frame = SimpleNamespace(size=lambda: (size[1], size[0]))
    first = reference.video.get_resize_output_image_size(frame, 4 * 32)
    layout = clips_of(folder).layout(*size, 1)
    assert layout.steps == ((first[1], first[0]), (32, 32))
    assert (layout.num_tiles, layout.num_tokens) == (1, 4)


def test_the_size_of_pictures_beats_that_of_clips_as_in_the_reference(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    assert clips_of(tmp_path / "model").layout(200, 100, 1).steps[0] == (128, 64)
    _set(tmp_path / "model", size=None)
    assert clips_of(tmp_path / "model").layout(200, 100, 1).steps[0] == (64, 32)


@pytest.mark.parametrize("place", ["video_preprocessor_config.json", "processor_config.json"])
def test_settings_may_lie_where_newer_folders_have_them(folder: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(folder, tmp_path / "model")
    own: dict[str, object] = {"fps": 2, "num_frames": 5, "size": {"longest_edge": 96}}
    file = tmp_path / "model" / place
    if place == "processor_config.json":
        own = {**json.loads(file.read_text()), "video_processor": own}
    file.write_text(json.dumps(own))
    clips = clips_of(tmp_path / "model")
    assert (clips.fps, clips.max_frames, clips.layout(200, 100, 1).steps[0]) == (2, 5, (96, 48))


@pytest.mark.parametrize(("num_frames", "rate"), [(1, 25), (100, 25), (250, 25), (2000, 30), (7200, 1), (100, 24)])
def test_the_words_are_the_same(
    family: ClipFamily, reference: Any, monkeypatch: pytest.MonkeyPatch, num_frames: int, rate: int
) -> None:
    clip = steady(num_frames, rate)
    sampled = family.sample(clip, 0, 0)
    metadata = reference.Metadata(
        total_num_frames=num_frames, fps=rate, duration=num_frames / rate, frames_indices=sampled
    )
    inputs = {"pixel_values": np.zeros((1, len(sampled), 3, 2, 2)), "video_metadata": [metadata]}
    own = SimpleNamespace(
        image_seq_len=4,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    monkeypatch.setattr(reference.text, "num2words", in_words)
    expected = reference.text.SmolVLMProcessor.replace_video_token(own, inputs, 0)
    times_s = [clip.time_s(number) for number in sampled]
    assert family.placeholder(family.layout(64, 64, 1), times_s, clip.duration_s) == expected


def test_idefics3_does_not_watch_clips(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "idefics3"}))
    assert load_family(ModelFolder(tmp_path / "model")).clips is None


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (8, "eight"),
        (13, "thirteen"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (105, "one hundred and five"),
        (768, "seven hundred and sixty-eight"),
        (1000, "one thousand"),
        (1001, "one thousand and one"),
        (1234, "one thousand, two hundred and thirty-four"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    assert in_words(number) == words


def test_frames_that_would_be_normalised_otherwise_than_pictures_are_refused(folder: Path, tmp_path: Path) -> None:
    """The encoder sees tiles, and cannot tell those of a clip."""
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    settings = json.loads((path / "preprocessor_config.json").read_text())
    (path / "video_preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    with pytest.raises(ServiceError, match="cannot tell a frame from a picture"):
        load_family(ModelFolder(path))
