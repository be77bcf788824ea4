"""One-time tickets: how a web page, which cannot send an `Authorization` header with a WebSocket, shows who it is.

A program that has the key asks for one (`POST /v1/stream/tickets`) and gives it to the page, which offers it as a
second subprotocol ``vlm.ticket.<ticket>``. It works once, and for a minute.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

PREFIX: Final = "vlm.ticket."
LIFETIME_S: Final = 60.0
MAX_OUTSTANDING: Final = 1024
"""The oldest is forgotten beyond that."""


class Tickets:
    """Those that were given out and not used yet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expires_s: OrderedDict[str, float] = OrderedDict()

    def issue(self) -> str:
        """A new ticket."""
        ticket = secrets.token_urlsafe(24)
        self._expires_s[ticket] = self._clock() + LIFETIME_S
        if len(self._expires_s) > MAX_OUTSTANDING:
            self._expires_s.popitem(last=False)
        return ticket

    def redeem(self, subprotocols: Iterable[str]) -> bool:
        """Whether a good ticket is among the subprotocols that a client offers. It is used up then."""
        now_s = self._clock()
        for name in subprotocols:
            if name.startswith(PREFIX):
                expires_s = self._expires_s.pop(name.removeprefix(PREFIX), None)
                if expires_s is not None and now_s <= expires_s:
                    return True
        return False
