"""Live sources: a file at its own pace, MJPEG over HTTP, RTSP, and what is none of them."""

from __future__ import annotations

import base64
import io
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pytest
from clips import SIZE, animation, clip, number_of, numbered

from preprocess.config import MediaLimits
from preprocess.errors import ClientError
from server.live_source import LiveFrame, LiveSource

LIMITS = MediaLimits()


def frames_of(source: str, limits: MediaLimits = LIMITS, most: int = 1000, pause_s: float = 0.0) -> list[LiveFrame]:
    found: list[LiveFrame] = []
    with LiveSource(source, limits) as live:
        while len(found) < most:
            frame = live.newest()
            if frame is None:
                break
            found.append(frame)
            time.sleep(pause_s)
    return found


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One second of 25 frames."""
    path = tmp_path_factory.mktemp("live") / "clip.mp4"
    path.write_bytes(clip("mp4", 25))
    return path


def test_a_file_plays_at_its_own_pace(short_clip: Path) -> None:
    started = time.monotonic()
    found = frames_of(str(short_clip))
    took_s = time.monotonic() - started
    assert 0.85 < took_s < 3
    assert [frame.number for frame in found] == list(range(10))
    assert [round(frame.at_s * 25) for frame in found] == [number_of(frame.image) for frame in found]
    assert [number_of(frame.image) for frame in found][:3] == [0, 2, 5]
    arrivals = [frame.captured_s - found[0].captured_s for frame in found]
    assert all(arrival > frame.at_s - 0.05 for arrival, frame in zip(arrivals, found, strict=True))


def test_who_is_slow_gets_the_newest_frame_and_never_an_old_one(short_clip: Path) -> None:
    found = frames_of(str(short_clip), pause_s=0.35)
    numbers = [frame.number for frame in found]
    assert numbers[0] == 0
    assert numbers[-1] == 9
    assert len(numbers) <= 5
    assert all(later.captured_s >= frame.captured_s + 0.2 for frame, later in pairwise(found[:-1]))


def test_leaving_early_ends_the_thread(short_clip: Path) -> None:
    before = threading.active_count()
    assert len(frames_of(str(short_clip), most=1)) == 1
    assert threading.active_count() == before


def test_an_animation_plays(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(animation("GIF", 4, 250))
    assert [number_of(frame.image) for frame in frames_of(str(path))] == [0, 1, 2, 3]


def test_a_file_that_is_no_clip(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(b"#EXTM3U\nhttp://127.0.0.1/")
    with pytest.raises(ClientError, match="not a clip that can be read"):
        frames_of(str(path))
    path.write_bytes(clip("mp4", 3))
    with pytest.raises(ClientError, match="--max-video-mb"):
        frames_of(str(path), MediaLimits(max_video_bytes=100))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere.mp4", "No such file"),
        ("/", "neither a file nor a camera"),
        ("ftp://127.0.0.1/a.mp4", "ftp: addresses are not read"),
        ("concat://a|b", "concat: addresses are not read"),
        ("file:///etc/passwd", "file: addresses are not read"),
    ],
)
def test_what_is_no_source_is_refused_at_once(source: str, says: str) -> None:
    with pytest.raises(ClientError, match=says):
        LiveSource(source, LIMITS)


def test_a_device_that_is_no_camera() -> None:
    with pytest.raises(ClientError, match="/dev/null cannot be read"):
        frames_of("/dev/null")


# ---- MJPEG over HTTP ------------------------------------------------------------------------------------------------


def jpeg(number: int) -> bytes:
    buffer = io.BytesIO()
    numbered(number).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@contextmanager
def http(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A web server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/stream.mjpg"
    finally:
        server.shutdown()
        server.server_close()


def send_mjpeg(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
    handler.end_headers()
    for number in range(8):
        data = jpeg(number)
        handler.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(data))
        handler.wfile.write(data + b"\r\n")
        time.sleep(0.05)
    handler.wfile.write(b"--frame--\r\n")


def test_mjpeg_over_http() -> None:
    with http(send_mjpeg) as url, LiveSource(url, LIMITS) as live:
        found = [frame for frame in iter(live.newest, None) if frame is not None]
        assert live.ended_by  # cameras do not end by themselves
    numbers = [number_of(frame.image) for frame in found]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 4
    assert found[0].image.size == SIZE


def test_a_camera_that_comes_back_is_read_on() -> None:
    with http(send_mjpeg) as url, LiveSource(url, LIMITS, reconnect_s=5) as live:
        found = [live.newest() for _ in range(11)]  # a connection has eight
    numbers = [number_of(frame.image) for frame in found if frame is not None]
    assert len(numbers) == 11
    assert any(later < number for number, later in pairwise(numbers))  # it began again
    assert all(later.at_s > frame.at_s for frame, later in pairwise(found) if frame and later)


def test_a_camera_that_stays_away_is_given_up() -> None:
    answered: list[int] = []

    def once(handler: BaseHTTPRequestHandler) -> None:
        answered.append(1)
        if len(answered) == 1:
            send_mjpeg(handler)
        else:
            handler.send_error(503)

    with http(once) as url, LiveSource(url, LIMITS, reconnect_s=1.4) as live:
        assert all(frame is not None for frame in iter(live.newest, None))
        assert "Server Error" in live.ended_by
    assert len(answered) == 2


def test_a_web_page_is_no_camera() -> None:
    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"#EXTM3U\nfile:///etc/passwd\n")

    with http(page) as url, pytest.raises(ClientError, match="cannot be read"):
        frames_of(url)


def test_a_refusal_and_nobody_there() -> None:
    with http(lambda handler: handler.send_error(404)) as url, pytest.raises(ClientError, match="404"):
        frames_of(url)
    with pytest.raises(ClientError, match="Connection refused") as caught:
        frames_of(url.replace("//", "//user:secret@"))
    assert "secret" not in caught.value.message


# ---- RTSP -----------------------------------------------------------------------------------------------------------


def units() -> list[list[bytes]]:
    """Eight H.264 pictures as lists of units, each one a key frame."""
    codec: Any = av.CodecContext.create("libx264", "w")
    codec.width, codec.height, codec.pix_fmt = *SIZE, "yuv420p"
    codec.time_base, codec.gop_size = Fraction(1, 25), 1
    codec.options = {"preset": "ultrafast", "tune": "zerolatency", "bf": "0"}
    pictures = []
    for number in range(8):
        frame = av.VideoFrame.from_image(numbered(number))
        frame.pts = number
        for packet in codec.encode(frame):
            pictures.append([unit for unit in bytes(packet).replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1") if unit])
    return pictures


class Camera(socketserver.StreamRequestHandler):
    """The part of RTSP (RFC 2326) that a client needs which wants all over one connection."""

    def handle(self) -> None:
        with suppress(ConnectionError):
            self.serve(units())

    def serve(self, pictures: list[list[bytes]]) -> None:
        sets = ",".join(base64.b64encode(unit).decode() for unit in pictures[0] if unit[0] & 31 in (7, 8))
        sdp = (
            "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\nc=IN IP4 0.0.0.0\r\n"
            "a=rtpmap:96 H264/90000\r\na=control:track\r\n"
            f"a=fmtp:96 packetization-mode=1;sprop-parameter-sets={sets}\r\n"
        )
        while True:
            request = self.rfile.readline().decode().split()
            if not request:
                return
            headers = {}
            while line := self.rfile.readline().decode().strip():
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            answer = {
                "OPTIONS": ("Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n", ""),
                "DESCRIBE": (f"Content-Type: application/sdp\r\nContent-Length: {len(sdp)}\r\n", sdp),
                "SETUP": ("Session: 1\r\nTransport: RTP/AVP/TCP;unicast;interleaved=0-1\r\n", ""),
            }.get(request[0], ("Session: 1\r\n", ""))
            self.wfile.write(f"RTSP/1.0 200 OK\r\nCSeq: {headers['cseq']}\r\n{answer[0]}\r\n{answer[1]}".encode())
            if request[0] == "PLAY":
                self.play(pictures)

    def play(self, pictures: list[list[bytes]]) -> None:
        sequence = 0
        for number in range(1000):  # until the client has gone
            picture = pictures[number % len(pictures)]
            for unit in picture:
                last = unit is picture[-1]
                header = struct.pack(">BBHII", 0x80, 96 | (0x80 if last else 0), sequence, number * 3600, 7)
                self.wfile.write(b"$\0" + struct.pack(">H", len(header) + len(unit)) + header + unit)
                sequence += 1
            time.sleep(0.03)


def test_rtsp() -> None:
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Camera)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        found = frames_of(f"rtsp://127.0.0.1:{server.server_address[1]}/camera", most=3)
    finally:
        server.shutdown()
        server.server_close()
    assert len({number_of(frame.image) for frame in found}) == 3
