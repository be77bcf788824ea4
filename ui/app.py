"""The door to the web UI: what answers `/` and everything below `/ui` in the server process.

`own/` is our folder of static files, always there. Everything else is Gradio's, which takes seconds and 130 MB to
import: that happens in a thread when the first person comes, so that a server nobody looks at pays nothing and `/ready`
waits for nobody. Meanwhile the page says that it is coming.

Nothing but reading passes to Gradio: the elements of the page call the public API themselves, under its keys and
limits, so uploads, queues and proxies of Gradio's have no work to do here and stay shut. What it does from its start on
is never begun: its queue asks a thousand times a second whether somebody came.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preprocess.errors import ClientError
from server.faults import error_response
from ui import qr

PATH: Final = "/ui"
STATIC: Final = Path(__file__).with_name("static")
HEADERS: Final = {
    # The page and all that it loads come from here, and nothing that it shows can send elsewhere.
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' blob: data:; media-src 'self' blob: data:; font-src 'self' data:; connect-src 'self'; "
        "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
ASK_AGAIN: Final = "no-cache"
"""By its etag, so that no page mixes versions."""
FONTS_STAY: Final = "max-age=86400"
"""Browsers want them anew whenever a window's size changes the style; until they come, all text looks different."""
MOST_NAME_BYTES: Final = 255
"""Longer paths name nothing of Gradio's: it asks the system for them all the same, which refuses such names."""
POLITE_S: Final = 0.0005
"""How long the import may hold the interpreter while requests wait."""
_log = logging.getLogger("beholder.ui")


def mount(app: FastAPI, scratch: str) -> Ui:
    """Adds the routes of the web UI to the server's application.

    Args:
        app: The server's application, before it starts.
        scratch: A private folder that goes away with the server.
    """
    ui = Ui(scratch)
    for path in ("/", PATH):
        app.add_route(path, _to_the_page, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_route("/favicon.ico", _icon, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_route("/manifest.json", _manifest, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount(PATH, ui)
    outer = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[object]:
        async with outer(app) as state:
            try:
                yield state
            finally:
                await ui.close()

    app.router.lifespan_context = lifespan  # type: ignore[assignment]
    return ui


class Ui:
    """ASGI application of everything below `/ui`."""

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._own = StaticFiles(directory=STATIC)
        self._loading: asyncio.Task[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root)
        scope = {**scope, "root_path": root.removesuffix(PATH)}  # as before the mount: Gradio's page has its own
        app = await self._answer(path, scope)
        await app(scope, receive, _with_headers(send, FONTS_STAY if path.endswith(".woff2") else ASK_AGAIN))

    async def _answer(self, path: str, scope: Scope) -> ASGIApp:
        if path.startswith("/own/"):
            scope["path"], scope["root_path"] = path.removeprefix("/own"), ""
            return self._own
        if path == "/qr.svg":
            return qr.answer(scope)
        is_name = len(path.encode()) <= MOST_NAME_BYTES
        if scope["method"] not in {"GET", "HEAD"} or path.startswith("/gradio_api/") or not is_name:
            return error_response(
                ClientError("The web UI has no such route; the API is below /v1.", status=404, code="not_found")
            )
        if importlib.util.find_spec("gradio") is None:
            return FileResponse(STATIC / "missing.html", 404)
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())
        if path == "/" and not self._loading.done():
            return FileResponse(STATIC / "waiting.html", headers={"cache-control": "no-store"})
        return await asyncio.shield(self._loading)

    async def _load(self) -> ASGIApp:
        loop = asyncio.get_running_loop()
        began = loop.time()
        page = await asyncio.to_thread(_import_and_build, self._scratch)
        _log.info("the web UI is loaded after %.1f s", loop.time() - began)
        return page

    async def close(self) -> None:
        """Wait for whoever loads it."""
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)


def _import_and_build(scratch: str) -> FastAPI:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(POLITE_S)  # the event loop asks for the interpreter more often than an import gives it up
    try:
        from ui.page import build  # Gradio, pandas and numpy: seconds

        return build(PATH, scratch)
    finally:
        sys.setswitchinterval(usual_s)


async def _to_the_page(request: Request) -> Response:
    return RedirectResponse("ui/")  # relative, so that it holds behind any proxy


async def _icon(request: Request) -> Response:
    return FileResponse(STATIC / "icon.svg")


async def _manifest(request: Request) -> Response:
    """What Gradio's page asks for: how a browser that installs it names it. Addresses are relative to this one's."""
    manifest = {
        "name": "Beholder",
        "start_url": "ui/",
        "display": "standalone",
        "icons": [{"src": "favicon.ico", "sizes": "any", "type": "image/svg+xml"}],
    }
    return JSONResponse(manifest, media_type="application/manifest+json")


def _with_headers(send: Send, cache: str) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", cache)
        await send(message)

    return send_with_headers
