"""What stands at `/` and `/ui` without a browser: when Gradio is imported, what passes to it, what comes without it."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from fastapi import FastAPI
from serving import PATIENCE_S, Served
from starlette.testclient import TestClient

from ui.app import mount
from ui.kept import Kept, _num_bytes

PAGE = re.compile("<gradio-app|gradio_config")


needs_gradio = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="gradio is not installed")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = FastAPI()
    mount(app, str(tmp_path))
    with TestClient(app, follow_redirects=False) as client:
        yield client


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of which the page is there already, for tests that only read."""
    app = FastAPI()
    mount(app, str(tmp_path_factory.mktemp("opened")))
    with TestClient(app, follow_redirects=False) as client:
        page_of(client)
        yield client


def page_of(client: TestClient) -> str:
    """The page once it is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not PAGE.search(text := client.get("/ui/").text):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return text


@pytest.mark.parametrize("path", ["/", "/ui"])
def test_addresses_that_people_type_lead_to_the_page(path: str, client: TestClient):
    answer = client.get(path)
    assert answer.is_redirect
    assert str(answer.next_request.url) == "http://testserver/ui/"  # type: ignore[union-attr]


def test_the_page_says_that_it_is_coming_and_then_comes(client: TestClient):
    if "gradio" not in sys.modules:
        first = client.get("/ui/")
        assert "http-equiv" in first.text
        assert first.headers["cache-control"] == "no-store"
    assert "Beholder" in page_of(client)


@needs_gradio
def test_a_page_that_is_there_keeps_nobody_awake(client: TestClient):
    """Nothing of Gradio's runs on the server's loop, whose queue woke it a thousand times a second."""

    async def running() -> list[str]:
        return [repr(task) for task in asyncio.all_tasks()]  # with the file that runs

    page_of(client)
    assert client.portal is not None
    assert not [task for task in client.portal.call(running) if "/gradio/" in task]


@needs_gradio
def test_nothing_but_reading_passes_to_gradio(client: TestClient, tmp_path: Path):
    page_of(client)
    assert client.post("/ui/gradio_api/upload", files={"files": b"x"}).status_code == 404
    assert client.post("/ui/gradio_api/queue/join", json={}).status_code == 404
    assert client.get("/ui/gradio_api/file=/etc/hostname").status_code == 404
    assert client.get("/ui/gradio_api/heartbeat/x").status_code == 404
    assert client.post("/ui/").status_code == 404
    assert client.get("/ui/own/../app.py").status_code == 404
    assert client.get("/ui/own/%2e%2e/app.py").status_code == 404
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@needs_gradio
@pytest.mark.parametrize("name", ["a" * 256, "é" * 200, "a/" * 2100, "%00", "%ff", "%ed%a0%80"])
@pytest.mark.parametrize("folder", ["assets", "static", "own"])
def test_what_no_file_can_be_called_is_not_there(folder: str, name: str, opened: TestClient):
    assert opened.get(f"/ui/{folder}/{name}").status_code == 404


def test_the_page_may_load_and_call_nothing_but_this_server(client: TestClient):
    for path in ("/ui/own/main.js", "/ui/"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "connect-src 'self';" in policy
        assert not re.search(r"https?:|\*", policy)


@needs_gradio
@pytest.mark.parametrize(
    "told", [{}, {"host": "10.0.0.7:1"}, {"x-forwarded-host": "a.example", "x-forwarded-proto": "https"}]
)
def test_the_page_finds_its_address_in_the_browser_whatever_a_proxy_tells(opened: TestClient, told: dict[str, str]):
    page = opened.get("/ui/", headers={**told, "accept-encoding": "gzip, br"})
    assert int(page.headers["content-length"]) == len(page.content)
    assert page.text.count('new URL(".", location)') == 2, "the configuration's and that of a script"
    assert not re.search("testserver|10.0.0.7|a.example|[.]invalid", page.text)
    assert opened.head("/ui/").status_code == 200


@needs_gradio
def test_files_of_gradio_are_the_same_every_time_and_not_sent_to_who_has_them(opened: TestClient):
    path = re.search(r"assets/[\w.-]+[.]js", opened.get("/ui/").text)
    assert path is not None
    plain = {"accept-encoding": "identity"}
    for headers in (plain, {"accept-encoding": "gzip, br"}, {"accept-encoding": "gzip"}):
        first, again = (opened.get(f"/ui/{path[0]}", headers=headers) for _ in range(2))
        assert first.status_code == again.status_code == 200
        assert first.headers == again.headers
        assert first.content == again.content == opened.get(f"/ui/{path[0]}", headers=plain).content
        assert again.headers.get("content-encoding", "identity") in headers["accept-encoding"]
        known = opened.get(f"/ui/{path[0]}", headers={**headers, "if-none-match": again.headers["etag"]})
        assert (known.status_code, known.content) == (304, b"")
        assert known.headers["etag"] == again.headers["etag"]
        assert known.headers["content-security-policy"] == again.headers["content-security-policy"]
    assert opened.head(f"/ui/{path[0]}").status_code in {200, 405}
    assert opened.get(f"/ui/{path[0]}", headers={**plain, "range": "bytes=0-9"}).content == first.content[:10]
    for _ in range(2):
        assert opened.get("/ui/assets/nowhere.js").status_code == 404


@pytest.mark.parametrize("room", [1 << 20, 5], ids=["kept", "no-room"])
def test_what_is_kept_is_asked_for_once_and_has_a_bound(room: int, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        status = 500 if "broken" in scope["path"] else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-path", scope["path"].encode())]})
        for more_body in (True, False):
            await send({"type": "http.response.body", "body": scope["path"].encode(), "more_body": more_body})

    monkeypatch.setattr("ui.kept.MOST_BYTES", room)
    client = TestClient(Kept(app, "/ui"))
    for path in ("/ui/assets/a.js", "/ui/assets/broken.js", "/ui/config"):
        for _ in range(3):
            answer = client.get(path)
            assert (answer.text, answer.headers["x-path"]) == (2 * path, path)
    assert asked.count("/ui/assets/a.js") == (1 if room > 5 else 3)
    assert asked.count("/ui/assets/broken.js") == asked.count("/ui/config") == 3


class Files:
    """Answers everything with a file of `body`, as Gradio does, and counts how often it is asked."""

    headers: tuple[tuple[bytes, bytes], ...] = (
        (b"etag", b'"tag"'),
        (b"cache-control", b"max-age=9"),
        (b"expires", b"Thu, 01 Jan 2099 00:00:00 GMT"),
        (b"content-location", b"/elsewhere.js"),
        (b"content-type", b"text/javascript"),
    )

    def __init__(self, body: bytes = b"file") -> None:
        self.body = body
        self.num_asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        await send({"type": "http.response.start", "status": 200, "headers": list(self.headers)})
        await send({"type": "http.response.body", "body": self.body})


@pytest.mark.parametrize("body", [b"", b"file"])
def test_whatever_clients_accept_three_encodings_of_a_file_are_kept(body: bytes):
    files = Files(body)
    kept = Kept(files, "/ui")

    async def ask() -> None:  # in one loop: `TestClient` starts and ends a thread for each
        transport = httpx.ASGITransport(kept)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            for number in range(1000):
                accepted = ("br", "gzip", "identity")[number % 3]
                answer = await client.get("/ui/assets/x.js", headers={"accept-encoding": f"{accepted};q=0.{number}"})
                assert answer.content == body

    asyncio.run(ask())
    assert files.num_asked == len(kept._answers) == 3


@pytest.mark.parametrize("path", ["/./x.js", "//x.js", "/a/x.js", "/x%20.js", "/%C3%A9.js", "/x.js%0A", "/"])
def test_only_plain_names_of_files_are_kept(path: str):
    files = Files()
    kept = Kept(files, "/ui")
    scope = {"type": "http", "method": "GET", "path": unquote(f"/ui/assets{path}"), "headers": []}
    for _ in range(2):
        asyncio.run(kept(scope, None, lambda message: asyncio.sleep(0)))  # type: ignore[arg-type]
    assert files.num_asked == 2
    assert not kept._answers


def test_what_another_site_asks_for_is_not_kept():
    """Who may read it is in its headers."""
    files = Files()
    client = TestClient(Kept(files, "/ui"))
    for origin in ({"origin": "http://a.example"}, {}):
        client.get("/ui/assets/x.js", headers=origin)
    assert files.num_asked == 2


def test_what_was_not_asked_for_longest_leaves_when_there_is_no_room(monkeypatch: pytest.MonkeyPatch):
    files = Files(bytes(1000))
    monkeypatch.setattr("ui.kept.MOST_BYTES", 3 * 4000)
    kept = Kept(files, "/ui")
    client = TestClient(kept)
    for name in ("a", "b", "c", "a", "d"):
        client.get(f"/ui/assets/{name}.js")
        assert sum(_num_bytes(*answer) for answer in kept._answers.values()) + kept._room == 3 * 4000
    assert files.num_asked == 4
    client.get("/ui/assets/a.js")
    assert files.num_asked == 4
    client.get("/ui/assets/b.js")
    assert files.num_asked == 5


@pytest.mark.parametrize(
    ("asked", "is_known"),
    [
        ('"tag"', True),
        ('W/"tag"', True),
        ('"a", "tag"', True),
        ('"a",W/"tag" ,"b"', True),
        ("*", True),
        ('"tag2"', False),
        ('"a"tag"', False),
        ("tag", False),
        ("", False),
    ],
)
def test_who_has_a_file_hears_what_still_holds_of_it(asked: str, is_known: bool):
    client = TestClient(Kept(Files(), "/ui"))
    whole = client.get("/ui/assets/x.js")
    answer = client.get("/ui/assets/x.js", headers={"if-none-match": asked})
    assert (answer.status_code, answer.content) == ((304, b"") if is_known else (200, b"file"))
    assert {**answer.headers, "content-type": "text/javascript"} == dict(whole.headers)
    assert ("content-type" in answer.headers) != is_known


def test_the_manifest_that_the_page_asks_for_names_it_and_an_icon_that_is_there(client: TestClient):
    answer = client.get("/manifest.json")
    assert answer.headers["content-type"] == "application/manifest+json"
    manifest = answer.json()
    assert manifest["name"] == "Beholder"
    assert client.get("/" + manifest["start_url"]).status_code in {200, 404}
    for icon in manifest["icons"]:
        assert client.get("/" + icon["src"]).headers["content-type"].startswith(icon["type"])


def test_without_gradio_the_page_says_how_to_install_it(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = client.get("/ui/")
    assert answer.status_code == 404
    assert "pip install 'beholder[ui]'" in answer.text
    assert client.get("/ui/own/main.js").status_code == 200


@pytest.mark.parametrize(
    ("modules", "absent"),
    [("server.process", ("ui", "gradio", "torch")), ("ui.app", ("gradio", "pandas", "torch")), ("ui.page", ("torch",))],
)
def test_imports_point_one_way_and_wait_until_they_are_needed(modules: str, absent: tuple[str, ...]):
    code = f"import sys, {modules}; sys.exit(bool({set(absent)!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=150, check=False).returncode == 0


def test_a_server_without_the_page_has_its_api_all_the_same(tiny_model: Path):
    with Served(tiny_model, shell='exec "$@" --no-ui') as served:
        assert served.client.get("/ready").status_code == 200
        for path in ("/", "/ui", "/ui/", "/ui/own/main.js"):
            answer = served.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "ui_off")
            assert "--no-ui" in answer.json()["error"]["message"]
