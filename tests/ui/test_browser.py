"""The harness itself: a camera shows what was made, and nothing that goes wrong stays unseen."""

from __future__ import annotations

import base64
import io
import itertools
from pathlib import Path
from typing import Any

import browser as harness
import pytest
from browser import (
    NAMES,
    PICTURES,
    Visit,
    camera_file,
    chromium,
    find_browser,
    leaves_the_machine,
    luminance_ramp,
    ramp_number,
)
from PIL import Image
from serving import Served

_GRAB = """async ({count, pause}) => {
  const stream = await navigator.mediaDevices.getUserMedia({video: true});
  const video = document.createElement("video");
  video.srcObject = stream;
  await video.play();
  const canvas = document.createElement("canvas");
  canvas.width = video.videoWidth, canvas.height = video.videoHeight;
  const shots = [], times = [];
  for (let i = 0; i < count; i++) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    canvas.getContext("2d").drawImage(video, 0, 0);
    times.push(performance.now());
    shots.push(canvas.toDataURL("image/png"));
  }
  stream.getTracks().forEach((track) => track.stop());
  return [shots, times];
}"""


def grab(page: Any, count: int, pause_ms: int) -> tuple[list[Image.Image], list[float]]:
    """Pictures of the camera as a page gets them, and when it did, in ms."""
    shots, times = page.evaluate(_GRAB, {"count": count, "pause": pause_ms})
    return [Image.open(io.BytesIO(base64.b64decode(shot.partition(",")[2]))) for shot in shots], times


def test_a_camera_shows_the_picture_in_its_colours(served_ui: Served, tmp_path: Path) -> None:
    camera = camera_file(tmp_path / "shapes.y4m", [PICTURES / "shapes.png"])
    with chromium(camera) as browser:
        visit = Visit(browser, served_ui.url)
        seen = grab(visit.open("/health"), 1, 300)[0][0].convert("RGB")
        visit.close()
    made = Image.open(PICTURES / "shapes.png").convert("RGB")
    made.thumbnail(seen.size)
    left, top = (seen.width - made.width) // 2, (seen.height - made.height) // 2
    inside = seen.crop((left, top, left + made.width, top + made.height))
    pairs = zip(inside.resize((8, 8)).get_flattened_data(), made.resize((8, 8)).get_flattened_data(), strict=True)
    assert max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True)) < 40


def test_a_ramp_tells_when_a_picture_was_taken(served_ui: Served, tmp_path: Path) -> None:
    with chromium(luminance_ramp(tmp_path / "ramp.y4m", fps=20)) as browser:
        visit = Visit(browser, served_ui.url)
        shots, times = grab(visit.open("/health"), 16, 200)
        visit.close()
    numbers = [ramp_number(shot) for shot in shots]
    frames = [(after - before) / 50 for before, after in itertools.pairwise(times)]
    steps = [(after - before) % 64 for before, after in itertools.pairwise(numbers)]
    quick = [(step, most) for step, most in zip(steps, frames, strict=True) if most < 50]
    assert quick, "no two pictures within the camera's round of 3.2 s"
    assert all(step <= most + 3 for step, most in quick), (steps, frames, "no camera is faster than its frames")
    assert any(step > 0 for step, _ in quick)


def test_what_leaves_the_machine_is_known_by_its_address() -> None:
    inside = ("http://127.0.0.1:8000/ui", "ws://localhost:1/v1/stream", "data:text/plain,a", "blob:http://a.b/c")
    assert not any(map(leaves_the_machine, inside))
    assert all(map(leaves_the_machine, ("https://fonts.example/a.css", "http://192.0.2.1/", "wss://example.org")))


def test_a_visit_ends_badly_when_the_page_asks_elsewhere_or_complains(browser: Any, served_ui: Served) -> None:
    for script, complaint in (
        ("fetch('http://elsewhere.example/font.woff2', {mode: 'no-cors'}).catch(() => {})", "left the machine"),
        ("console.error('something is wrong')", "something is wrong"),
        ("setTimeout(() => { throw new Error('nobody caught this') })", "nobody caught this"),
    ):
        visit = Visit(browser, served_ui.url)
        page = visit.open("/health")
        page.evaluate(script)
        while not (visit.strangers or visit.errors):  # the test has its time
            page.wait_for_timeout(20)
        with pytest.raises(AssertionError, match=complaint):
            visit.close()


def test_any_of_the_names_that_chromium_goes_by_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(harness, "_playwrights_own", lambda: "playwright's")
    find = find_browser.__wrapped__
    assert find() == "playwright's"
    for name in reversed(NAMES):  # each is preferred to those after it
        (tmp_path / name).touch(mode=0o755)
        assert find() == str(tmp_path / name)
