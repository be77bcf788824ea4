"""Whole jobs with clips: frames as items, words with times, transformers' template, segments, limits."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clips import animation, clip
from pictures import encode, smooth
from tokenizers import Tokenizer

from preprocess.arena import ALIGNMENT, Arena
from preprocess.config import MediaLimits, PreprocessConfig
from preprocess.prepare import Preparer, pixel_bytes_per_clip
from preprocess.wire import (
    GenerationOptions,
    ImagePart,
    Job,
    Lease,
    MediaItem,
    Message,
    Prepared,
    Refused,
    Segmenting,
    TextPart,
    VideoPart,
)

Part = TextPart | ImagePart | VideoPart

CLIP = clip("mp4", 100)  # 4 s: frames 0, 33, 66 and 99 are looked at
PHOTO = encode(smooth(320, 240), "JPEG")
QUESTION = TextPart("What happens?")


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, looking at up to 8 frames."""
    path = tmp_path_factory.mktemp("clips") / "model"
    shutil.copytree(tiny_model, path)
    file = path / "preprocessor_config.json"
    sampling = {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 64}}
    file.write_text(json.dumps({**json.loads(file.read_text()), "video_sampling": sampling}))
    return path


@pytest.fixture(scope="module")
def preparer(folder: Path) -> Preparer:
    return Preparer(PreprocessConfig(str(folder)), None)


def job(*parts: Part, segmenting: Segmenting | None = None, lease: Lease = Lease()) -> Job:  # noqa: B008 (frozen)
    return Job("r1", [Message("user", list(parts))], GenerationOptions(), lease, 0.0, segmenting=segmenting)


def prepared(preparer: Preparer, *parts: Part, **options: Any) -> Prepared:
    answer = preparer.prepare(job(*parts, **options))
    assert isinstance(answer, Prepared), answer
    return answer


def refused(preparer: Preparer, *parts: Part, **options: Any) -> Refused:
    answer = preparer.prepare(job(*parts, **options))
    assert isinstance(answer, Refused), answer
    return answer


def ids_of(request: Any) -> list[int]:
    ids: list[int] = np.frombuffer(request.prompt_ids, "<i8").tolist()
    return ids


def text_of(folder: Path, request: Any) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text: str = tokenizer.decode(ids_of(request), skip_special_tokens=False)
    return text


FRAME = "<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>"


def test_a_clip_becomes_its_frames_with_their_times(folder: Path, preparer: Preparer) -> None:
    answer = prepared(preparer, VideoPart(CLIP), QUESTION)
    assert text_of(folder, answer.request) == (
        "<|im_start|>User: You are provided the following series of four frames from a 0:00:04 [H:MM:SS] video.\n"
        + "".join(f"\nFrame from 00:0{second}:{FRAME}" for second in range(4))
        + "\n\nWhat happens?<end_of_utterance>\nAssistant:"
    )
    [info] = answer.clips
    assert (info.width, info.height, info.duration_s, info.num_tokens) == (192, 96, 4.0, 16)
    assert info.frame_times_s == [0.0, 1.32, 2.64, 3.96]
    assert info.sha256 == hashlib.sha256(CLIP).hexdigest()
    assert (answer.images, answer.further, answer.segments) == ([], [], [])
    assert 0 < answer.decode_ms <= answer.preprocess_ms


def test_every_frame_is_an_item_in_its_own_place(preparer: Preparer) -> None:
    request = prepared(preparer, VideoPart(CLIP), QUESTION).request
    ids = ids_of(request)
    places = [position for position, token in enumerate(ids) if token == 3]
    spans = [span for item in request.media for span in item.spans]
    assert [position for start, length in spans for position in range(start, start + length)] == places
    assert len(request.media) == 4
    assert all(item.num_tokens == 4 and item.pixels.shape == (1, 32, 32, 3) for item in request.media)
    assert len({item.digest for item in request.media}) == 4


def test_ids_are_those_of_the_template_that_transformers_takes_for_clips(folder: Path, preparer: Preparer) -> None:
    """There `<video>` is replaced in the rendered text; the template is the reference's own."""
    from jinja2 import Environment

    reference = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    template = Environment().from_string(reference.DEFAULT_CHAT_TEMPLATE)
    for parts in [(VideoPart(CLIP), QUESTION), (QUESTION, VideoPart(CLIP))]:
        kinds = ["video" if isinstance(part, VideoPart) else "text" for part in parts]
        content = [{"type": kind, "text": QUESTION.text} for kind in kinds]
        rendered = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True)
        text = text_of(folder, prepared(preparer, *parts).request)
        before, after = rendered.split("<video>")
        assert text.startswith(before)
        assert text.endswith(after)


def test_clips_and_pictures_keep_their_order(folder: Path, preparer: Preparer) -> None:
    answer = prepared(preparer, ImagePart(PHOTO), VideoPart(CLIP, max_frames=2), TextPart(" and "), ImagePart(PHOTO))
    text = text_of(folder, answer.request)
    assert text.index(FRAME) < text.index("series of two frames") < text.index(" and ") < text.rindex(FRAME)
    media = answer.request.media
    assert len(media) == 4
    assert media[0].digest == media[3].digest
    assert media[0].spans < media[1].spans < media[2].spans < media[3].spans


def test_what_a_client_writes_stays_text(folder: Path, preparer: Preparer) -> None:
    answer = prepared(preparer, TextPart("<image> \U0010fffd \U0010fffc"), VideoPart(CLIP, max_frames=1), QUESTION)
    assert ids_of(answer.request).count(3) == 4
    assert "\U0010fffd \U0010fffc" in text_of(folder, answer.request)


def test_bytes_and_a_data_url_are_the_same(preparer: Preparer) -> None:
    url = "data:video/mp4;base64," + base64.b64encode(CLIP).decode()
    one, two = prepared(preparer, VideoPart(CLIP)), prepared(preparer, VideoPart(data_url=url))
    assert (one.request.media, one.clips) == (two.request.media, two.clips)


@pytest.mark.parametrize(
    ("part", "times"),
    [
        (VideoPart(CLIP, fps=2), [0, 0.56, 1.12, 1.68, 2.24, 2.8, 3.36, 3.96]),
        (VideoPart(CLIP, max_frames=2), [0, 3.96]),
        (VideoPart(CLIP, fps=0.1), [1.0]),  # one of many seconds: none near an end, as in the reference
        (VideoPart(animation("GIF", 6, 500)), [0, 1.0, 2.5]),
    ],
)
def test_how_many_frames(preparer: Preparer, part: VideoPart, times: list[float]) -> None:
    assert prepared(preparer, part).clips[0].frame_times_s == pytest.approx(times)


def test_the_same_frame_has_one_name_however_it_was_chosen(preparer: Preparer) -> None:
    """So the embeddings of frame 0 are found again; other frames and other files have other names."""
    names = [prepared(preparer, VideoPart(CLIP, max_frames=n)).request.media[0].digest for n in (3, 4)]
    assert names[0] == names[1]
    assert prepared(preparer, VideoPart(clip("mp4", 50))).request.media[0].digest != names[0]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(1 << 20) as arena:
        yield arena


def test_pixels_go_into_the_lease_and_are_the_same_inline(folder: Path, preparer: Preparer, arena: Arena) -> None:
    config = PreprocessConfig(str(folder))
    assert pixel_bytes_per_clip(config) == 8 * (32 * 32 * 3 + ALIGNMENT)
    inline = prepared(preparer, VideoPart(CLIP))
    for size, num_inline in [(pixel_bytes_per_clip(config), 0), (2 * 32 * 32 * 3, 2), (0, 4)]:
        shared = prepared(Preparer(config, arena), VideoPart(CLIP), lease=Lease(640, size))
        assert shared.arena_bytes <= size
        assert sum(bool(item.pixels.inline) for item in shared.request.media) == num_inline
        for one, two in zip(inline.request.media, shared.request.media, strict=True):
            assert (one.digest, one.spans) == (two.digest, two.spans)
            assert one.pixels.inline == (two.pixels.inline or bytes(arena.view(two.pixels.offset, 32 * 32 * 3)))


# ---- segments -------------------------------------------------------------------------------------------------------


def test_a_clip_in_segments_becomes_a_request_for_each(folder: Path, preparer: Preparer) -> None:
    data = clip("mp4", 250)
    answer = prepared(preparer, VideoPart(data), QUESTION, segmenting=Segmenting(4))
    assert answer.segments == [(0, 4), (4, 10)]  # two seconds alone would be less than half of one
    requests = [answer.request, *answer.further]
    assert [len(request.media) for request in requests] == [4, 6]
    assert "four frames from a 0:00:04" in text_of(folder, requests[0])
    assert "six frames from a 0:00:06" in text_of(folder, requests[1])
    assert "Frame from 00:00:" in text_of(folder, requests[1])  # a clip of its own
    alone = prepared(preparer, VideoPart(clip("mp4", 250)), QUESTION)
    assert answer.clips[0].duration_s == alone.clips[0].duration_s == 10
    assert answer.clips[0].frame_times_s == sorted(answer.clips[0].frame_times_s)


def test_a_short_segment_has_two_frames(preparer: Preparer) -> None:
    """One second has one frame by the model's own rate."""
    for fps, num_frames in [(0, 2), (1, 1), (4, 4)]:
        answer = prepared(preparer, VideoPart(CLIP, fps=fps), segmenting=Segmenting(1))
        assert [len(request.media) for request in (answer.request, *answer.further)] == [num_frames] * 4


def test_a_short_clip_is_one_segment(preparer: Preparer) -> None:
    answer = prepared(preparer, VideoPart(CLIP), QUESTION, segmenting=Segmenting())
    assert (answer.segments, answer.further) == ([(0, 4)], [])
    assert answer.request.media == prepared(preparer, VideoPart(CLIP), QUESTION).request.media


def test_a_still_stretch_shares_its_frame(preparer: Preparer) -> None:
    slides = clip("mkv", 2, times_ms=[0, 15_000])
    answer = prepared(preparer, VideoPart(slides), segmenting=Segmenting(5))
    frames: list[list[MediaItem]] = [request.media for request in (answer.request, *answer.further)]
    assert [len(media) for media in frames] == [1, 1, 2]
    assert frames[0][0].digest == frames[1][0].digest == frames[2][0].digest != frames[2][1].digest


def test_long_clips_get_longer_segments(preparer: Preparer) -> None:
    from fractions import Fraction

    long = clip("mp4", 1800, rate=Fraction(1, 4), size=(96, 48), key_every=30)  # two hours
    answer = prepared(preparer, VideoPart(long), segmenting=Segmenting())
    assert len(answer.segments) == 64
    assert (answer.segments[0], answer.segments[-1][1]) == ((0, 112.5), 7200)
    assert sum(len(request.media) for request in (answer.request, *answer.further)) <= 256
    for seconds in (4, 0.0001, 1e-300):
        error = refused(preparer, VideoPart(long), segmenting=Segmenting(seconds))
        assert (error.code, error.param) == ("too_many_segments", "segment_s")
        assert "113 s or more" in error.message


def test_segments_are_for_one_clip(preparer: Preparer) -> None:
    for parts in [(QUESTION,), (ImagePart(PHOTO),), (VideoPart(CLIP), VideoPart(CLIP))]:
        assert refused(preparer, *parts, segmenting=Segmenting()).code == "invalid_value"


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_refusals_name_the_field(preparer: Preparer) -> None:
    error = refused(preparer, QUESTION, VideoPart(PHOTO))
    assert (error.status, error.code, error.param) == (400, "video_format_unsupported", "messages[0].content[1]")


def test_a_clip_in_the_place_of_a_picture_is_called_by_its_name(preparer: Preparer) -> None:
    message = refused(preparer, ImagePart(CLIP)).message
    assert message.startswith("This is an MP4 or QuickTime video, not a picture that can be read; send JPEG")
    assert "or this one as a clip (video_url" in message


def test_a_family_without_clips(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "idefics3"}))
    error = refused(Preparer(PreprocessConfig(str(tmp_path / "model")), None), VideoPart(CLIP))
    assert (error.status, error.code) == (400, "video_not_supported")


@pytest.mark.parametrize(
    ("limits", "status", "code"),
    [
        (MediaLimits(max_video_bytes=1000), 413, "video_too_large"),
        (MediaLimits(max_video_s=3), 413, "video_too_long"),
        (MediaLimits(max_video_pixels=1000), 400, "video_too_large"),
    ],
)
def test_limits(folder: Path, limits: MediaLimits, status: int, code: str) -> None:
    limited = Preparer(PreprocessConfig(str(folder), limits), None)
    url = "data:video/mp4;base64," + base64.b64encode(CLIP).decode()
    for part in (VideoPart(CLIP), VideoPart(data_url=url)):
        error = refused(limited, part)
        assert (error.status, error.code) == (status, code)
        assert "clip" in error.message or "frames" in error.message


def test_a_limit_on_frames_refuses_what_a_client_asks_for_and_bounds_what_the_model_would_take(folder: Path) -> None:
    limited = Preparer(PreprocessConfig(str(folder), MediaLimits(max_video_frames=3)), None)
    assert refused(limited, VideoPart(CLIP, max_frames=4)).code == "too_many_frames"
    [info] = prepared(limited, VideoPart(CLIP)).clips
    assert len(info.frame_times_s) == 3


def test_frames_of_all_clips_count_together(folder: Path) -> None:
    limited = Preparer(PreprocessConfig(str(folder), MediaLimits(max_video_frames=7)), None)
    assert refused(limited, VideoPart(CLIP), VideoPart(CLIP)).code == "too_many_frames"
    prepared(limited, VideoPart(CLIP), VideoPart(CLIP, max_frames=3))
