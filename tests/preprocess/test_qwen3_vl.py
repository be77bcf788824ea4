"""Qwen3-VL's clips and positions equal transformers' own. Pixels and prompts of whole clips: `test_clip_goldens`."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import encode, smooth
from tiny_qwen3_vl import tiny_qwen3_vl
from tokenizers import Tokenizer

import preprocess.media
from preprocess.config import MediaLimits, PreprocessConfig
from preprocess.errors import ClientError, ServiceError
from preprocess.families.qwen3_vl import Qwen3VLClips
from preprocess.model_folder import ModelFolder
from preprocess.prepare import Preparer
from preprocess.timeline import Timeline
from preprocess.wire import GenerationOptions, ImagePart, Job, Lease, Message, Prepared, TextPart, VideoPart
from tests.goldens.coded_clips import CLIPS
from tests.preprocess.test_clip_goldens import Played

RECORD: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "goldens" / "video_processors.json").read_text(encoding="utf-8")
)
PUBLISHED: Final[dict[str, Any]] = {
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
"""As in the folders of Qwen3-VL."""


def clips_of(folder: Path, **settings: Any) -> Qwen3VLClips:
    """The way with clips of a folder with these settings of its video processor."""
    config = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return Qwen3VLClips(ModelFolder(folder), 7)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLClips:
    return clips_of(tmp_path_factory.mktemp("published"), **PUBLISHED)


def steady(num_frames: int, fps: Fraction) -> Timeline:
    """A clip of a steady rate."""
    return Timeline.of(np.arange(num_frames) * 512, 512, 1 / (fps * 512))


def test_default_sizes_are_those_of_the_reference(tmp_path: Path) -> None:
    clips = clips_of(tmp_path)
    for (num_frames, height, width), grid in zip(
        RECORD["sizes"], RECORD["families"]["qwen3_vl"]["default_grids"], strict=True
    ):
        layout = clips.layout(width, height, num_frames)
        assert [-(-num_frames // 2), layout.tile_height // 16, layout.tile_width // 16] == grid
        assert layout.tokens_per_tile == grid[1] * grid[2] // 4
        assert layout.token_columns == grid[2] // 2


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    num_frames=st.integers(2, 900),
)
def test_sizes_equal_the_reference(published: Qwen3VLClips, width: int, height: int, num_frames: int) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    try:
        expected = smart_resize(num_frames, height, width, 2, 32, 4096, 25165824)
    except ValueError:
        with pytest.raises(ClientError, match="more than 200 times"):
            published.layout(width, height, num_frames)
        return
    layout = published.layout(width, height, num_frames)
    assert (layout.tile_height, layout.tile_width) == expected
    assert layout.shape == (2, *expected, 3)


@given(num_frames=st.integers(1, 3000), fps=st.sampled_from([Fraction(1, 2), Fraction(10), Fraction(24000, 1001)]))
def test_frames_and_times_equal_the_reference(published: Qwen3VLClips, num_frames: int, fps: Fraction) -> None:
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    timeline = steady(num_frames, fps)
    metadata: Any = SimpleNamespace(total_num_frames=num_frames, fps=float(timeline.rate))
    processor: Any = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    expected = Qwen3VLVideoProcessor.sample_frames(processor, metadata).tolist()
    frames = published.sample(timeline, 0, 0)
    assert frames == expected
    times = Qwen3VLProcessor._calculate_timestamps(processor, list(expected), float(timeline.rate), 2)
    placeholder = published.placeholder(
        published.layout(320, 240, len(frames)), [timeline.time_s(frame) for frame in frames], timeline.duration_s
    )
    told = [float(part.partition(" seconds>")[0].rpartition("<")[2]) for part in placeholder.split(" seconds>")[:-1]]
    assert told == pytest.approx(times, abs=0.0501)  # rounded to a tenth, where halves depend on the last bit
    assert published.item_times([timeline.time_s(frame) for frame in frames], timeline.duration_s) == [0] * len(times)


def test_a_client_may_ask_for_fewer_frames_or_another_rate(published: Qwen3VLClips) -> None:
    timeline = steady(100, Fraction(10))
    assert len(published.sample(timeline, 0, 0)) == 20
    assert len(published.sample(timeline, 1, 0)) == 10
    assert len(published.sample(timeline, 0, 3)) == 3
    assert published.sample(timeline, 5, 1) == [0]


def test_a_clip_shares_its_pixels_among_its_frames(published: Qwen3VLClips) -> None:
    for num_frames in (4, 100, 768):
        layout = published.layout(1920, 1080, num_frames)
        assert num_frames * layout.tile_height * layout.tile_width <= 25165824
    capped = published.layout(1920, 1080, 768).tokens_per_tile
    assert published.layout(1920, 1080, 4).tokens_per_tile == 60 * 34 > capped


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"patch_size": 14}, "patch_size 14"), ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "ascending")],
)
def test_folders_that_contradict_themselves_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ServiceError, match=words):
        clips_of(tmp_path, **settings)


# ---- positions -------------------------------------------------------------------------------------------------------


def _expanded(runs: list[list[int]]) -> list[int]:
    return [first + step for first, length in runs for step in range(length)]


@pytest.mark.parametrize("recorded", RECORD["families"]["qwen3_vl"]["positions"], ids=lambda one: str(one["parts"]))
def test_positions_equal_the_reference(
    recorded: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded grids are what our sizes give too, since the settings are the same."""
    settings = next(iter(RECORD["families"]["qwen3_vl"]["settings"].values()))
    image = {"patch_size": 16, "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64}}
    folder = tiny_qwen3_vl(
        tmp_path, vision={"patch_size": 16}, text={"max_position_embeddings": 4096}, image=image, video=settings
    )
    preparer = Preparer(PreprocessConfig(str(folder), limits=MediaLimits(max_video_frames=768)), None)
    waiting = iter([CLIPS[name] for name in recorded["clips"]])
    monkeypatch.setattr(preprocess.media, "open_clip", lambda *_: Played(next(waiting)))
    picture = ImagePart(encode(smooth(CLIPS["four seconds"].width, CLIPS["four seconds"].height), "PNG"))
    kinds: dict[str, ImagePart | VideoPart] = {"I": picture, "V": VideoPart(b"x")}
    parts: list[TextPart | ImagePart | VideoPart] = []
    for character in recorded["parts"]:
        if character in kinds:
            parts.append(kinds[character])
        elif parts and isinstance(parts[-1], TextPart):
            parts[-1] = TextPart(parts[-1].text + character)
        else:
            parts.append(TextPart(character))
    answer = preparer.prepare(Job("r", [Message("user", parts)], GenerationOptions(), Lease(), 0.0))
    assert isinstance(answer, Prepared), answer
    given = np.frombuffer(answer.request.positions, "<i4").reshape(3, -1)
    length = answer.request.num_prompt_tokens
    expected = np.array([_expanded(axis) for axis in recorded["positions"]])
    assert expected.shape[1] == length
    assert np.array_equal(given, expected[:, : given.shape[1]])
    rest = np.arange(length - given.shape[1]) + given.max() + 1
    assert np.array_equal(np.broadcast_to(rest, (3, len(rest))), expected[:, given.shape[1] :])
    assert given.max() + 1 - given.shape[1] == recorded["delta"]


def test_every_item_stands_in_a_frame_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_qwen3_vl(tmp_path)
    preparer = Preparer(PreprocessConfig(str(folder)), None)
    monkeypatch.setattr(preprocess.media, "open_clip", lambda *_: Played(CLIPS["four seconds"]))
    question = Message("user", [VideoPart(b"x", max_frames=4), TextPart("?")])
    answer = preparer.prepare(Job("r", [question], GenerationOptions(), Lease(), 0.0))
    assert isinstance(answer, Prepared), answer
    ids = np.frombuffer(answer.request.prompt_ids, "<i8")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    start, end = (tokenizer.token_to_id(f"<|vision_{name}|>") for name in ("start", "end"))
    for item in answer.request.media:
        ((first, length),) = item.spans
        assert ids[first - 1] == start
        assert ids[first + length] == end
        assert tokenizer.decode(ids[:first].tolist(), skip_special_tokens=False).endswith(" seconds><|vision_start|>")
    assert (ids == start).sum() == (ids == end).sum() == len(answer.request.media) + 1
