"""The video stream of an MP4, MOV, WebM, MKV or AVI file: its timeline without decoding, and single frames decoded.

Two passes over the packets. The first one reads their time stamps only. The second one skips everything but the runs
that lead to a wanted frame, so that hours of video cost a few decoded frames:

    packets    K . . . . K . . . . K . . . . K . . . . K . . .          K: key frame
    wanted         ^                             ^
    decoded    K ───                         K ─
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

import av
import numpy as np
from av.stream import Disposition

from preprocess.config import MediaLimits
from preprocess.display_matrix import upright
from preprocess.errors import ClientError
from preprocess.timeline import Timeline
from preprocess.video_formats import CODECS, ClipFormat
from preprocess.video_limits import check_duration, check_size

if TYPE_CHECKING:
    import numpy.typing as npt
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream as Stream
    from PIL import Image

av.logging.set_level(None)  # FFmpeg's remarks on odd files are not for our log

_READ_SIZE: Final = 1 << 18
_MAX_PACKETS: Final = 2_000_000
"""Nine hours at 60 per second; more is no film but a way to keep a worker busy."""

_GIVES_FRAME_TIMES: Final = ("mp4", "matroska")
"""Demuxers whose packets carry the very time of the frame in them; AVI has none, FFmpeg guesses."""

_RUN_UP_PIXELS: Final = 1 << 31
"""Pixels that may be decoded just to reach the wanted frames; beyond, key frames near them are taken instead. About the
run-ups of 1,000 frames of 1080p, which take some seconds on one core."""

_NEAR: Final = 0.25
"""How far from its time such a key frame may be, as a share of the time between two wanted frames."""


class VideoStream:
    """See `preprocess.video.Clip`."""

    timeline: Timeline

    def __init__(self, data: bytes, found: ClipFormat, limits: MediaLimits) -> None:
        self._data = data
        self._format = found
        self._limits = limits
        with self._opened() as (container, stream):
            self._check(stream)
            self._index(container, stream)

    # ---- opening -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[tuple[InputContainer, Stream]]:
        """The file, read from its start by the one demuxer that its first bytes name, and its video."""
        try:
            container: InputContainer = av.open(
                io.BytesIO(self._data),
                "r",
                format=self._format.demuxer,
                options={"protocol_whitelist": "none", "max_pixels": str(self._limits.max_video_pixels)},
                buffer_size=_READ_SIZE,
                io_open=_open_nothing,
            )
        except MemoryError:
            raise
        except Exception as error:  # on hostile bytes not only FFmpeg's own errors come up
            raise self._unreadable() from error
        with container:
            yield container, self._video_of(container)

    def _video_of(self, container: InputContainer) -> Stream:
        for stream in container.streams.video:
            if not stream.disposition & Disposition.attached_pic:  # the cover of an album is no video
                return stream
        what = "sound and no video" if container.streams.audio else "no video"
        raise ClientError(f"The {self._format.name} file holds {what}; send a clip.", code="video_missing")

    def _check(self, stream: Stream) -> None:
        codec = stream.codec_context
        if codec is None or codec.name not in CODECS:
            shown = "of an unknown kind" if codec is None else f"coded as {codec.name}"
            raise ClientError(
                f"The clip's video is {shown}, which is not read here; send H.264, H.265, VP8, VP9, AV1 or MPEG-4.",
                code="video_codec_unsupported",
            )
        check_size(codec.width, codec.height, self._limits)
        self._num_pixels = codec.width * codec.height

    # ---- first pass: when frames are shown ---------------------------------------------------------------------------

    def _index(self, container: InputContainer, stream: Stream) -> None:
        """Read the times of all packets, in the order in which they lie in the file: that of decoding."""
        times: list[int] = []
        keys: list[int] = []
        shown: list[bool] = []
        latest = last_ticks = 0
        for packet in _packets(container, stream):
            if len(times) == _MAX_PACKETS:
                raise ClientError(f"The clip has more than {_MAX_PACKETS:,} frames.", code="video_too_long", status=413)
            time = packet.pts if packet.pts is not None else packet.dts
            if time is None:  # then it follows the one before
                time = times[-1] + max(packet.duration or 1, 1) if times else 0
            if packet.is_keyframe:
                keys.append(len(times))
            if not times or time >= latest:
                latest, last_ticks = time, packet.duration or 0
            times.append(time)
            shown.append(not packet.is_discard)
        if not any(shown) or stream.time_base is None:
            raise self._unreadable()
        tick = Fraction(stream.time_base)
        check_duration((max(times) - min(times)) * tick, self._limits)
        self._times = np.asarray(times, np.int64)
        self._keys = np.asarray(keys or [0], np.int64)
        starts = self._times[np.asarray(shown)]
        self._first_time = int(starts.min())
        self.timeline = Timeline.of(starts, last_ticks, tick)

    # ---- second pass: frames -----------------------------------------------------------------------------------------

    def frames(self, wanted: Sequence[int]) -> Iterator[tuple[int, Image.Image]]:
        """See `preprocess.video.Clip`."""
        given = -1
        for keys_before in (1, 2):  # where all runs begin with damaged key frames, those before them may be good
            for time, frame in self._decoded(self._affordable(wanted), keys_before):
                number = int(np.searchsorted(self.timeline.ticks, time - self._first_time, side="right")) - 1
                if number > given:
                    given = number
                    yield number, self._picture(frame)
            if given >= 0:
                return
        raise self._unreadable()

    def _decoded(self, wanted: Sequence[int], keys_before: int) -> Iterator[_Decoded]:
        """For each wanted frame itself, or else the last good one before it, or else the first good one after it.

        Decoding starts so many key frames before each.
        """
        places = [self._place(number, keys_before) for number in wanted]
        wanted_packets = {place.packet for place in places}
        waiting = deque(places)
        gives_times = self._format.demuxer in _GIVES_FRAME_TIMES
        with self._opened() as (container, stream):
            codec = stream.codec_context
            codec.thread_count = 1  # other cores have other clips
            codec.options = {"max_pixels": str(self._limits.max_video_pixels)}
            counts = not gives_times and codec.has_b_frames  # then the times that FFmpeg guesses are wrong
            latest: _Decoded | None = None
            fed = start = num_out = -1
            for index, packet in enumerate(chain(_packets(container, stream), [None])):
                if not waiting:
                    return
                if packet is not None:
                    if index < waiting[0].start:
                        continue
                    if fed < 0 or fed < index - 1:  # a new run
                        if fed >= 0:
                            codec.flush_buffers()
                        latest, start, num_out = None, index, 0
                    fed = index
                    if gives_times:
                        codec.skip_frame = "DEFAULT" if index in wanted_packets else "NONREF"
                for frame in _decode(codec, packet):
                    time = int(self._times[min(start + num_out, len(self._times) - 1)]) if counts else _time_of(frame)
                    num_out += 1
                    if frame.is_corrupt:
                        continue
                    while waiting and time >= waiting[0].time:
                        exact = time == waiting.popleft().time
                        yield (time, frame) if exact or latest is None else latest
                    latest = (time, frame)
            if waiting and latest is not None:
                yield latest

    def _picture(self, frame: VideoFrame) -> Image.Image:
        """RGB and upright."""
        check_size(frame.width, frame.height, self._limits)  # it can change in the middle
        try:
            return upright(frame)
        except MemoryError:
            raise
        except Exception as error:
            raise self._unreadable() from error

    # ---- where frames lie --------------------------------------------------------------------------------------------

    def _place(self, number: int, keys_before: int = 1) -> _Place:
        """Where a frame of the timeline lies, and a key frame before it."""
        time = int(self.timeline.ticks[number]) + self._first_time
        packet = int(self._by_time[np.searchsorted(self._times, time, sorter=self._by_time)])
        key = int(np.searchsorted(self._keys, packet, side="right")) - 1
        while key > 0 and self._times[self._keys[key]] > time:  # shown before that key frame, though it lies behind it
            key -= 1
        key -= keys_before - 1
        return _Place(time, packet, int(self._keys[key]) if key >= 0 else 0)

    @cached_property
    def _by_time(self) -> npt.NDArray[np.int64]:
        return np.argsort(self._times, kind="stable")

    def _affordable(self, wanted: Sequence[int]) -> list[int]:
        """The wanted frames or, where the way to them is too long, key frames shown at nearly the same times."""
        places = [self._place(number) for number in wanted]
        num_decoded = end = 0
        for place in places:
            num_decoded += max(place.packet + 1 - max(place.start, end), 0)
            end = max(end, place.packet + 1)
        if num_decoded * self._num_pixels <= _RUN_UP_PIXELS or len(wanted) < 2:
            return list(wanted)
        key_times = np.unique(self._times[self._keys]) - self._first_time
        ticks = self.timeline.ticks
        near = _NEAR * float(ticks[wanted[-1]] - ticks[wanted[0]]) / (len(wanted) - 1)
        chosen = set()
        for number in wanted:
            time = int(ticks[number])
            key_time = int(key_times[np.abs(key_times - time).argmin()])
            at_key = int(np.searchsorted(ticks, key_time))
            is_near = abs(key_time - time) <= near and at_key < len(ticks) and ticks[at_key] == key_time
            chosen.add(at_key if is_near else number)
        return sorted(chosen)

    def _unreadable(self) -> ClientError:
        return ClientError(
            f"The {self._format.name} clip is damaged, cut off, or of a kind that cannot be decoded; save it again "
            "with another program (`ffmpeg -i in -c:v libx264 out.mp4`).",
            code="video_undecodable",
        )


_Decoded: TypeAlias = "tuple[int, VideoFrame]"
"""A frame and its time, in ticks of the file."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A frame's time, its packet, and the packet of the key frame that decoding starts from."""

    time: int
    packet: int
    start: int


def _open_nothing(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    """What a demuxer gets that wants another file or an address."""
    raise PermissionError("a clip is one file")


def _packets(container: InputContainer, stream: Stream) -> Iterator[Packet[Stream]]:
    """All packets up to where the file is cut off or damaged."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except MemoryError:
            raise
        except Exception:  # the same file gives the same error again, and the same packets before it
            return
        if packet is None:
            return
        if packet.size:
            yield packet


def _decode(codec: VideoCodecContext, packet: Packet[Stream] | None) -> list[VideoFrame]:
    """The frames that come out; a damaged packet gives none."""
    try:
        return codec.decode(packet)
    except MemoryError:
        raise
    except Exception:  # of many kinds, and all say that this packet is of no use
        return []


def _time_of(frame: VideoFrame) -> int:
    time = frame.pts if frame.pts is not None else frame.dts
    return 0 if time is None else time
