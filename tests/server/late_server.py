"""The server process, but it hears of other processes late: what the launcher says of them waits while the file named
by ``WITHHELD`` is there, which lists who has been named so far, a line each.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from preprocess.wire import ChildState, ServerInput
from server import process
from server.dispatcher import Dispatcher

WITHHELD = Path(os.environ["WITHHELD"])


class LateDispatcher(Dispatcher):
    """A dispatcher with cotton in one ear."""

    def receive(self, data: bytes) -> None:
        """Take a message, or put it off."""
        message = msgspec.msgpack.decode(data, type=ServerInput)
        if isinstance(message, ChildState) and message.up and WITHHELD.exists():
            with WITHHELD.open("a") as names:
                names.write(f"{message.role}\n")
            self._later(data)
        else:
            super().receive(data)

    def _later(self, data: bytes) -> None:
        if WITHHELD.exists():
            asyncio.get_running_loop().call_later(0.02, self._later, data)
        else:
            super().receive(data)


if __name__ == "__main__":
    process.Dispatcher = LateDispatcher  # type: ignore[misc]
    process.main()
