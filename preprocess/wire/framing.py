"""A worker's job as the frames of one message: large pictures and clips travel beside the struct, and uncopied.

frame 0: the struct     frames 1, 2, …: every `data` and `rest` of its parts that has `FRAME_BYTES` or more
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from preprocess.wire.job import ImagePart, Look, Preview, TextPart, VideoPart, WorkerInput

FRAME_BYTES: Final = 32 << 10
_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(tuple[WorkerInput, list[int]])


def frames_of(job: WorkerInput, *, has_media: bool = True) -> list[bytes]:
    """The frames to send. `has_media`: whether there may be any in it; else nobody looks through its many parts."""
    if not has_media:
        return [_encoder.encode((job, []))]
    frames: list[bytes] = []
    places: list[int] = []  # of each place that may hold something large, the number of its frame; 0: it is in place

    def take(data: bytes) -> bytes:
        if len(data) < FRAME_BYTES:
            places.append(0)
            return data
        frames.append(data)
        places.append(len(frames))
        return b""

    small = _with_media(job, take)
    return [_encoder.encode((small, places)), *frames]


def job_of(frames: Sequence[bytes]) -> WorkerInput:
    """The job that came in these frames. A `rest` has become a part of its `data_url`."""
    small, places = _decoder.decode(frames[0])
    place = iter(places)

    def put(data: bytes) -> bytes:
        index = next(place)
        return frames[index] if index else data

    return _with_media(small, put, joins=True)


def _with_media(job: WorkerInput, change: Callable[[bytes], bytes], *, joins: bool = False) -> WorkerInput:
    """The job with everything changed that may be large; `joins`: and no `rest` left."""

    def changed(part: ImagePart | VideoPart) -> ImagePart | VideoPart:
        data, rest = change(part.data), change(part.rest)
        if not joins or not rest:
            return msgspec.structs.replace(part, data=data, rest=rest)
        return msgspec.structs.replace(part, data=data, data_url=part.data_url + rest.decode("latin-1"), rest=b"")

    if isinstance(job, Look):
        return msgspec.structs.replace(job, data=change(job.data))
    if isinstance(job, Preview):
        return msgspec.structs.replace(job, part=changed(job.part))
    messages = [
        msgspec.structs.replace(
            message, content=[part if isinstance(part, TextPart) else changed(part) for part in message.content]
        )
        if any(not isinstance(part, TextPart) for part in message.content)
        else message
        for message in job.messages
    ]
    return msgspec.structs.replace(job, messages=messages)
