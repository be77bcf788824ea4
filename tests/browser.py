"""A real browser as tests use it: Chromium with a camera that shows what a test made, and a record of what went wrong.

    with chromium(camera) as browser:                    # a camera file is Chromium's for as long as it runs
        visit = Visit(browser, served.url, viewport=PHONE)
        visit.open("/ui")
        …                                                # visit.page is playwright's
        visit.close()                                    # fails on console errors and on requests to other machines

Nothing gets out of the machine: names other than the loopback's are not resolved, and an attempt is a failure.
"""

from __future__ import annotations

import contextlib
import functools
import io
import ipaddress
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image, ImageOps
from serving import PATIENCE_S

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from playwright.sync_api import Browser, BrowserType, ConsoleMessage

ROOT: Final = Path(__file__).parents[1]
PICTURES: Final = ROOT / "samples" / "pictures"
CLIPS: Final = ROOT / "samples" / "clips"
NAMES: Final = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
"""What Chromium is called, in the order in which they are tried. Playwright's own comes last. First the one that has no
window, which is the same otherwise: a visit takes half the processor time of one that has.
"""
LAPTOP: Final = {"width": 1280, "height": 800}
PHONE: Final = {"width": 360, "height": 740}
PARTS: Final = [f"beholder-{name}" for name in ("header", "live", "picture", "placard", "engine")]
"""The elements that the page `/ui` is made of."""
_SWITCHES: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
_DARKEST, _BRIGHTEST = 16, 235
"""Luminance of black and white in a camera's frames."""


# ---- the browser ----------------------------------------------------------------------------------------------------


def require_browser() -> None:
    """Skips the test where there is no Chromium or no playwright."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[dev]')")
    if find_browser() is None:
        pytest.skip(
            f"no browser: none of {', '.join(NAMES)} is on the PATH, nor playwright's own (`playwright install`)"
        )


@functools.cache
def find_browser() -> str | None:
    """The browser's program: the system's, else the one that playwright has downloaded; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None) or _playwrights_own()


def _playwrights_own() -> str | None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


@contextlib.contextmanager
def chromium(camera: Path | None = None, *, refuse_camera: bool = False) -> Iterator[Browser]:
    """Chromium, headless, until the block ends.

    Args:
        camera: A file of `camera_file` or `luminance_ramp`, shown again and again; None has no camera.
        refuse_camera: Whether a page that asks for the camera is told no.
    """
    require_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, another(playwright.chromium, camera, refuse_camera=refuse_camera) as browser:
        yield browser


@contextlib.contextmanager
def another(kind: BrowserType, camera: Path | None = None, *, refuse_camera: bool = False) -> Iterator[Browser]:
    """One more beside a running one, whose `browser_type` is `kind`: playwright is started once in a thread."""
    switches = list(_SWITCHES)
    if camera is not None:
        switches += ["--use-fake-device-for-media-stream", f"--use-file-for-fake-video-capture={camera}"]
        switches.append("--use-fake-ui-for-media-stream" + ("=deny" if refuse_camera else ""))
    browser = kind.launch(executable_path=find_browser(), args=switches)
    try:
        yield browser
    finally:
        browser.close()


class Visit:
    """One person's visit: a browser context of its own (storage, permissions) with one page.

    Attributes:
        page: Playwright's page.
        errors: What the console told as errors, and exceptions that nobody caught.
        strangers: Addresses of other machines that the page wanted something from.
    """

    def __init__(
        self,
        browser: Browser,
        url: str,
        *,
        viewport: dict[str, int] | None = None,
        dark: bool = False,
        reduced_motion: bool = False,
        **options: Any,
    ) -> None:
        self.url = url
        self.errors: list[str] = []
        self.strangers: list[str] = []
        self._expected: list[re.Pattern[str]] = []
        self.context = browser.new_context(
            viewport=viewport or LAPTOP,  # type: ignore[arg-type]
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if reduced_motion else "no-preference",
            **options,
        )
        self.context.set_default_timeout(PATIENCE_S * 1e3)
        self.context.on("request", lambda request: self._note(request.url))
        self.page = self.new_page()

    def new_page(self) -> Any:
        """Another tab of the same person."""
        page = self.context.new_page()
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        page.on("websocket", lambda socket: self._note(socket.url))
        return page

    def open(self, path: str = "/ui", *, whole: bool = True) -> Any:
        """Go to a page of the server; gives playwright's page.

        Args:
            path: Of the page.
            whole: Whether to wait until every part of the page `/ui` is loaded: before, it hears no key, no drop and no
                click.
        """
        self.page.goto(self.url + path)
        if whole and path.partition("#")[0].partition("?")[0].rstrip("/") == "/ui":
            self.wait_for_parts()
        return self.page

    def wait_for_parts(self) -> None:
        """Returns once every part of the page `/ui` is loaded."""
        self.page.wait_for_function("(names) => names.every((name) => customElements.get(name))", arg=PARTS)

    def expect_errors(self, pattern: str) -> None:
        """Console errors that match are part of the test (a server that is killed makes some)."""
        self._expected.append(re.compile(pattern))

    def unexpected_errors(self) -> list[str]:
        """Console errors that no `expect_errors` foresaw."""
        return [error for error in self.errors if not any(pattern.search(error) for pattern in self._expected)]

    def close(self) -> None:
        """End the visit. Fails on unforeseen console errors and on requests to other machines."""
        self.context.close()
        assert not self.strangers, f"requests left the machine: {self.strangers}"
        assert not self.unexpected_errors(), f"console errors: {self.unexpected_errors()}"

    def _note(self, url: str) -> None:
        if leaves_the_machine(url):
            self.strangers.append(url)

    def _hear(self, message: ConsoleMessage) -> None:
        url = message.location.get("url", "")
        if message.type == "error" and not url.endswith("/favicon.ico"):  # what the browser asks of its own accord
            self.errors.append(f"{message.text} ({url})")


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Waits until it is so. Playwright calls handlers only while it is asked for something, so it is asked to wait."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, page.locator("body").inner_text()
        page.wait_for_timeout(50)


def leaves_the_machine(url: str) -> bool:
    """Whether a request of this address would go to another machine."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https", "ws", "wss"}:
        return False  # data:, blob: and about: stay inside the browser
    host = parts.hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


# ---- the camera -----------------------------------------------------------------------------------------------------


def camera_file(
    path: Path,
    pictures: Sequence[Path | Image.Image],
    *,
    fps: int = 10,
    hold_s: float = 0.2,
    size: tuple[int, int] = (640, 480),
) -> Path:
    """Makes a camera that shows pictures one after the other, each for `hold_s` seconds, over and over.

    A picture is fitted into the frame on white, never cut or squeezed. y4m, since Chromium shows MJPEG from some
    encoders as plain green.
    """
    frames = [_fitted(picture, size) for picture in pictures for _ in range(max(round(fps * hold_s), 1))]
    return _write(path, frames, fps)


def luminance_ramp(path: Path, *, fps: int = 20, num_frames: int = 64, size: tuple[int, int] = (320, 240)) -> Path:
    """Makes a camera whose frame *n* is plain grey as bright as n / num_frames: so a picture tells when it was taken.

    `ramp_number` reads it. The difference of two numbers, modulo `num_frames`, is their age in frames.
    """
    frames = []
    for number in range(num_frames):
        level = round(_DARKEST + (_BRIGHTEST - _DARKEST) * number / num_frames)
        frames.append(np.full((size[1], size[0]), level, dtype=np.uint8))
    return _write(path, [_grey(luminance) for luminance in frames], fps)


def ramp_number(picture: Image.Image, num_frames: int = 64) -> int:
    """The number of the frame of `luminance_ramp` that a picture shows."""
    return round(float(np.asarray(picture.convert("L")).mean()) / 255 * num_frames) % num_frames


Planes = tuple["NDArray[np.uint8]", "NDArray[np.uint8]", "NDArray[np.uint8]"]
"""Luminance at full size and both colour differences at half size, in the narrow range of television."""


def _fitted(picture: Path | Image.Image, size: tuple[int, int]) -> Planes:
    image = Image.open(picture) if isinstance(picture, Path) else picture
    inside = ImageOps.contain(image.convert("RGB"), size)
    frame = Image.new("RGB", size, "white")
    frame.paste(inside, ((size[0] - inside.width) // 2, (size[1] - inside.height) // 2))
    luminance, blue, red = (np.asarray(plane, dtype=np.float64) for plane in frame.convert("YCbCr").split())
    scale = (_BRIGHTEST - _DARKEST) / 255
    return (
        np.rint(_DARKEST + luminance * scale).astype(np.uint8),
        _halved(128 + (blue - 128) * 224 / 255),
        _halved(128 + (red - 128) * 224 / 255),
    )


def _halved(plane: NDArray[np.float64]) -> NDArray[np.uint8]:
    height, width = plane.shape
    return np.rint(plane.reshape(height // 2, 2, width // 2, 2).mean(axis=(1, 3))).astype(np.uint8)


def _grey(luminance: NDArray[np.uint8]) -> Planes:
    height, width = luminance.shape
    middle = np.full((height // 2, width // 2), 128, dtype=np.uint8)
    return luminance, middle, middle


def _write(path: Path, frames: Sequence[Planes], fps: int) -> Path:
    height, width = frames[0][0].shape
    with path.open("wb") as file:
        file.write(f"YUV4MPEG2 W{width} H{height} F{fps}:1 Ip A1:1 C420\n".encode())
        for planes in frames:
            file.write(b"FRAME\n" + b"".join(plane.tobytes() for plane in planes))
    return path


# ---- what moves ------------------------------------------------------------------------------------------------------


def watch_shifts(page: Any) -> None:
    """From now on what moves without having been asked to, or because it was, is noted."""
    page.evaluate(
        """() => {
          const name = ({ node }) => node?.className?.baseVal ?? node?.className ?? node?.nodeName ?? "gone";
          window.shifts = [];
          window.noteShifts = (entries) =>
            shifts.push(...entries.map(({ value, sources }) => [value, ...sources.map(name)]));
          window.shiftWatch = new PerformanceObserver((list) => noteShifts(list.getEntries()));
          shiftWatch.observe({ type: "layout-shift" });
        }"""
    )


def shifted(page: Any) -> list[list[Any]]:
    """What has moved since: `[share of the window, names of what moved …]`. All is drawn before this is told."""
    found: list[list[Any]] = page.evaluate(
        """async () => {
          for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
          noteShifts(shiftWatch.takeRecords());
          return shifts;
        }"""
    )
    return found


# ---- screenshots ----------------------------------------------------------------------------------------------------


def screenshot(page: Any, path: Path, *, max_bytes: int = 120_000, full_page: bool = False) -> Path:
    """Writes what the page shows as a WebP of at most `max_bytes`, for the README and for people who look."""
    shot = Image.open(io.BytesIO(page.screenshot(full_page=full_page))).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    for quality in (92, 85, 75, 65, 50):
        shot.save(path, "WEBP", quality=quality, method=6)
        if path.stat().st_size <= max_bytes:
            return path
    raise AssertionError(f"{path.name} has {path.stat().st_size:,} bytes at the lowest quality; at most {max_bytes:,}")
