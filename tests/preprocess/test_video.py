"""Clips of every kind: the right frames at the right times, or a refusal in plain words."""

from __future__ import annotations

import gc
import io
import random
import re
import struct
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import av
import clips
import numpy as np
import pytest
from clips import animation, clip, number_of, numbered, sound_only, with_display_matrix
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode
from PIL import ExifTags, Image, ImageOps

from preprocess import video_stream
from preprocess.config import MediaLimits
from preprocess.display_matrix import upright
from preprocess.errors import ClientError
from preprocess.video import open_clip

LIMITS = MediaLimits()


def shown(data: bytes, wanted: Sequence[int], limits: MediaLimits = LIMITS) -> list[tuple[int, int]]:
    """(Frame that came, number that it shows)."""
    return [(number, number_of(image)) for number, image in open_clip(data, limits).frames(wanted)]


def assert_right(data: bytes, wanted: Sequence[int]) -> None:
    assert shown(data, wanted) == [(number, number) for number in wanted]


def refusal(data: bytes, limits: MediaLimits = LIMITS) -> ClientError:
    with pytest.raises(ClientError) as caught:
        list(open_clip(data, limits).frames([0]))
    assert caught.value.status in {400, 413}
    return caught.value


# ---- kinds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("mp4", "libx264"),
        ("mp4", "mpeg4"),
        ("mov", "mpeg4"),
        ("mkv", "libx264"),
        ("mkv", "mpeg2video"),
        ("webm", "libvpx-vp9"),
        ("webm", "libvpx"),
        ("avi", "mpeg4"),
        ("avi", "libx264"),  # AVI has no time stamps, and these frames are not in order
        ("avi", "rawvideo"),
    ],
)
def test_right_frames_of_every_kind(kind: str, codec: str) -> None:
    data = clip(kind, 40, codec=codec)
    found = open_clip(data, LIMITS).timeline
    assert (found.num_frames, found.duration_s, found.rate) == (40, Fraction(8, 5), 25)
    assert_right(data, [0, 1, 11, 12, 13, 25, 39])


@pytest.mark.parametrize("codec", ["libsvtav1", "libx265"])
def test_newer_codecs(codec: str) -> None:
    quiet = {"svtav1-params": "lp=1:enable-overlays=0"} if codec == "libsvtav1" else {"x265-params": "log-level=none"}
    assert_right(clip("mp4", 12, codec=codec, encoder=quiet), [0, 5, 11])


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animations(format: str) -> None:
    data = animation(format, 6, [100, 200, 300, 400, 500, 600])
    found = open_clip(data, LIMITS).timeline
    assert [float(found.time_s(number)) for number in range(6)] == pytest.approx([0, 0.1, 0.3, 0.6, 1.0, 1.5])
    assert found.duration_s == Fraction(21, 10)
    assert_right(data, [0, 3, 5])
    kept = [image for _, image in open_clip(data, LIMITS).frames(range(6))]
    assert [number_of(image) for image in kept] == list(range(6))  # a frame stays what it was when the next one comes


def test_an_animation_in_no_hurry_runs_as_in_a_browser() -> None:
    assert open_clip(animation("GIF", 5, 0), LIMITS).timeline.duration_s == Fraction(1, 2)


@pytest.mark.parametrize("format", ["GIF", "WEBP"])
def test_a_still_picture_that_could_move_is_a_clip_of_one_frame(format: str) -> None:
    data = encode(numbered(7), format)
    assert open_clip(data, LIMITS).timeline.num_frames == 1
    assert shown(data, [0]) == [(0, 7)]


def test_a_clip_with_sound() -> None:
    assert_right(clip("mp4", 30, sound=True), [0, 15, 29])


# ---- odd times ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mp4", "mkv", "webm"])
def test_a_variable_rate(kind: str) -> None:
    data = clip(kind, 6, times_ms=[0, 40, 1000, 1040, 5000, 9000])
    found = open_clip(data, LIMITS).timeline
    assert [round(float(found.time_s(number)), 3) for number in range(6)] == [0, 0.04, 1, 1.04, 5, 9]
    assert_right(data, range(6))


def test_a_container_that_lies_about_length_and_rate() -> None:
    data = clip("mp4", 50)
    header = clips.atom(b"mvhd", data)
    data = clips.patched(data, header + 16, struct.pack(">I", 1))  # duration of the film: 1 tick
    track = clips.atom(b"mdhd", data)
    data = clips.patched(data, track + 16, struct.pack(">I", 0))
    assert open_clip(data, LIMITS).timeline.duration_s == 2
    assert_right(data, [0, 24, 49])


@pytest.mark.parametrize("options", [{"live": "1"}, {"cues_to_front": "0", "flush_packets": "1", "live": "1"}])
def test_no_duration_and_no_index(options: dict[str, str]) -> None:
    data = clip("webm", 50, muxer=options)
    with av.open(io.BytesIO(data)) as container:
        assert container.duration is None  # it really has none
    assert open_clip(data, LIMITS).timeline.duration_s == 2
    assert_right(data, [0, 30, 49])


def test_a_fragmented_file() -> None:
    assert_right(clip("mp4", 50, muxer={"movflags": "frag_keyframe+empty_moov"}), [0, 30, 49])


def test_a_rate_of_zero_in_the_header() -> None:
    data = clip("avi", 20)
    rate = data.index(b"strh") + 8 + 20  # dwScale, dwRate
    data = clips.patched(data, rate, struct.pack("<II", 0, 0))
    found = open_clip(data, LIMITS).timeline
    assert found.num_frames == 20
    assert found.duration_s > 0
    assert_right(data, [0, 19])


def test_one_frame() -> None:
    data = clip("mp4", 1)
    assert open_clip(data, LIMITS).timeline.duration_s == Fraction(1, 25)
    assert_right(data, [0])


def test_a_clip_that_does_not_start_at_zero() -> None:
    data = clip("mkv", 10, times_ms=range(5000, 6000, 100))
    found = open_clip(data, LIMITS).timeline
    assert (found.time_s(0), found.time_s(9)) == (0, Fraction(9, 10))
    assert_right(data, [0, 9])


def test_nothing_of_a_clip_waits_for_the_collector_of_circles() -> None:
    data = clip("mp4", 20)

    def look() -> int:
        opened = open_clip(data, LIMITS)
        assert len(list(opened.frames([0, 9, 19]))) == 3
        next(iter(opened.frames([5])))
        with pytest.raises(ClientError):
            open_clip(sound_only(), LIMITS)
        return sum(str(type(found).__module__).startswith("av.") for found in gc.get_objects())

    look()  # what is loaded at the first use stays
    gc.collect()
    gc.disable()
    try:
        assert look() == look()
    finally:
        gc.enable()


# ---- turned and mirrored --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", [90, 180, 270])
def test_a_phone_held_sideways(rotation: int) -> None:
    data = clip("mp4", 5, rotation=rotation)
    assert_right(data, [0, 4])
    [(_, image)] = open_clip(data, LIMITS).frames([0])
    assert image.size == clips.SIZE


@pytest.mark.parametrize(
    ("matrix", "undo"),
    [
        ((1, 0, 0, 1), None),
        ((-1, 0, 0, 1), Image.Transpose.FLIP_LEFT_RIGHT),
        ((1, 0, 0, -1), Image.Transpose.FLIP_TOP_BOTTOM),
        ((0, 1, 1, 0), Image.Transpose.TRANSPOSE),
        ((0, -1, -1, 0), Image.Transpose.TRANSVERSE),
    ],
)
def test_mirrored(matrix: tuple[int, int, int, int], undo: Image.Transpose | None) -> None:
    [(_, plain)] = open_clip(clip("mp4", 1), LIMITS).frames([0])
    [(_, turned)] = open_clip(with_display_matrix(clip("mp4", 1), matrix), LIMITS).frames([0])
    assert turned == (plain if undo is None else plain.transpose(undo))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_camera_that_says_in_exif_how_it_was_held(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Make] = orientation, "a camera"
    picture, encoded = numbered(3), io.BytesIO()
    picture.save(encoded, "JPEG", quality=95, exif=exif)
    with av.open(io.BytesIO(encoded.getvalue()), format="mjpeg") as container:
        [frame] = container.decode(video=0)
    turned, plain = upright(frame), ImageOps.exif_transpose(Image.open(encoded))
    assert turned.size == plain.size
    assert np.abs(np.asarray(turned, int) - np.asarray(plain, int)).mean() < 2


# ---- damaged --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mkv", "webm", "avi", "fragmented"])
def test_a_cut_off_tail_leaves_what_came_before(kind: str) -> None:
    options = {"movflags": "frag_keyframe+empty_moov"} if kind == "fragmented" else None
    data = clip("mp4" if kind == "fragmented" else kind, 200, muxer=options)
    data = data[: len(data) * 2 // 3]
    found = open_clip(data, LIMITS).timeline
    assert 100 < found.num_frames < 150
    assert_right(data, [0, 50, 100])
    assert 100 < shown(data, [found.num_frames - 1])[0][0] <= found.num_frames - 1


def test_a_damaged_key_frame_is_replaced_by_what_was_before() -> None:
    data = bytearray(clip("mp4", 24, key_every=12))
    with av.open(io.BytesIO(bytes(data))) as container:
        packet = [packet for packet in container.demux(video=0) if packet.is_keyframe][1]
        place, size = packet.pos, packet.size
    assert place is not None
    data[place : place + size] = bytes(size)
    [(number, seen)] = shown(bytes(data), [12])
    assert 8 <= number == seen < 12
    assert shown(bytes(data), [3, 12])[0] == (3, 3)


def test_an_mp4_without_its_index_is_refused() -> None:
    assert "cut off" in refusal(clip("mp4", 50)[:-400]).message


@pytest.mark.parametrize("kind", ["mp4", "mkv", "webm", "avi", "gif"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_noise_never_gives_more_than_a_refusal(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(_INTACT[kind])
    for _ in range(chance.choice([1, 10, 100])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    if chance.random() < 0.3:
        del data[chance.randrange(len(data)) :]
    error, numbers = _outcome(bytes(data))
    assert all(one < other for one, other in pairwise(numbers))
    if error is not None:
        assert error.status in {400, 413}
        assert not re.search(r"0x|Errno|/|Error", error.message)


def _outcome(data: bytes) -> tuple[ClientError | None, list[int]]:
    numbers: list[int] = []
    try:
        opened = open_clip(data, LIMITS)
        numbers += [number for number, _ in opened.frames(range(0, opened.timeline.num_frames, 7))]
    except ClientError as error:
        return error, numbers
    except MemoryError:  # a header that claims terabytes; the worker makes it a refusal
        pass
    return None, numbers


_INTACT = {kind: clip(kind, 30) for kind in ("mp4", "mkv", "webm", "avi")} | {"gif": animation("GIF", 10)}


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"#EXTM3U\n#EXT-X-VERSION:3\n#EXTINF:10,\nfile:///etc/passwd\n", "text"),
        (b"ffconcat version 1.0\nfile '/etc/passwd'\n", "text"),
        (b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>', "an XML document"),
        (b"\x47" + bytes(187) + b"\x47" + bytes(187), "data of no known video format"),
        (b"OggS" + bytes(100), "an Ogg file"),
        (b"%PDF-1.7", "a PDF document"),
        (encode(numbered(1), "JPEG"), "a JPEG picture"),
        (encode(numbered(1), "AVIF"), "an AVIF picture"),
    ],
    ids=["hls", "concat", "dash", "ts", "ogg", "pdf", "jpeg", "avif"],
)
def test_what_is_no_clip_is_refused_by_name(data: bytes, what: str) -> None:
    error = refusal(data)
    assert error.code == "video_format_unsupported"
    assert error.message.startswith(f"This is {what}, not a clip that can be read")


def test_a_playlist_in_disguise_is_not_followed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The demuxer is named by the first bytes, so the rest of the file has no say in it."""
    secret = tmp_path_factory.mktemp("secret") / "clip.mp4"
    secret.write_bytes(clip("mp4", 5))
    for start in (b"\0\0\0\x18ftypmp42", b"\x1aE\xdf\xa3", b"RIFF\0\0\0\0AVI "):
        refusal(start + f"\nffconcat version 1.0\nfile '{secret}'\n".encode())


def test_a_reference_to_another_file_is_not_followed(tmp_path_factory: pytest.TempPathFactory) -> None:
    """QuickTime tracks may say that their data lie in another file; FFmpeg is never told to look there."""
    other = tmp_path_factory.mktemp("other") / "other.mov"
    data = clip("mov", 5)
    other.write_bytes(data)
    place = data.index(b"url ")
    name = str(other).encode()
    entry = struct.pack(">I", 12 + len(name) + 1) + b"url \0\0\0\0" + name + b"\0"
    data = data[: place - 4] + entry + data[place + 8 :]
    refusal(data)


def test_sound_alone() -> None:
    error = refusal(sound_only())
    assert (error.code, error.message) == ("video_missing", "The MP4 file holds sound and no video; send a clip.")


def test_the_cover_of_an_album_is_no_video() -> None:
    error = refusal(sound_only(cover=True))
    assert (error.code, error.message) == ("video_missing", "The MP4 file holds sound and no video; send a clip.")


def test_a_codec_that_is_not_on_the_list() -> None:
    error = refusal(clip("mkv", 3, codec="ffv1"))
    assert error.code == "video_codec_unsupported"
    assert "ffv1" in error.message


def test_nothing_at_all() -> None:
    assert refusal(b"").code == "video_empty"


def test_too_many_pixels() -> None:
    limits = MediaLimits(max_video_pixels=192 * 96 - 1)
    for data in (clip("mp4", 3), clip("webm", 3), clip("avi", 3), animation("GIF", 3)):
        error = refusal(data, limits)
        assert error.code == "video_too_large"
        assert "18,431" in error.message


def test_a_header_that_claims_huge_sides_is_not_believed() -> None:
    data = clip("mp4", 1)
    size = data.rindex(b"avc1") + 4 + 24
    assert struct.unpack(">HH", data[size : size + 4]) == clips.SIZE
    assert_right(clips.patched(data, size, struct.pack(">HH", 65000, 65000)), [0])


def test_a_side_too_long() -> None:
    error = refusal(clip("mp4", 1, size=(4096, 48)), MediaLimits(max_image_side=4000))
    assert error.code == "video_too_large"
    assert "4,096 × 48" in error.message


def test_too_long() -> None:
    error = refusal(clip("mkv", 2, times_ms=[0, 100_000]), MediaLimits(max_video_s=60))
    assert error.code == "video_too_long"
    assert "at most 60" in error.message


def test_too_many_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_stream, "_MAX_PACKETS", 10)
    assert refusal(clip("mp4", 12)).code == "video_too_long"


# ---- bounded work ---------------------------------------------------------------------------------------------------


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry a packet that was decoded."""
    packets: list[int] = []
    decode = video_stream._decode

    def counting(codec: object, packet: object) -> object:
        packets.append(1)
        return decode(codec, packet)  # type: ignore[arg-type]

    monkeypatch.setattr(video_stream, "_decode", counting)
    return packets


def test_hours_of_video_cost_a_few_decoded_frames(fed: list[int]) -> None:
    data = clip("mp4", 2 * 3600 // 4, rate=Fraction(1, 4), key_every=30, size=(96, 48))
    found = open_clip(data, LIMITS)
    assert found.timeline.duration_s == 7200
    wanted = [5, 900, 1795]
    assert_right(data, wanted)
    assert len(fed) <= 3 * 30 + 10


def test_frames_of_one_stretch_are_decoded_once(fed: list[int]) -> None:
    assert_right(clip("mp4", 60, key_every=60), range(0, 60, 5))
    assert len(fed) <= 62


def test_when_the_way_is_too_long_key_frames_nearby_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clip("mp4", 200, key_every=10)
    wanted = [0, 62, 119, 187]
    assert_right(data, wanted)
    monkeypatch.setattr(video_stream, "_RUN_UP_PIXELS", 10 * 192 * 96)
    assert shown(data, wanted) == [(number, number) for number in (0, 60, 120, 190)]
