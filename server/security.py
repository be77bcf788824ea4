"""Who may call: the Host check, the Origin check with CORS, and the API key. Pure ASGI, so streams stay streams.

Why a server on 127.0.0.1 needs this: every web page that its user visits can send requests there.

Host     A page may rebind its own name to 127.0.0.1 and then read answers as "same origin"; its requests then carry
         that name. So a *name* is accepted only if it is localhost, `--host`, or one of `--allowed-hosts`. An IP
         address in Host cannot be a rebound name: a loopback address is always accepted, any address when `--host`
         listens on every interface (0.0.0.0, ::), else the address listened on. With `--api-key`, any Host is accepted
         on every interface, since a page does not know the key.
Origin   A request that a browser says comes from another origin (`null` included) is refused unless that origin is in
         `--allowed-origins`. This stops "simple" requests too, which browsers send without asking first.
         For WebSockets both answer the handshake with 403; a browser shows its page nothing of it.
API key  `Authorization: Bearer KEY` for everything below /v1 and for /metrics (what is asked, and how often, is
         nobody's business); /health, /ready and /version stay open for probes. A WebSocket may show a one-time ticket
         instead (`server.stream.tickets`); without either it is accepted and closed at once with 4401, since a page
         learns nothing from a refused handshake.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from preprocess.errors import ClientError
from server.faults import error_response
from server.settings import Settings
from server.stream.tickets import PREFIX as TICKET_PREFIX
from server.stream.tickets import Tickets

_DEFAULT_PORTS: Final = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_PREFLIGHT_AGE_S: Final = 600
UNAUTHENTICATED: Final = 4401
"""Close code of a WebSocket that shows no right key and no good ticket."""


class Security:
    """ASGI middleware that refuses before anything else happens."""

    def __init__(self, app: ASGIApp, settings: Settings, tickets: Tickets | None = None) -> None:
        self._app = app
        self._tickets = tickets or Tickets()
        self._key = settings.api_key.encode()
        self._bound = settings.host.strip("[]").lower()
        self._bound_to_all = self._bound in {"0.0.0.0", "::", "*"}
        self._hosts = frozenset(_host_of(host) or host.lower() for host in settings.allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        try:
            self._check_host(headers)
            cross_origin = self._check_origin(headers, origin)
            if cross_origin and origin is not None:
                send = _with_cors(send, origin)
                if scope["type"] == "http" and scope["method"] == "OPTIONS":
                    await _preflight(headers)(scope, receive, send)
                    return
            if scope["type"] == "http" or not self._tickets.redeem(scope.get("subprotocols", [])):
                self._check_key(scope["path"], headers)
        except ClientError as error:
            if scope["type"] == "websocket":
                await _refuse_websocket(error, scope, send)
                return
            challenge = {"www-authenticate": "Bearer"} if error.status == 401 else None
            await error_response(error, challenge)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        if not given:  # HTTP/1.0 probes; every browser sends it.
            return
        host = _host_of(given[0]) if len(given) == 1 else None
        if host is not None and self._accepts_host(host):
            return
        raise ClientError(
            f"This server does not answer to the host name {', '.join(given)[:200]!r}. If it is yours, start the "
            "server with --allowed-hosts NAME.",
            status=403,
            code="host_not_allowed",
        )

    def _accepts_host(self, host: str) -> bool:
        if "*" in self._hosts or host in self._hosts or host in {"localhost", self._bound}:
            return True
        if self._bound_to_all and self._key:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host.endswith(".localhost")
        return self._bound_to_all or address.is_loopback

    def _check_origin(self, headers: Headers, origin: str | None) -> bool:
        """Whether this is a call from another, allowed origin."""
        if origin is None:
            return False
        if len(headers.getlist("origin")) == 1:
            if _same_origin(origin, headers.get("host", "")):
                return False
            if "*" in self._origins or origin.lower() in self._origins:
                return True
        raise ClientError(
            f"Pages of the origin {origin[:200]!r} may not call this server. If they shall, start it with "
            "--allowed-origins ORIGIN.",
            status=403,
            code="origin_not_allowed",
        )

    def _check_key(self, path: str, headers: Headers) -> None:
        protected = path == "/metrics" or path == "/v1" or path.startswith("/v1/")
        if not self._key or not protected:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if not token or scheme.lower() != "bearer":
            raise ClientError(
                "This server needs an API key: send the header 'Authorization: Bearer KEY'.",
                status=401,
                code="missing_api_key",
            )
        if not hmac.compare_digest(token.strip().encode("latin-1", "replace"), self._key):
            raise ClientError(
                "The API key is not right; expected the one that the server was started with (--api-key).",
                status=401,
                code="invalid_api_key",
            )


async def _refuse_websocket(error: ClientError, scope: Scope, send: Send) -> None:
    """A missing key is told by a close code, anything else by not opening."""
    if error.status != 401:
        await send({"type": "websocket.close", "code": 1008, "reason": error.message[:120]})
        return
    offered = [name for name in scope.get("subprotocols", []) if not name.startswith(TICKET_PREFIX)]
    await send({"type": "websocket.accept", "subprotocol": offered[0] if offered else None, "headers": []})
    await send({"type": "websocket.close", "code": UNAUTHENTICATED, "reason": error.message[:120]})


def _host_of(value: str) -> str | None:
    """The lower-case host of ``host``, ``host:port`` or ``[v6]:port``; None when it cannot be one."""
    if not value or any(character in value for character in "/@?#\\, "):
        return None
    try:
        parts = urlsplit(f"//{value}")
        _ = parts.port  # raises on a port that is no number
    except ValueError:
        return None
    return parts.hostname.rstrip(".") if parts.hostname else None


def _same_origin(origin: str, host: str) -> bool:
    """Whether a page of `origin` was itself served under `host`: same name, same port (the scheme's own if none)."""
    try:
        page = urlsplit(origin)
        server = urlsplit(f"//{host}")
        default = _DEFAULT_PORTS.get(page.scheme)
        return (
            default is not None
            and page.hostname is not None
            and page.hostname == server.hostname
            and (page.port or default) == (server.port or default)
        )
    except ValueError:
        return False


def _with_cors(send: Send, origin: str) -> Send:
    """Lets the page of an allowed origin read the answer."""

    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "x-request-id, retry-after"
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_cors


def _preflight(headers: Headers) -> Response:
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-max-age": str(_PREFLIGHT_AGE_S),
    }
    asked = headers.get("access-control-request-headers")
    if asked:
        allowed["access-control-allow-headers"] = asked
    return Response(status_code=204, headers=allowed)
