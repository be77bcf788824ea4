"""What a plain GET is told at an address that is a WebSocket: curl's, or one that lost its upgrade in a proxy."""

from __future__ import annotations

from starlette.responses import Response

from preprocess.errors import ClientError
from server.faults import error_response


def upgrade_required(path: str, what: str) -> Response:
    """HTTP 426 (RFC 9110, section 15.5.22). `what`: that is spoken there."""
    refusal = ClientError(
        f"{path} is a WebSocket ({what}), and this request came without `Upgrade: websocket`: connect with a WebSocket "
        "client, and let proxies pass the headers Upgrade and Connection on.",
        status=426,
        code="upgrade_required",
    )
    return error_response(refusal, {"upgrade": "websocket"})
