"""Pieces of a streamed body to the JSON of its server-sent events, however they are split."""

from __future__ import annotations

from typing import Final

_DATA: Final = b"data:"


class EventLines:
    """Of one stream. Only events of one line that hold a JSON object count: chats have no others but ``[DONE]``."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The objects that a piece completes."""
        text = self._rest + piece
        lines = text.splitlines()
        # A line may end in CR LF of which only the CR has come: the LF then is an empty line.
        self._rest = lines.pop() if lines and not text.endswith((b"\n", b"\r")) else b""
        return [found for line in lines if line.startswith(_DATA) and (found := line[5:].lstrip()).startswith(b"{")]

    def end(self) -> list[bytes]:
        """The object of a last line that nothing ended."""
        return self.feed(b"\n")
