"""The HTTP application: routes, and what stands before and after every one of them.

RequestIds ─▶ Security ─▶ Faults ─▶ FastAPI ─▶ route        (pure ASGI all the way, so streams and disconnects pass)
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Final

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from preprocess.errors import BeholderError, ClientError
from server.faults import error_response, internal_error
from server.image_store import ImageStore
from server.metrics import Metrics
from server.routes import about, captions, chat, decisions, images, operations, presets, previews, realtime, stream
from server.routes.connection import ClientGone
from server.routes.context import Context
from server.security import Security
from server.service import Service
from server.settings import MEBIBYTE, Settings
from server.stream.hub import Hub
from server.stream.tickets import Tickets
from server.version import installed_version

CLIENT_CLOSED_REQUEST: Final = 499
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_log = logging.getLogger("beholder.server")


def create_app(settings: Settings, service: Service) -> FastAPI:
    """The application over a service: the dispatcher, an offline one, or a test's.

    Args:
        settings: Resolved settings; `model_name` is what `/v1/models` shows.
        service: Does the work. Its `stats` and `state` are read whenever somebody asks.
    """
    version = installed_version()
    metrics = Metrics(settings.model_name, service, settings.arena_bytes)
    uploads = ImageStore(int(settings.image_store_mb * MEBIBYTE), settings.image_ttl_s)
    context = Context(settings, service, metrics, version, created_s=int(time.time()), images=uploads)
    # Request models are msgspec's, so FastAPI has no schema to show; its pages would load scripts from elsewhere. And
    # routes are Starlette's (`add_route`): FastAPI's own look for dependencies first, as long as half a request's way.
    app = FastAPI(
        title="Beholder", version=version, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.state.context = context
    app.include_router(chat.router(context))
    app.include_router(captions.router(context))
    app.include_router(decisions.router(context))
    app.include_router(images.router(context))
    app.include_router(presets.router(context))
    app.include_router(previews.router(context))
    app.include_router(operations.router(context))
    app.include_router(about.router(context))
    tickets = Tickets()
    app.state.streams = Hub(context)
    app.include_router(stream.router(app.state.streams, tickets))
    app.include_router(realtime.router(app.state.streams))

    async def on_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, BeholderError)
        metrics.refused(error)
        return error_response(error)

    app.router.default = _nowhere
    app.add_exception_handler(BeholderError, on_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(Faults)
    app.add_middleware(Security, settings=settings, tickets=tickets)
    app.add_middleware(RequestIds)
    return app


class RequestIds:
    """Gives every request an id, the client's own if it sent a sane `x-request-id`, echoes it, and logs the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with ``scope["state"]["request_id"]`` set."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in {"http.response.start", "websocket.accept"}:
                MutableHeaders(scope=message)["x-request-id"] = request_id
                status = message.get("status", 101)
            await send(message)

        started = time.monotonic()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.INFO if scope["path"].startswith("/v1/") else logging.DEBUG  # probes come all the time
            elapsed_ms = (time.monotonic() - started) * 1e3
            _log.log(
                level, "%s %r %s in %.0f ms, %s", scope.get("method", ""), scope["path"], status, elapsed_ms, request_id
            )


class Faults:
    """Turns what no route foresaw into a 500 that tells the client nothing, and the log everything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and answer for it when it fails before its response began."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            request_id = scope["state"]["request_id"]
            _log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if started:
                raise
            await error_response(internal_error(request_id))(scope, receive, send)


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    """Where there is no route. A WebSocket would be told 403, as if it had lacked a key."""
    if scope["type"] != "websocket":
        raise HTTPException(404)
    refusal = ClientError(f"There is no WebSocket {scope['path'][:200]} here.", status=404, code="not_found")
    await WebSocket(scope, receive, send).send_denial_response(error_response(refusal))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = f"{request.method[:20]} {request.url.path[:200]}"
    if error.status_code == 404:
        refusal = ClientError(f"There is no {what} here.", status=404, code="not_found")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("allow", (error.headers or {}).get("Allow", "another method"))
        refusal = ClientError(f"{what} is not possible; expected {allowed}.", status=405, code="method_not_allowed")
    else:
        refusal = ClientError(str(error.detail), status=error.status_code, code="bad_request")
    return error_response(refusal, dict(error.headers or {}))
