"""Qwen-VL pictures, prompts and positions equal transformers' own; clips are compared in `test_clip_goldens`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from clips import clip, number_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode, smooth
from PIL import Image
from tiny_qwen2_vl import tiny_qwen2_vl
from tiny_qwen3_vl import tiny_qwen3_vl
from tokenizers import Tokenizer

from preprocess.config import PreprocessConfig
from preprocess.errors import ClientError, ServiceError
from preprocess.families import Family, load_family
from preprocess.families.clips import ClipFamily
from preprocess.model_folder import ModelFolder
from preprocess.prepare import Preparer
from preprocess.timeline import Timeline
from preprocess.wire import (
    EngineRequest,
    GenerationOptions,
    ImagePart,
    Job,
    Lease,
    Message,
    Prepared,
    Refused,
    Segmenting,
    TextPart,
    VideoPart,
)

Part = TextPart | ImagePart | VideoPart

SIZES = [
    (64, 64),
    (28, 28),
    (33, 31),
    (300, 200),
    (200, 300),
    (640, 480),
    (97, 211),
    (1, 1),
    (1, 200),
    (200, 1),
    (3, 500),
]

PUBLISHED = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
"""As in the folders of Qwen2-VL and Qwen2.5-VL."""


def config_folder(path: Path, image: dict[str, Any], video: dict[str, Any] | None = None, **config: Any) -> ModelFolder:
    """A model folder of configs only."""
    path.mkdir(parents=True, exist_ok=True)
    whole = {"model_type": "qwen2_vl", "image_token_id": 6, "video_token_id": 7, **config}
    (path / "config.json").write_text(json.dumps(whole))
    (path / "preprocessor_config.json").write_text(json.dumps(image))
    if video is not None:
        (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return ModelFolder(path)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny model."""
    return tiny_qwen2_vl(tmp_path_factory.mktemp("tiny"), model_type=request.param)


@pytest.fixture(scope="module")
def preparer(folder: Path) -> Preparer:
    return Preparer(PreprocessConfig(str(folder)), None)


def prepare(preparer: Preparer, *parts: Part, **options: Any) -> Prepared | Refused:
    return preparer.prepare(Job("r", [Message("user", list(parts))], GenerationOptions(**options), Lease(), 0.0))


def prepared(preparer: Preparer, *parts: Part) -> Prepared:
    answer = prepare(preparer, *parts)
    assert isinstance(answer, Prepared), answer
    return answer


def ids_of(answer: Prepared) -> list[int]:
    ids: list[int] = np.frombuffer(answer.request.prompt_ids, "<i8").tolist()
    return ids


def positions_of(answer: Prepared) -> npt.NDArray[np.int64]:
    """(3, prompt length), as the engine goes on from those that are given."""
    given = np.frombuffer(answer.request.positions, "<i4").reshape(3, -1).astype(np.int64)
    rest = np.arange(answer.request.num_prompt_tokens - given.shape[1]) + (given.max() + 1 if given.size else 0)
    return np.concatenate([given, np.broadcast_to(rest, (3, len(rest)))], axis=1)


# ---- sizes and pixels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (PUBLISHED | {"max_pixels": 90_000}, {}),
        ({"size": {"shortest_edge": 5000, "longest_edge": 40_000}}, {}),
        (
            {"size": {"min_pixels": 5000, "max_pixels": 40_000}},
            {"size": {"shortest_edge": 5000, "longest_edge": 40_000}},
        ),
        ({"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 4000, "max_pixels": 50_000}, {}),
        ({"patch_size": 16, "merge_size": 1, "size": {"shortest_edge": 512, "longest_edge": 9000}}, {}),
        ({"resample": 1}, {}),
        ({"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}, {}),
        ({}, {}),
    ],
)
def test_pixels_and_grids_equal_the_reference(tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, merge = ours.get("patch_size", 14), ours.get("merge_size", 2)
    family = load_family(
        config_folder(tmp_path, ours, {}, vision_config={"patch_size": patch, "spatial_merge_size": merge})
    )
    assert isinstance(Qwen2VLImageProcessorPil.size, dict)
    Qwen2VLImageProcessorPil.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # instances write to it
    reference = Qwen2VLImageProcessorPil(**json.loads(json.dumps(ours | theirs)))
    how = family.normalisation
    for width, height in SIZES:
        if max(width, height) > 20 * min(width, height) and merge == 1:
            continue
        image = smooth(width, height)
        layout = family.layout(width, height, "auto")
        out = np.zeros(layout.shape, np.uint8)
        family.fill(image, layout, out)
        expected = reference(images=[image], return_tensors="np")
        _, _, rows, columns = (1, *expected["image_grid_thw"][0])
        assert layout.shape == (1, rows * patch, columns * patch, 3)
        assert (layout.num_tokens, layout.token_columns) == (rows * columns // merge**2, columns // merge)
        normal = (out.transpose(0, 3, 1, 2) * how.scale - np.reshape(how.mean, (3, 1, 1))) / np.reshape(
            how.std, (3, 1, 1)
        )
        cut = normal.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch).transpose(
            1, 4, 2, 5, 0, 3, 6
        )
        twice = np.repeat(cut[:, :, :, :, :, None], 2, axis=5).reshape(rows * columns, -1)
        np.testing.assert_allclose(twice, expected["pixel_values"], atol=2e-6)  # a step of 8 bits is 0.014


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int], int], Family]:
    """A family by fewest and most pixels and side of a vision token."""

    @cache
    def make(bounds: tuple[int, int], side: int) -> Family:
        image = {"min_pixels": bounds[0], "max_pixels": bounds[1]}
        vision = {"patch_size": side // 2}
        return load_family(config_folder(tmp_path_factory.mktemp("sizes"), image, {}, vision_config=vision))

    return make


@settings(max_examples=400, deadline=None)
@given(
    width=st.integers(1, 4000),
    height=st.integers(1, 4000),
    bounds=st.sampled_from(
        [(3136, 12845056), (3136, 1003520), (65536, 16777216), (1, 800), (4000, 4100), (10**6, 10**6)]
    ),
    side=st.sampled_from([28, 32]),
)
def test_sizes_equal_the_reference_and_are_bounded(
    family: Callable[[tuple[int, int], int], Family], width: int, height: int, bounds: tuple[int, int], side: int
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    sized = family(bounds, side)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ClientError, match="200 times"):
            sized.layout(width, height, "auto")
        return
    layout = sized.layout(width, height, "auto")
    (size,) = layout.steps
    assert size[::-1] == smart_resize(height, width, side, *bounds)
    assert layout.num_bytes <= sized.max_pixel_bytes
    assert sized.layout(width, height, "high") == layout
    low = sized.layout(width, height, "low")
    assert low.num_tokens <= layout.num_tokens


def test_low_detail_is_256_tokens_at_most(tmp_path: Path) -> None:
    family = load_family(config_folder(tmp_path, PUBLISHED))
    assert family.layout(4000, 3000, "auto").num_tokens == 15_301
    assert 200 < family.layout(4000, 3000, "low").num_tokens <= 256
    assert family.layout(280, 280, "low") == family.layout(280, 280, "auto")


@pytest.mark.parametrize(
    ("image", "config", "words"),
    [
        ({"do_resize": False}, {}, "do_resize"),
        ({"patch_size": 16}, {}, "patch_size 16"),
        ({"merge_size": 4}, {}, "merge_size 4"),
        ({"temporal_patch_size": 1}, {}, "temporal_patch_size 1"),
        ({"min_pixels": 0}, {}, "0 to"),
        ({"max_pixels": 100}, {}, "3136 to 100"),
        ({}, {"image_token_id": "<image>"}, "image_token_id"),
        ({}, {"video_token_id": -1}, "video_token_id"),
        ({"do_resize": None}, {}, "do_resize"),
        ({"size": "large"}, {}, "size is 'large', expected an object"),
        ({"resample": 77}, {}, "resample is 77"),
        ({"image_mean": [0.5]}, {}, "image_mean is .*three numbers"),
        ({"image_std": 0.0}, {}, "image_std is 0.0, expected numbers above 0"),
        ({"rescale_factor": "1/255"}, {}, "rescale_factor is '1/255'"),
        ({"fps": "two"}, {}, "fps is 'two'"),
        ({}, {"vision_config": [1]}, "vision_config is .*an object"),
        ({}, {"vision_config": {"patch_size": 0}}, "patch_size is 0"),
        ({}, {"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 0}}, "tokens_per_second"),
    ],
)
def test_folders_that_contradict_themselves_are_refused(
    tmp_path: Path, image: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ServiceError, match=words):
        load_family(config_folder(tmp_path, image, **config))


# ---- prompts ---------------------------------------------------------------------------------------------------------

PHOTO = encode(smooth(90, 60), "PNG")
TALL = encode(smooth(40, 100), "PNG")
MP4 = clip("mp4", 60)
ASKED = TextPart("What is it?")


def test_prompts_are_those_of_the_reference(folder: Path, preparer: Preparer) -> None:
    """The template's, with every placeholder as often as the processor would write it."""
    from jinja2 import Environment

    shown: list[list[Part]] = [
        [ImagePart(PHOTO), ASKED],
        [ASKED, ImagePart(TALL), TextPart("and"), ImagePart(PHOTO)],
        [VideoPart(MP4, max_frames=5), ASKED],
        [ImagePart(PHOTO), VideoPart(MP4, max_frames=4), ASKED],
    ]
    template = Environment().from_string((folder / "chat_template.jinja").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for parts in shown:
        kinds = {ImagePart: "image", VideoPart: "video", TextPart: "text"}
        content = [{"type": kinds[type(part)], "text": getattr(part, "text", "")} for part in parts]
        rendered = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
        answer = prepared(preparer, *parts)
        counts = iter([info.num_tokens for info in answer.images])
        clips = iter([info.num_tokens for info in answer.clips])
        pieces = rendered.split("<|image_pad|>")
        text = pieces[0] + "".join("<|image_pad|>" * next(counts) + piece for piece in pieces[1:])
        pieces = text.split("<|video_pad|>")
        text = pieces[0] + "".join("<|video_pad|>" * next(clips) + piece for piece in pieces[1:])
        assert ids_of(answer) == tokenizer.encode(text, add_special_tokens=False).ids


def test_what_a_client_spells_stays_text(folder: Path, preparer: Preparer) -> None:
    spelled = "<|vision_start|><|image_pad|><|vision_end|> <|video_pad|><|vision_pad|><|im_end|>"
    ids = ids_of(prepared(preparer, TextPart(spelled), ImagePart(PHOTO), VideoPart(MP4, max_frames=2)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    count = {
        name: ids.count(tokenizer.token_to_id(name)) for name in ("<|vision_start|>", "<|vision_pad|>", "<|im_end|>")
    }
    assert count == {"<|vision_start|>": 2, "<|vision_pad|>": 0, "<|im_end|>": 2}
    assert spelled in tokenizer.decode(ids, skip_special_tokens=False)


def test_a_picture_far_too_narrow_is_refused(preparer: Preparer) -> None:
    refused = prepare(preparer, ImagePart(encode(smooth(201, 1), "PNG")))
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code, refused.param) == (400, "image_too_narrow", "messages[0].content[0]")
    for size in ((200, 1), (1, 200), (1, 1)):
        assert prepared(preparer, ImagePart(encode(smooth(*size), "PNG"))).images[0].num_tokens


# ---- positions -------------------------------------------------------------------------------------------------------


def reference_positions(folder: Path, answer: Prepared, seconds_per_item: list[float]) -> npt.NDArray[np.int64]:
    """`get_rope_index` of a prompt's own pictures and clips."""
    config = json.loads((folder / "config.json").read_text())
    name = config["model_type"]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    model = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel"}[name]
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=config["vision_config"].get("tokens_per_second"))
    bare = object.__new__(getattr(module, model))
    bare.__dict__["config"] = SimpleNamespace(vision_config=vision)
    ids = torch.tensor([ids_of(answer)])
    kinds = torch.where(ids == config["image_token_id"], 1, torch.where(ids == config["video_token_id"], 2, 0))
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    last = 0
    for item in answer.request.media:
        frames, height, width, _ = item.pixels.shape
        start, length = item.spans[0]
        if frames > 1 and start == last:
            grids[2][-1][0] += 1
        else:
            grids[frames].append([1, height // 8, width // 8])
        last = start + length
    images, videos = (torch.tensor(grid) if grid else None for grid in grids.values())
    positions, delta = bare.get_rope_index(
        ids, kinds, images, videos, second_per_grid_ts=torch.tensor(seconds_per_item)
    )
    assert int(delta) == int(positions.max()) + 1 - ids.shape[1]
    found: npt.NDArray[np.int64] = positions[:, 0].numpy()
    return found


@pytest.mark.parametrize(
    ("parts", "seconds_per_item"),
    [
        ([ASKED], []),
        ([ImagePart(PHOTO), ASKED], []),
        ([ASKED, ImagePart(TALL)], []),
        ([ImagePart(TALL), TextPart("and"), ImagePart(PHOTO), ImagePart(PHOTO), ASKED], []),
        ([VideoPart(MP4, max_frames=4), ASKED], [1.2]),
        ([ImagePart(TALL), VideoPart(MP4, max_frames=2), ImagePart(PHOTO), ASKED], [2.4]),
        ([VideoPart(MP4, max_frames=2), TextPart("then"), VideoPart(MP4, max_frames=2), ASKED], [2.4, 2.4]),
    ],
)
def test_positions_equal_the_reference(
    folder: Path, preparer: Preparer, parts: list[Part], seconds_per_item: list[float]
) -> None:
    """Where a clip's times stay within its rows and columns and an item takes whole seconds, as `mrope` explains."""
    answer = prepared(preparer, *parts)
    if not answer.request.media:
        assert answer.request.positions == b""
        return
    positions = positions_of(answer)
    if seconds_per_item == [1.2]:  # transformers 5.17 cuts seconds off before it multiplies them
        clip_times = {"qwen2_vl": [0, 1], "qwen2_5_vl": [0, 2]}[ModelFolder(folder).model_type]
        times = [int(positions[0, item.spans[0][0]] - positions[1, item.spans[0][0]]) for item in answer.request.media]
        assert times == clip_times
    assert np.array_equal(positions, reference_positions(folder, answer, seconds_per_item))


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ClipFamily]:
    """Clips of Qwen2.5-VL with so many positions a second."""

    def make(rate: int) -> ClipFamily:
        vision = {"tokens_per_second": rate}
        folder = config_folder(tmp_path_factory.mktemp("timed"), {}, {}, model_type="qwen2_5_vl", vision_config=vision)
        clips = load_family(folder).clips
        assert clips is not None
        return clips

    return make


@pytest.mark.parametrize(("fps", "expected"), [(4, [0, 1, 2, 3]), (2, [0, 2, 4, 6]), (1, [0, 4, 8, 12])])
def test_positions_of_a_clip_follow_its_seconds(
    timed: Callable[[int], ClipFamily], fps: int, expected: list[int]
) -> None:
    times_s = [Fraction(index, fps) for index in range(8)]
    assert timed(2).item_times(times_s, Fraction(8, fps)) == expected


def test_a_frame_that_is_missing_moves_no_other(timed: Callable[[int], ClipFamily]) -> None:
    times_s = [Fraction(second) for second in (0, 1, 6, 7)]  # of eight, four came out of a damaged file
    assert timed(2).item_times(times_s, Fraction(8)) == [0, 12]


@settings(max_examples=200, deadline=None)
@given(num_frames=st.integers(1, 3000), fps=st.sampled_from([0.1, 0.5, 1, 2, 7.3]), most=st.integers(1, 300))
def test_sampling_is_even_and_bounded(
    family: Callable[[tuple[int, int], int], Family], num_frames: int, fps: float, most: int
) -> None:
    clips = family((3136, 12845056), 28).clips
    assert clips is not None
    timeline = Timeline.of(np.arange(num_frames) * 40, 40, Fraction(1, 1000))
    frames = clips.sample(timeline, fps, most)
    assert frames[0] == 0
    assert sorted(set(frames)) == frames
    assert frames[-1] < num_frames
    assert len(frames) <= most
    assert len(frames) == 1 or len(frames) % 2 == 0
    by_time = min(max(num_frames / 25 * fps, 4), num_frames, most)
    assert len(frames) == max(int(by_time) // 2 * 2, 1)
    if len(frames) > 1:
        expected = torch.arange(0, num_frames, num_frames / len(frames)).int().tolist()
        assert frames == expected[: len(frames)]


# ---- clips -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    """A model whose frames are large enough to read their numbers."""
    video = {"size": {"shortest_edge": 16 * 16, "longest_edge": 192 * 96}}
    folder = tiny_qwen2_vl(tmp_path_factory.mktemp("sharp"), model_type="qwen2_5_vl", video=video)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 32768
    (folder / "config.json").write_text(json.dumps(config))
    return Preparer(PreprocessConfig(str(folder)), None)


def numbers_of(request: EngineRequest) -> list[list[int]]:
    """The numbers that the frames of each item show."""
    items = [np.frombuffer(item.pixels.inline, np.uint8).reshape(item.pixels.shape) for item in request.media]
    return [[number_of(Image.fromarray(frame)) for frame in item] for item in items]


@pytest.mark.parametrize(
    ("num_frames", "most", "expected"),
    [
        (50, 4, [[0, 12], [25, 37]]),
        (50, 5, [[0, 12], [25, 37]]),  # an even number
        (50, 1, [[0, 0]]),
        (3, 8, [[0, 1]]),
        (1, 8, [[0, 0]]),
    ],
)
def test_frames_go_in_pairs(sharp: Preparer, num_frames: int, most: int, expected: list[list[int]]) -> None:
    answer = prepared(sharp, VideoPart(clip("mp4", num_frames), max_frames=most), ASKED)
    assert numbers_of(answer.request) == expected
    assert {item.pixels.shape for item in answer.request.media} == {(2, 96, 192, 3)}
    assert len({item.digest for item in answer.request.media}) == len(expected)
    assert answer.clips[0].num_tokens == 72 * len(expected)


def test_a_clip_of_no_steady_rate_is_looked_at_by_time(sharp: Preparer) -> None:
    """Ten frames in the first half second, then one a second: the slow part is seen for as long as it takes."""
    times_ms = [*range(0, 500, 50), *range(500, 10_500, 1000)]
    answer = prepared(sharp, VideoPart(clip("mp4", len(times_ms), times_ms=times_ms), max_frames=6), ASKED)
    shown = [times_ms[number] for item in numbers_of(answer.request) for number in item]
    duration_ms = answer.clips[0].duration_s * 1000
    late = 1000 + duration_ms / len(times_ms)  # a frame is shown for a second; places are whole frames of a steady rate
    assert len(shown) == 6
    assert all(duration_ms * k / 6 - late < time <= duration_ms * k / 6 + 1 for k, time in enumerate(shown))


def test_segments_are_clips_of_their_own(sharp: Preparer) -> None:
    message = Message("user", [VideoPart(clip("mp4", 100), max_frames=2), ASKED])
    job = Job("r", [message], GenerationOptions(), Lease(), 0.0, segmenting=Segmenting(2.0))
    answer = sharp.prepare(job)
    assert isinstance(answer, Prepared), answer
    requests = [answer.request, *answer.further]
    assert [numbers_of(request) for request in requests] == [[[0, 25]], [[50, 75]]]
    assert len({request.prompt_ids for request in requests}) == 1
    assert len({request.positions for request in requests}) == 1
    assert len({request.media[0].digest for request in requests}) == 2


def test_a_long_clip_is_bounded_in_frames_and_pixels(tmp_path: Path) -> None:
    """However long: no more frames than a request may have, and all of them within the context."""
    folder = config_folder(tmp_path, PUBLISHED, text_config={"max_position_embeddings": 32768})
    clips = load_family(folder).clips
    assert clips is not None
    hours = Timeline.of(np.arange(500_000) * 40, 40, Fraction(1, 1000))
    assert len(clips.sample(hours, 0, 0)) == 768
    for num_frames in (2, 16, 64, 256, 768):
        tokens = clips.layout(1920, 1080, num_frames).num_tokens * num_frames // 2
        assert tokens <= 0.9 * 32768
    assert clips.layout(1920, 1080, 2).steps == ((1932, 1092),)  # as a picture of that size
    with pytest.raises(ClientError, match="200 times"):
        clips.layout(1000, 4, 8)


@pytest.mark.parametrize("make", [partial(tiny_qwen2_vl, model_type="qwen2_5_vl"), tiny_qwen3_vl])
def test_a_clip_fits_the_context_that_the_engine_has(make: Callable[..., Path], tmp_path: Path) -> None:
    """Its frames get smaller, not its length; the client hears of it only where they are as small as they may be."""
    large = {"size": {"shortest_edge": 16 * 16, "longest_edge": 24 * 192 * 96}}
    preparer = Preparer(PreprocessConfig(str(make(tmp_path, video=large))), None)
    shown = VideoPart(clip("mp4", 100), fps=10, max_frames=24)
    whole = prepared(preparer, shown, ASKED)
    preparer.limit_context(300)
    smaller = prepared(preparer, shown, ASKED)
    assert smaller.request.num_prompt_tokens < 300 <= whole.request.num_prompt_tokens
    assert smaller.clips[0].frame_times_s == whole.clips[0].frame_times_s
    preparer.limit_context(35)
    refused = prepare(preparer, shown, ASKED)
    assert isinstance(refused, Refused)
    assert refused.code == "context_length_exceeded"
