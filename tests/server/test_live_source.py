"""Live sources: a file at its own pace, MJPEG over HTTP, RTSP, and what is none of them."""

from __future__ import annotations

import base64
import io
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import av
import httpx
import pytest
from clips import SIZE, animation, clip, number_of, numbered
from serving import PATIENCE_S

from preprocess.config import MediaLimits
from preprocess.errors import ClientError
from server import live_source
from server.live_source import LiveFrame, LiveSource

LIMITS = MediaLimits()


def frames_of(source: str, limits: MediaLimits = LIMITS, most: int = 1000) -> list[LiveFrame]:
    found: list[LiveFrame] = []
    with LiveSource(source, limits) as live:
        while len(found) < most:
            frame = live.newest()
            if frame is None:
                break
            found.append(frame)
    return found


def wait_for(condition: Callable[[], object]) -> None:
    """Until it holds; what never comes fails."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


class Clock:
    """The time of a source, which passes while the source waits and at no other time. It stands for the module `time`
    and for the event that the source waits for.
    """

    def __init__(self) -> None:
        self.now_s = 100.0
        self._is_set = False

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class Pace(Clock):
    """A clock that whoever takes the frames moves on: a source that waits goes on when its time has come."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._due_s: float | None = None

    def wait(self, seconds: float) -> bool:
        with self._changed:
            due_s = self._due_s = self.now_s + seconds
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.now_s >= due_s or self._is_set)
            self._due_s = None
            return self._is_set

    def set(self) -> None:
        with self._changed:
            super().set()
            self._changed.notify_all()

    def pass_by(self, seconds: float, live: LiveSource) -> None:
        """So much time passes, and the source does what it has to do meanwhile."""
        until_s = self.now_s + seconds
        with self._changed:
            while live._thread.is_alive():
                if self._due_s is not None:
                    if self._due_s > until_s:
                        break
                    self.now_s = max(self.now_s, self._due_s)
                    self._due_s = None
                    self._changed.notify_all()
                self._changed.wait(0.01)  # the thread's end is told to nobody
            self.now_s = until_s


def played(source: Path, monkeypatch: pytest.MonkeyPatch, every_s: float) -> list[LiveFrame]:
    """The frames of a file that somebody gets who takes one so often, whatever the machine has to do."""
    pace = Pace()
    monkeypatch.setattr(live_source, "time", pace)
    live = LiveSource(str(source), LIMITS)
    live._stop = pace  # type: ignore[assignment]
    found: list[LiveFrame] = []
    with live:
        while live._thread.is_alive() or live._newest is not None:
            pace.pass_by(every_s if found else 0.0, live)
            if live._newest is not None:
                frame = live.newest()
                assert frame is not None
                found.append(frame)
        assert live.newest() is None
    return found


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One second of 25 frames."""
    path = tmp_path_factory.mktemp("live") / "clip.mp4"
    path.write_bytes(clip("mp4", 25))
    return path


def test_a_file_plays_at_its_own_pace(short_clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = played(short_clip, monkeypatch, 0.02)
    assert [frame.number for frame in found] == list(range(10))
    assert [round(frame.at_s * 25) for frame in found] == [number_of(frame.image) for frame in found]
    assert [number_of(frame.image) for frame in found][:3] == [0, 2, 5]
    arrivals = [frame.captured_s - found[0].captured_s for frame in found]
    assert arrivals == pytest.approx([frame.at_s for frame in found])


def test_time_passes_for_a_file_as_for_everybody(short_clip: Path) -> None:
    started = time.monotonic()
    found = frames_of(str(short_clip))
    assert time.monotonic() - started > 0.85
    assert found[-1].number == 9


def test_who_is_slow_gets_the_newest_frame_and_never_an_old_one(
    short_clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = played(short_clip, monkeypatch, 0.35)
    assert [round(frame.at_s * 25) for frame in found] == [0, 7, 17, 22]
    assert [number_of(frame.image) for frame in found] == [0, 7, 17, 22]


def test_leaving_early_ends_the_thread(short_clip: Path) -> None:
    with LiveSource(str(short_clip), LIMITS) as live:
        assert live.newest() is not None
    assert not live._thread.is_alive()


def test_an_animation_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(animation("GIF", 4, 250))
    assert [number_of(frame.image) for frame in played(path, monkeypatch, 0.02)] == [0, 1, 2, 3]


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


def send_mjpeg(handler: BaseHTTPRequestHandler, enough: threading.Event | None = None) -> None:
    """Eight pictures; with `enough`, more and more of them until that is set."""
    handler.send_response(200)
    handler.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
    handler.end_headers()
    for number in count():
        if enough.is_set() if enough else number == 8:
            break
        data = jpeg(number)
        handler.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(data))
        handler.wfile.write(data + b"\r\n")
        time.sleep(0.05)
    handler.wfile.write(b"--frame--\r\n")


PART = b"--frame\r\nContent-Type: image/jpeg\r\n"
MULTIPART = "multipart/x-mixed-replace; boundary=frame"


@pytest.mark.parametrize(
    ("kind", "begin", "before", "after"),
    [
        (MULTIPART, b"", PART + b"\r\n", b"\r\n"),
        (MULTIPART, b"", PART + b"Content-Length: 17\r\n\r\n", b""),
        (MULTIPART, b"hello\r\n\r\n", b"--frame\n\n", b"\n"),
        ('multipart/x-mixed-replace; boundary="a b"', b"", b"--a b\r\nContent-Type: image/jpg; x=y\r\n\r\n", b"\r\n"),
        ("Multipart/X-Mixed-Replace;boundary=--frame", b"", b"frame\r\nX-Time: 1\r\n\r\n", b"\xff\r\n"),
        ("video/x-motion-jpeg", b"", b"", b""),
        ("application/octet-stream", b"", PART + b"\r\n", b"\r\n"),
        ("", b"", PART + b"\r\n", b"\r\n"),
    ],
)
def test_a_picture_of_a_camera_is_there_when_its_last_byte_is(
    kind: str, begin: bytes, before: bytes, after: bytes
) -> None:
    """Whatever the camera says of it, and though nothing comes after it."""
    seen = threading.Semaphore(0)

    def camera(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if kind:
            handler.send_header("Content-Type", kind)
        handler.end_headers()
        handler.wfile.write(begin)
        for number in range(3):
            handler.wfile.write(before + jpeg(number))
            assert seen.acquire(timeout=PATIENCE_S)
            handler.wfile.write(after)

    with http(camera) as url, LiveSource(url, LIMITS) as live:
        for number in range(3):
            frame = live.newest()
            assert frame is not None
            assert number_of(frame.image) == number
            seen.release()
        assert live.newest() is None
        assert "the connection has ended" in live.ended_by


def test_a_damaged_picture_is_passed_over() -> None:
    good = jpeg(1)
    damaged = b"\xff\xd8\xff\xda\x00\x02 no picture at all \xff\xd9"  # with a beginning and an end
    go_on = threading.Event()

    def camera(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(damaged)
        assert go_on.wait(PATIENCE_S)
        handler.wfile.write(good[:-500] + good)

    with http(camera) as url, LiveSource(url, LIMITS) as live:
        wait_for(lambda: live.num_frames)
        go_on.set()
        frame = live.newest()
        assert frame is not None
        assert number_of(frame.image) == 1
        assert live.newest() is None


BASIC = f"Basic {base64.b64encode(b'me:secret').decode()}"
DIGEST = 'Digest realm="camera", nonce="abc", qop="auth"'
UNKNOWN_DIGEST = DIGEST + ", algorithm=SHA-512-256"
"""RFC 7616 has it, the client does not."""


@contextmanager
def guarded(challenges: list[str], right: str) -> Iterator[tuple[str, list[str]]]:
    """A camera with a password, and what it was shown, a request a line."""
    showed: list[str] = []

    def camera(handler: BaseHTTPRequestHandler) -> None:
        showed.append(handler.headers.get("Authorization", ""))
        if not right or not showed[-1].startswith(right):
            handler.send_response(401)
            for challenge in challenges:
                handler.send_header("WWW-Authenticate", challenge)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        else:
            send_mjpeg(handler)

    with http(camera) as url:
        yield url, showed


@pytest.mark.parametrize(
    ("challenges", "right"),
    [
        (['Basic realm="camera"'], BASIC),
        ([], BASIC),
        ([DIGEST], 'Digest username="me"'),
        (['Basic realm="camera"', DIGEST], 'Digest username="me"'),
        ([f'Basic realm="camera", {DIGEST}'], 'Digest username="me"'),
        ([f'{DIGEST}, Basic realm="camera"'], 'Digest username="me"'),
        ([UNKNOWN_DIGEST, DIGEST], 'Digest username="me"'),
    ],
)
def test_a_camera_with_a_password_gets_it_when_it_asks_and_as_it_asks(challenges: list[str], right: str) -> None:
    with guarded(challenges, right) as (url, showed):
        assert frames_of(url.replace("//", "//me:secret@"), most=1)
        assert showed[0] == ""
        assert len(showed) == 2
        if "Digest" in right:
            assert 'uri="/stream.mjpg"' in showed[1]
            assert "secret" not in showed[1]


def test_a_wrong_password_is_refused_and_not_shown() -> None:
    with guarded(['Basic realm="camera"'], BASIC) as (url, showed):
        with pytest.raises(ClientError, match="401") as caught:
            frames_of(url.replace("//", "//you:wrong@"))
        assert len(showed) == 2
    assert "wrong" not in caught.value.message


@pytest.mark.parametrize(
    "challenge",
    [
        UNKNOWN_DIGEST,
        'Digest realm="camera", nonce="abc", qop="auth-int"',
        'Digest realm="camera", nonce="abc", qop="other"',
        'Digest realm="camera", nonce',
        "Digest nonce=abc",
        "Digest",
    ],
)
def test_a_challenge_that_cannot_be_answered_is_said(challenge: str) -> None:
    """And is not answered by Basic, which would show the password."""
    with guarded([challenge, 'Basic realm="camera"'], "") as (url, showed):
        with pytest.raises(ClientError, match="asks for the password in a way that is not known"):
            frames_of(url.replace("//", "//me:secret@"))
        assert showed == [""]


def test_a_password_is_for_its_own_camera() -> None:
    def away(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", elsewhere)
        handler.end_headers()
        handler.wfile.write(jpeg(0))  # nobody reads it

    with guarded(['Basic realm="camera"'], BASIC) as (elsewhere, showed), http(away) as url:
        with pytest.raises(ClientError, match="401"):
            frames_of(url.replace("//", "//me:secret@"))
        assert showed == [""]


def test_a_camera_may_lead_to_another_of_its_pages() -> None:
    asked: list[str] = []

    def camera(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        if handler.path == "/stream.mjpg":
            handler.send_response(302)
            handler.send_header("Location", "/there")
            handler.end_headers()
        elif handler.headers.get("Authorization") != BASIC:
            handler.send_response(401)
            handler.end_headers()
        else:
            send_mjpeg(handler)

    with http(camera) as url:
        assert frames_of(url.replace("//", "//me:secret@"), most=1)
    assert asked == ["/stream.mjpg", "/there", "/there"]


def test_redirects_have_an_end() -> None:
    def again(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/again")
        handler.end_headers()

    with http(again) as url, pytest.raises(ClientError, match="redirects too often"):
        frames_of(url)


@pytest.mark.parametrize("scheme", ["http", "rtsp"])
@pytest.mark.parametrize(
    ("rest", "name"),
    [
        ("//host/a", "//host/a"),
        ("//user:secret@host/a", "//host/a"),
        ("//user:sec@ret@host/a", "//host/a"),
        ("//user:sec/ret@host/a", "//host/a"),
        ("//user:sec//ret@host/a", "//host/a"),
        ("//user:sec?ret@host/a", "//host/a"),
        ("//user:sec\nret@host/a", "//host/a"),
        ("//host/a?user=me&pwd=secret", "//host/a"),
        ("//user:secret@host/a?pwd=secret#secret", "//host/a"),
        ("//host/a?pwd=sec@ret", "//ret"),
    ],
)
def test_an_address_is_shown_without_what_may_be_a_password(scheme: str, rest: str, name: str) -> None:
    assert live_source.shown(f"{scheme}:{rest}") == f"{scheme}:{name}"


@pytest.mark.parametrize(
    "address",
    ["http://user:sec/ret@127.0.0.1/", "http://user:secret@127.0.0.1:port/", f"http://user:secret@{'a' * 64}/"],
)
def test_an_address_that_is_none_is_refused_without_its_password(address: str) -> None:
    with pytest.raises(ClientError, match=r"cannot be read: it is not a valid address; .* write @ as %40") as caught:
        frames_of(address)
    assert "sec" not in caught.value.message
    assert "ret" not in caught.value.message


def test_a_header_that_cannot_be_sent_is_not_shown() -> None:
    with (
        guarded([DIGEST], "Digest") as (url, _),
        pytest.raises(ClientError, match="it cannot be asked for in HTTP") as caught,
    ):
        frames_of(url.replace("//", "//us%0Aer:secret@"))
    assert "us" not in caught.value.message.partition("cannot be read")[2]


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for proxy in ("socks5://127.0.0.1:9", "http://127.0.0.1:9", "nonsense"):
        monkeypatch.setenv("ALL_PROXY", proxy)
        monkeypatch.setenv("HTTP_PROXY", proxy)
        with http(send_mjpeg) as url:
            assert frames_of(url, most=1)


def test_what_the_client_stumbles_over_is_an_address_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a camera is tried again after it."""

    def fails(*_: object, **__: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(httpx.Client, "send", fails)
    with pytest.raises(ClientError, match=r"http://127\.0\.0\.1/ cannot be read: KeyError$"):
        frames_of("http://127.0.0.1/")


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_picture_for_which_there_is_no_memory(scheme: str, short_clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes a picture of a camera decodes it; of a file it is the thread."""

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(live_source, "decode" if scheme == "http" else "open_clip", fails)
    with http(send_mjpeg) as url, pytest.raises(ClientError, match="needs more memory"):
        frames_of(url if scheme == "http" else str(short_clip))


def test_who_leaves_a_camera_that_sends_no_picture_is_let_go() -> None:
    trickles, gone = threading.Event(), threading.Event()

    def camera(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"\r\n")
                trickles.set()
                time.sleep(0.01)
        except ConnectionError:
            gone.set()

    with http(camera) as url:
        with LiveSource(url, LIMITS) as live:
            assert trickles.wait(PATIENCE_S)
        assert gone.wait(PATIENCE_S)
        live._thread.join(PATIENCE_S)
        assert not live._thread.is_alive()
        assert live.newest() is None


def test_what_is_not_mjpeg_is_named() -> None:
    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        handler.wfile.write(b"<h1>A camera</h1>")

    with http(page) as url, pytest.raises(ClientError, match="it sends text/html, expected MJPEG"):
        frames_of(url)


def test_an_address_of_single_pictures_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_source, "_TIMEOUT_S", PATIENCE_S)
    numbers = count()
    wanted = threading.Semaphore(1)  # it would be asked every half second, and who is slow would miss some

    def camera(handler: BaseHTTPRequestHandler) -> None:
        assert wanted.acquire(timeout=PATIENCE_S)
        handler.send_response(200)
        handler.send_header("Content-Type", "image/jpeg")
        handler.end_headers()
        handler.wfile.write(jpeg(next(numbers)))

    with http(camera) as url, LiveSource(url, LIMITS, reconnect_s=2 * PATIENCE_S) as live:
        for number in range(2):
            frame = live.newest()
            assert frame is not None
            assert number_of(frame.image) == number
            wanted.release()


def test_mjpeg_over_http() -> None:
    enough = threading.Event()
    found: list[LiveFrame] = []
    with http(lambda handler: send_mjpeg(handler, enough)) as url, LiveSource(url, LIMITS) as live:
        while (frame := live.newest()) is not None:
            found.append(frame)
            if len(found) == 4:
                enough.set()
        assert live.ended_by  # cameras do not end by themselves
    numbers = [number_of(frame.image) for frame in found]
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 4
    assert found[0].image.size == SIZE


def test_a_camera_that_comes_back_is_read_on() -> None:
    with http(send_mjpeg) as url, LiveSource(url, LIMITS, reconnect_s=60) as live:
        found = [live.newest() for _ in range(11)]  # a connection has eight
    numbers = [number_of(frame.image) for frame in found if frame is not None]
    assert len(numbers) == 11
    assert any(later < number for number, later in pairwise(numbers))  # it began again
    assert all(later.at_s > frame.at_s for frame, later in pairwise(found) if frame and later)


def test_a_camera_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[int] = []

    def once(handler: BaseHTTPRequestHandler) -> None:
        answered.append(1)
        if len(answered) == 1:
            send_mjpeg(handler)
        else:
            handler.send_error(503)

    clock = Clock()
    monkeypatch.setattr(live_source, "time", clock)
    with http(once) as url:
        live = LiveSource(url, LIMITS, reconnect_s=1.4)
        live._stop = clock  # type: ignore[assignment]
        with live:
            assert all(frame is not None for frame in iter(live.newest, None))
            assert "it answers 503" in live.ended_by
    assert len(answered) == 2
    assert clock.now_s == pytest.approx(100.5), "a pause of half a second; the next one would have been too long"


def test_a_camera_that_asks_oddly_for_a_while_is_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[int] = []

    def camera(handler: BaseHTTPRequestHandler) -> None:
        answered.append(1)
        if len(answered) == 2:
            handler.send_response(401)
            handler.send_header("WWW-Authenticate", UNKNOWN_DIGEST)
            handler.end_headers()
        else:
            send_mjpeg(handler)

    clock = Clock()
    monkeypatch.setattr(live_source, "time", clock)
    with http(camera) as url:
        live = LiveSource(url.replace("//", "//me:secret@"), LIMITS, reconnect_s=60)
        live._stop = clock  # type: ignore[assignment]
        with live:
            while len(answered) < 3:
                assert live.newest() is not None


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
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody else listens there
        url = f"http://user:secret@127.0.0.1:{taken.getsockname()[1]}/stream.mjpg"
        with pytest.raises(ClientError, match="Connection refused") as caught:
            frames_of(url)
    assert "secret" not in caught.value.message


# ---- RTSP -----------------------------------------------------------------------------------------------------------


def units() -> list[list[bytes]]:
    """200 H.264 pictures as lists of units, each one a key frame."""
    codec: Any = av.CodecContext.create("libx264", "w")
    codec.width, codec.height, codec.pix_fmt = *SIZE, "yuv420p"
    codec.time_base, codec.gop_size = Fraction(1, 25), 1
    codec.options = {"preset": "ultrafast", "tune": "zerolatency", "bf": "0"}
    pictures = []
    for number in range(200):
        frame = av.VideoFrame.from_image(numbered(number))
        frame.pts = number
        for packet in codec.encode(frame):
            pictures.append([unit for unit in bytes(packet).replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1") if unit])
    return pictures


class Camera(socketserver.StreamRequestHandler):
    """The part of RTSP (RFC 2326) that a client needs which wants all over one connection."""

    more_tracks = ""

    def handle(self) -> None:
        with suppress(ConnectionError):
            self.serve(units())

    def serve(self, pictures: list[list[bytes]]) -> None:
        sets = ",".join(base64.b64encode(unit).decode() for unit in pictures[0] if unit[0] & 31 in (7, 8))
        sdp = (
            "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\nc=IN IP4 0.0.0.0\r\n"
            "a=rtpmap:96 H264/90000\r\na=control:track\r\n"
            f"a=fmtp:96 packetization-mode=1;sprop-parameter-sets={sets}\r\n{self.more_tracks}"
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
                "SETUP": (f"Session: 1\r\nTransport: {headers.get('transport')}\r\n", ""),
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


@contextmanager
def rtsp(camera: type[Camera]) -> Iterator[str]:
    """A camera on a free port."""
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), camera)
    server.daemon_threads = True  # a client that stays fails its test and holds up no other
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"rtsp://127.0.0.1:{server.server_address[1]}/camera"
    finally:
        server.shutdown()
        server.server_close()


def test_rtsp() -> None:
    with rtsp(Camera) as url:
        found = frames_of(url, most=3)
    assert len({number_of(frame.image) for frame in found}) == 3


def test_who_leaves_a_camera_that_only_sounds_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_source, "_TIMEOUT_S", PATIENCE_S)
    seen, sounds, gone = threading.Event(), threading.Event(), threading.Event()

    class Blinded(Camera):
        more_tracks = "m=audio 0 RTP/AVP 0\r\na=control:sound\r\n"

        def packet(self, channel: int, kind: int, sequence: int, time_stamp: int, data: bytes) -> None:
            header = struct.pack(">BBHII", 0x80, kind, sequence & 0xFFFF, time_stamp, 7 + channel)
            self.wfile.write(struct.pack(">cBH", b"$", channel, len(header) + len(data)) + header + data)

        def play(self, pictures: list[list[bytes]]) -> None:
            sequence = 0
            try:
                for number in count():
                    if not seen.is_set():
                        picture = pictures[number % len(pictures)]
                        for unit in picture:
                            self.packet(0, 96 | (0x80 if unit is picture[-1] else 0), sequence, number * 3600, unit)
                            sequence += 1
                    elif number % 20 == 0:
                        sounds.set()
                    self.packet(2, 0, number, number * 160, bytes(160))
                    time.sleep(0.01)
            except ConnectionError:
                gone.set()

    with rtsp(Blinded) as url:
        with LiveSource(url, LIMITS) as live:
            assert live.newest() is not None
            seen.set()
            assert sounds.wait(PATIENCE_S)
        assert gone.wait(PATIENCE_S)
        live._thread.join(PATIENCE_S)
        assert not live._thread.is_alive()


def test_who_has_seen_enough_does_not_wait_for_a_silent_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_source, "_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(live_source, "_LEAVE_S", 0.05)
    left = threading.Event()

    def camera(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(jpeg(0))
        left.wait(PATIENCE_S)

    with http(camera) as url:
        with LiveSource(url, LIMITS) as live:
            assert live.newest() is not None
        assert live._thread.is_alive()
        left.set()
        live._thread.join(PATIENCE_S)
        assert not live._thread.is_alive()


def test_a_camera_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_source, "_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # connections are made, and nobody answers
        for scheme in ("http", "rtsp"):
            with pytest.raises(ClientError, match=r"nothing came for 0\.2 s"):
                frames_of(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}/camera")
