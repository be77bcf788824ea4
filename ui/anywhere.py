"""The page finds out its own address in the browser, so that it holds below any path of any proxy.

Gradio writes the address that it believes to have into its page, from headers that a proxy may have changed or left
out; style sheets then are asked for where nothing is. Here it hears `NOWHERE` as its host, and what stands for that in
the page that leaves is an expression of the place that the browser has it from.
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NOWHERE: Final = "the-page.invalid"
HERE: Final = 'new URL(".", location).href.slice(0, -1)'
"""JavaScript: the folder of the page, without the slash at its end."""


class Anywhere:
    """ASGI application: `app` with Gradio's page at `path` in it, from which its address is taken out."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._page = f"{path}/"
        self._told = f'"http://{NOWHERE}{path}"'.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["path"] != self._page:
            await self._app(scope, receive, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if not _tells_an_address(name)]
        scope = {**scope, "scheme": "http", "headers": [*headers, (b"host", NOWHERE.encode())]}
        start: Message | None = None
        page = b""

        async def sent(message: Message) -> None:
            nonlocal start, page
            if message["type"] == "http.response.start":
                start = message
                return
            page += message.get("body", b"")
            if message.get("more_body") or start is None:
                return
            whole = page.replace(self._told, HERE.encode())
            if scope["method"] != "HEAD":
                MutableHeaders(scope=start)["content-length"] = str(len(whole))
            await send(start)
            await send({"type": "http.response.body", "body": whole})

        await self._app(scope, receive, sent)


def _tells_an_address(name: bytes) -> bool:
    # and compressed pages could not be read here
    return name in {b"host", b"accept-encoding"} or name.startswith(b"x-forwarded-")
