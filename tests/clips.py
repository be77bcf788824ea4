"""Clips for tests, made by code: every frame shows its own number as a row of black and white bars."""

from __future__ import annotations

import contextlib
import io
import os
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
from av.stream import Disposition
from PIL import Image

BITS: Final = 12
SIZE: Final = (192, 96)

MUXERS: Final = {"mp4": "mp4", "mov": "mov", "mkv": "matroska", "webm": "webm", "avi": "avi", "ts": "mpegts"}
CODECS: Final = {"mp4": "libx264", "mov": "mpeg4", "mkv": "libx264", "webm": "libvpx-vp9", "avi": "mpeg4"}


def numbered(number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """A picture of a number: bars from left to right are its bits; the upper third is grey, so that it has an up."""
    bars = np.array([[255 if number >> bit & 1 else 0 for bit in reversed(range(BITS))]], np.uint8)
    image = Image.fromarray(bars).resize(size, Image.Resampling.NEAREST).convert("RGB")
    image.paste((128, 128, 128), (0, 0, size[0], size[1] // 3))
    return image


def number_of(image: Image.Image) -> int:
    """The number that an upright frame shows."""
    width, height = image.size
    pixels = np.asarray(image.convert("L")).astype(int)
    assert abs(pixels[height // 6].mean() - 128) < 40, "the frame is not upright"
    row = pixels[height * 2 // 3]
    bits = [int(row[int((place + 0.5) * width / BITS)] > 128) for place in range(BITS)]
    return int("".join(map(str, bits)), 2)


@contextlib.contextmanager
def scheduling_kept() -> Iterator[None]:
    """Leaves the thread's scheduling as it was.

    SVT-AV1's encoder, where it may (as root), makes the thread that opens it real-time, at the highest priority, and
    for good. All that this thread starts later inherits it: servers and browsers that push everything else off the
    machine.
    """
    if not hasattr(os, "sched_getscheduler"):  # other systems than Linux
        yield
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def clip(
    kind: str = "mp4",
    num_frames: int = 50,
    *,
    rate: int | Fraction = 25,
    codec: str = "",
    size: tuple[int, int] = SIZE,
    key_every: int = 12,
    times_ms: Sequence[int] = (),
    numbers: Sequence[int] = (),
    rotation: int = 0,
    muxer: dict[str, str] | None = None,
    encoder: dict[str, str] | None = None,
    sound: bool = False,
) -> bytes:
    """A clip of numbered frames.

    Args:
        kind: Of `MUXERS`.
        num_frames: How many.
        rate: Frames per second.
        codec: FFmpeg's encoder; by default one that fits `kind`.
        size: Width and height.
        key_every: Frames from one key frame to the next.
        times_ms: When each frame starts, instead of a steady rate.
        numbers: What the frames show, instead of their numbers.
        rotation: Degrees by which a player must turn it, counterclockwise, to show the frames upright.
        muxer: Options of the container.
        encoder: Options of the encoder.
        sound: Whether silence goes with it.
    """
    buffer = io.BytesIO()
    shown = numbers or range(num_frames)
    turned = numbered(0, size).rotate(-rotation, expand=True).size
    with scheduling_kept(), av.open(buffer, "w", format=MUXERS[kind], options=muxer or {}) as container:
        stream: Any = container.add_stream(codec or CODECS[kind], rate=rate, options=encoder or {})
        stream.width, stream.height, stream.pix_fmt = *turned, "yuv420p"
        stream.gop_size = key_every
        if stream.codec_context.name.startswith("libx26"):
            stream.options = {"preset": "ultrafast", "bf": "2", **(encoder or {})}
        if stream.codec_context.name == "libvpx-vp9":
            stream.options = {"deadline": "realtime", "cpu-used": "8", **(encoder or {})}
        if rotation:
            stream.set_display_rotation(rotation)
        if times_ms:
            stream.codec_context.time_base = Fraction(1, 1000)
        audio: Any = container.add_stream("aac" if kind != "webm" else "libopus", rate=48000) if sound else None
        for number in range(num_frames):
            frame = av.VideoFrame.from_image(numbered(shown[number], size).rotate(-rotation, expand=True))
            frame.pts = times_ms[number] if times_ms else number
            frame.time_base = Fraction(1, 1000) if times_ms else Fraction(1) / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if audio is not None:
            _silence(container, audio)
    return buffer.getvalue()


def sound_only(*, cover: bool = False) -> bytes:
    """An MP4 of silence, perhaps with the picture of an album."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        audio = container.add_stream("aac", rate=48000)
        if cover:
            picture: Any = container.add_stream("png", rate=1)
            picture.width, picture.height, picture.pix_fmt = *SIZE, "rgb24"
            picture.disposition = Disposition.attached_pic
            container.mux(picture.encode(av.VideoFrame.from_image(numbered(1))))
            container.mux(picture.encode())
        _silence(container, audio)
    return buffer.getvalue()


def _silence(container: Any, audio: Any) -> None:
    for start in range(0, 48000, 1024):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48000, start, Fraction(1, 48000)
        container.mux(audio.encode(frame))
    container.mux(audio.encode())


def animation(format: str = "GIF", num_frames: int = 6, durations_ms: Sequence[int] | int = 500) -> bytes:
    """An animated picture of numbered frames."""
    frames = [numbered(number) for number in range(num_frames)]
    buffer = io.BytesIO()
    duration = list(durations_ms) if isinstance(durations_ms, Sequence) else durations_ms
    frames[0].save(buffer, format, save_all=True, append_images=frames[1:], duration=duration, loop=0)
    return buffer.getvalue()


def atom(name: bytes, data: bytes) -> int:
    """Where the contents of an MP4 atom begin."""
    return data.index(name) + 4


def patched(data: bytes, place: int, new: bytes) -> bytes:
    """With some bytes replaced."""
    return data[:place] + new + data[place + len(new) :]


def with_display_matrix(mp4: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 whose track says how its frames are to be turned or mirrored: ((a, b), (c, d)), in whole numbers."""
    a, b, c, d = (value << 16 for value in matrix)
    return patched(mp4, atom(b"tkhd", mp4) + 40, struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30))
