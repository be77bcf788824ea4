"""The server process, which may hear late who came up."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from held import FOLDER, held, wait_for_start

from preprocess.wire import ChildState, ServerInput
from server import process
from server.dispatcher import Dispatcher


class LateDispatcher(Dispatcher):
    """A dispatcher with cotton in one ear."""

    def receive(self, data: bytes) -> None:
        """Take a message, or put it off."""
        message = msgspec.msgpack.decode(data, type=ServerInput)
        if isinstance(message, ChildState) and message.up:
            with contextlib.suppress(FileNotFoundError), (FOLDER / "news").open("r+") as names:
                names.seek(0, 2)
                names.write(f"{message.role}\n")
            self._later(data)
        else:
            super().receive(data)

    def _later(self, data: bytes) -> None:
        if held("news"):
            asyncio.get_running_loop().call_later(0.02, self._later, data)
        else:
            super().receive(data)


if __name__ == "__main__":
    wait_for_start()
    process.Dispatcher = LateDispatcher  # type: ignore[misc]
    process.main()
