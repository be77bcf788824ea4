"""Where live frames come from: a file at its own pace, a camera of this machine, an MJPEG or an RTSP address.

A thread reads; whoever wants a frame gets the newest one, and those in between are counted as dropped. The address is
the owner's own choice, on the command line: nothing here is reached by a request to the server.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from preprocess.config import MediaLimits
from preprocess.errors import BeholderError, ClientError
from preprocess.image import decode
from preprocess.video import open_clip
from preprocess.video_formats import CODECS
from preprocess.video_limits import check_size

if TYPE_CHECKING:
    from PIL import Image

FILE_RATE: Final = 10
"""Frames a second that are taken from a file: a model that is faster still has few new ones to wait for."""

_TIMEOUT_S: Final = 10.0
"""How long an address may take to answer, and to send more."""
_LEAVE_S: Final = 1.0
"""How long who has seen enough waits for the thread, which may just be waiting for a silent camera."""
_MOST_BAD: Final = 100
"""Pictures in a row that cannot be decoded before a source is given up."""
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 10.0
_STREAMS: Final = {
    "rtsp": ("rtsp", "rtsp,rtp,tcp,udp"),
    "rtsps": ("rtsp", "rtsp,rtp,tcp,udp,tls"),
}
"""Scheme → (FFmpeg's demuxer, protocols that it may use). It is never asked to guess."""
_PICTURES: Final = ("http", "https")

_NO_MEMORY: Final = "the source needs more memory to be decoded than there is"


@dataclass(frozen=True, slots=True)
class LiveFrame:
    """A frame, and when it was there to be seen.

    Attributes:
        image: Upright RGB.
        at_s: Seconds since the first frame; of a file, its own time.
        captured_s: `time.monotonic()` of its arrival.
        number: Counts frames from 0; a gap between two that were taken is what was dropped.
    """

    image: Image.Image
    at_s: float
    captured_s: float
    number: int


class LiveSource:
    """Reads in a thread of its own and keeps the newest frame only. Use it in a ``with``.

    Args:
        source: File, device or address.
        limits: Bounds on what it may send.
        reconnect_s: An address that has given frames and then fails is tried again for so long.

    Attributes:
        ended_by: What went wrong where a source ended that had given frames; empty for one that was simply over.
    """

    def __init__(self, source: str, limits: MediaLimits, *, reconnect_s: float = 0.0) -> None:
        self._read = reader_of(source, limits, reconnect_s)
        self._changed = threading.Condition()
        self._newest: tuple[Callable[[], Image.Image], float, float, int] | None = None
        self._num_frames = 0
        self._ended = False
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self.ended_by = ""
        self._thread = threading.Thread(target=self._run, name="live-source", daemon=True)

    @property
    def num_frames(self) -> int:
        """Frames that the source has given so far."""
        return self._num_frames

    def newest(self) -> LiveFrame | None:
        """Wait for a frame that was not taken yet; None when there will be no more.

        Raises:
            ClientError: The source cannot be read (any longer).
        """
        for num_bad in count(1):
            with self._changed:
                while self._newest is None and not self._ended:
                    self._changed.wait(0.5)  # not for ever, so that Ctrl-C is noticed
                taken, self._newest = self._newest, None
                if taken is None:
                    if self._error is not None:
                        raise self._error
                    return None
            make, at_s, captured_s, number = taken
            try:
                return LiveFrame(make(), at_s, captured_s, number)
            except ClientError:  # cameras send a damaged picture now and then
                if num_bad == _MOST_BAD:
                    raise
            except MemoryError:
                raise ClientError(_NO_MEMORY, code="bad_source") from None
        raise AssertionError

    def _run(self) -> None:
        try:
            with closing(self._read(self._stop)) as frames:
                for make, at_s in frames:
                    with self._changed:
                        self._newest = (make, at_s, time.monotonic(), self._num_frames)
                        self._num_frames += 1
                        self._changed.notify_all()
                    if self._stop.is_set():
                        return
        except ClientError as error:
            if self._num_frames:
                self.ended_by = error.message
            else:
                self._error = error
        except MemoryError:
            self._error = ClientError(_NO_MEMORY, code="bad_source")
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def __enter__(self) -> LiveSource:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_LEAVE_S)


Frames = Iterator[tuple["Callable[[], Image.Image]", float]]
"""A way to get each frame's picture, which only those pay for who look at it, and its time in seconds."""

Connection = Iterator["Callable[[], Image.Image]"]
"""The same of a camera, whose frames have no time but that of their arrival."""

Reader = Callable[[threading.Event], Any]


def reader_of(source: str, limits: MediaLimits, reconnect_s: float) -> Reader:
    """What reads a source. Raises `ClientError` where it is none."""
    scheme, separator, _ = source.partition("://")
    if separator:
        if scheme.lower() in _PICTURES:
            return lambda stop: _camera(lambda: _pictures(source, limits, stop), stop, reconnect_s)
        if scheme.lower() not in _STREAMS:
            raise ClientError(
                f"{scheme}: addresses are not read; expected {', '.join((*_PICTURES, *_STREAMS))}, a file or a device",
                code="bad_source",
            )
        demuxer, protocols = _STREAMS[scheme.lower()]
        return lambda stop: _camera(lambda: _video(source, demuxer, protocols, limits, stop), stop, reconnect_s)
    path = Path(source)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ClientError(f"{source!r} cannot be read: {error.strerror}.", code="bad_source") from None
    if stat.S_ISCHR(mode):
        return lambda stop: _camera(lambda: _video(source, "v4l2", "file", limits, stop), stop, 0.0)
    if not stat.S_ISREG(mode):
        raise ClientError(f"{source!r} is neither a file nor a camera.", code="bad_source")
    return lambda stop: _file(path, limits, stop)


def shown(address: str) -> str:
    """An address as errors may show it: without user and password, which may hold any character, and without a query,
    where cameras take passwords too.
    """
    return re.split("[?#]", re.sub(r"//.*@", "//", address, flags=re.DOTALL))[0]


def _file(path: Path, limits: MediaLimits, stop: threading.Event) -> Frames:
    """The frames of a file when their time has come, some of them where it has more than a camera would give."""
    if os.path.getsize(path) > limits.max_video_bytes:
        raise ClientError(
            f"{str(path)!r} has {os.path.getsize(path):,} bytes; at most {limits.max_video_bytes:,} are read "
            "(--max-video-mb)",
            code="video_too_large",
        )
    clip = open_clip(path.read_bytes(), limits)
    timeline = clip.timeline
    times = np.arange(0, float(timeline.duration_s) or 1, 1 / FILE_RATE)
    shown = np.searchsorted(timeline.ticks, times / float(timeline.tick) + 0.5, side="right") - 1
    started = time.monotonic()
    for number, image in clip.frames([int(number) for number in np.unique(shown)]):
        at_s = float(timeline.time_s(number))
        if stop.wait(max(started + at_s - time.monotonic(), 0)):
            return
        yield partial(_itself, image), at_s


def _itself(image: Image.Image) -> Image.Image:
    return image


def _camera(connection: Callable[[], Connection], stop: threading.Event, reconnect_s: float) -> Frames:
    """Every frame of a camera as it comes, over as many connections as it takes."""
    started = time.monotonic()
    last_s: float | None = None
    pause_s = _FIRST_PAUSE_S
    while not stop.is_set():
        error: ClientError | None = None
        try:
            for make in connection():
                last_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
                yield make, last_s - started
        except ClientError as raised:
            error = raised
        if last_s is None or time.monotonic() + pause_s > last_s + reconnect_s:
            if error is not None:
                raise error
            return
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _pictures(source: str, limits: MediaLimits, stop: threading.Event) -> Connection:
    """Every picture of an address until it ends or fails."""
    from server.mjpeg import pictures_of

    for data in pictures_of(source, shown(source), _TIMEOUT_S, stop.is_set):
        if stop.is_set():
            return
        yield partial(_decoded, data, limits)


def _decoded(data: bytes, limits: MediaLimits) -> Image.Image:
    return decode(data, limits).image


def _video(source: str, demuxer: str, protocols: str, limits: MediaLimits, stop: threading.Event) -> Connection:
    """Every frame of what FFmpeg reads until it ends or fails."""
    import av

    from preprocess.display_matrix import upright

    av.logging.set_level(None)  # what went wrong is said in our words
    options = {"protocol_whitelist": protocols, "fflags": "nobuffer", "max_pixels": str(limits.max_video_pixels)}
    if demuxer == "rtsp":
        options["rtsp_transport"] = "tcp"
    name = shown(source) if "://" in source else source
    with _in_plain_words(name):
        container = av.open(source, "r", format=demuxer, options=options, timeout=_TIMEOUT_S)
    with container:
        if not container.streams.video:
            raise ClientError(f"{name} gives no video", code="bad_source")
        stream = container.streams.video[0]
        if stream.codec_context is None or stream.codec_context.name not in CODECS:
            raise ClientError(f"{name} gives video of a kind that is not read here", code="bad_source")
        packets = container.demux()  # of all streams, so that one of sound alone can be left too
        while not stop.is_set():
            with _in_plain_words(name):
                packet = next(packets, None)
                if packet is None:
                    return
                frames = stream.decode(packet) if packet.stream.index == stream.index else []
            for frame in frames:
                check_size(frame.width, frame.height, limits)
                yield partial(upright, frame)


@contextmanager
def _in_plain_words(name: str) -> Iterator[None]:
    """FFmpeg's errors as ours."""
    import av

    started = time.monotonic()
    try:
        yield
    except (BeholderError, MemoryError):
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        if isinstance(error, av.error.ExitError) or time.monotonic() - started >= _TIMEOUT_S:  # RTSP calls it otherwise
            reason = f"nothing came for {_TIMEOUT_S:g} s"
        raise ClientError(f"{name} cannot be read: {reason}", code="bad_source") from None  # it quotes the address
