"""The sample client in a real page: Chromium's camera shows sample pictures, the bundled model says what is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from browser import PICTURES, ROOT, Visit, camera_file, chromium, require_browser
from serving import Served
from streaming import check_event

CLIENT = ROOT / "samples" / "clients" / "live.mjs"
KEY = "sesame"
PAGE = """<!doctype html><title>live</title>
<video id="camera" autoplay muted playsinline></video> <p id="caption"></p>
<script type="module">
  import { live, camera } from "./live.mjs";
  const caption = document.getElementById("caption");
  window.events = [];
  window.sockets = [];
  const Real = WebSocket;
  window.WebSocket = class extends Real { constructor(...given) { super(...given); sockets.push(this); } };
  window.start = async (session) => {
    live({ url: server, source: await camera(document.getElementById("camera")), session,
           ticket: window.ticket, onText: (text) => { caption.textContent = text; },
           onEvent: (event) => events.push(event) }).catch((error) => { window.failure = error.message; });
  };
</script>"""


class Pages(BaseHTTPRequestHandler):
    """Somebody's own web server: gives the page and the sample client beside it."""

    files: ClassVar = {"/": (PAGE, "text/html"), "/live.mjs": (CLIENT.read_text(), "text/javascript")}

    def do_GET(self) -> None:
        body, kind = self.files.get(self.path, ("", "text/plain"))
        self.send_response(200 if body else 404)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test's output is for its failures."""


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Where the page comes from: another origin than the server's, as the sample is meant to be used."""
    require_browser()
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def served(origin: str) -> Iterator[Served]:
    with Served(ROOT / "samples" / "model", api_key=KEY, allowed_origins=origin) as server:
        server.client.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture(scope="module")
def browser(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Its camera shows the kitchen for three seconds, then the penguins for as long."""
    pictures = [PICTURES / "kitchen.jpg", PICTURES / "penguins.jpg"]
    with chromium(camera_file(tmp_path_factory.mktemp("camera") / "camera.y4m", pictures, hold_s=3)) as browser:
        yield browser


@pytest.fixture
def page(served: Served, origin: str, browser: Any) -> Iterator[Any]:
    """The page, which gets its tickets from somebody who has the key."""
    visit = Visit(browser, origin)
    visit.page.expose_function("ticket", lambda: served.client.post("/v1/stream/tickets").json()["ticket"])
    visit.page.add_init_script(f"window.server = '{served.url}';")
    visit.open("/")
    visit.page.wait_for_function("() => window.start")
    yield visit.page
    visit.close()


def heard(page: Any) -> list[dict[str, Any]]:
    """Every event of the session, each as the schema says."""
    events: list[dict[str, Any]] = page.evaluate("() => window.events")
    for event in events:
        check_event(event)
    assert page.evaluate("() => window.failure") is None
    return events


def said(page: Any) -> list[str]:
    """Whole captions."""
    return [e["text"] for e in heard(page) if e["type"] == "response.done" and e["status"] == "completed"]


def test_a_page_captions_what_its_camera_shows_and_only_when_it_changes(page: Any) -> None:
    page.evaluate("() => start({ trigger: { mode: 'on_change', change_threshold: 8 }, max_pixels: 100000 })")
    for word in ("penguin", "lemon"):
        page.wait_for_function(
            """(word) => document.getElementById('caption').textContent.includes(word)
              && events.some((e) => e.type === 'response.done' && e.status === 'completed' && e.text.includes(word))""",
            arg=word,
        )
    texts = said(page)
    assert any("lemon" in text and "teapot" in text for text in texts), texts
    assert any("penguin" in text for text in texts), texts
    page.wait_for_function(  # a scene stands for three seconds: most of its frames are like the one before
        """() => (events.findLast((e) => e.type === 'frames.stats')?.dropped.unchanged ?? 0)
          > events.filter((e) => e.type === 'response.done').length"""
    )
    stats = [event for event in heard(page) if event["type"] == "frames.stats"][-1]
    assert stats["received"] == stats["captioned"] + sum(stats["dropped"].values()) + stats["pending"]
    taken_ms = page.evaluate("() => performance.now()")
    assert all(0 < event["frame_age_ms"] < taken_ms for event in heard(page) if event["type"] == "response.done")


def test_a_preset_of_the_server_gives_the_page_its_shape(page: Any) -> None:
    page.evaluate("() => start({ preset: 'list_objects', max_tokens: 96 })")
    page.wait_for_function("() => events.filter((e) => e.type === 'response.done').length > 2")
    answers = [json.loads(text) for text in said(page)]
    assert answers
    assert all(
        [*answer] == ["objects"] and all(isinstance(one, str) for one in answer["objects"]) for answer in answers
    )


def test_a_page_comes_back_after_its_connection_was_lost(page: Any) -> None:
    page.evaluate("() => start({ preset: 'one_line' })")
    page.wait_for_function("() => events.some((e) => e.type === 'response.done')")
    page.evaluate("() => sockets[0].close(4000)")  # not a code by which one leaves
    page.wait_for_function("() => events.some((e) => e.type === 'session.resumed')")
    before = len(said(page))
    page.wait_for_function(
        "(n) => events.filter((e) => e.type === 'response.done' && e.status === 'completed').length > n",
        arg=before,
    )
    numbers = [event["seq"] for event in heard(page) if event["seq"]]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_page_that_is_left_frees_its_session(served: Served, page: Any) -> None:
    page.evaluate("() => start({})")
    page.wait_for_function("() => events.some((e) => e.type === 'response.created')")
    page.close()
    served.wait_for(lambda: served.metric("beholder_stream_sessions") == 0)
