"""Bytes of a connection to the body of one HTTP/1.1 response (RFC 9112), however they are split; knows no sockets.

`server.bench.http_client` feeds it.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

MAX_HEAD_BYTES: Final = 1 << 16
MAX_LINE_BYTES: Final = 4096
"""Of a chunk's size with its extensions, and of a trailer."""

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: .*)?")
_CHUNK_SIZE: Final = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;.*)?")


class _Expects(Enum):
    """What the next byte belongs to."""

    HEAD = auto()
    CHUNK_SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    COUNTED = auto()
    ALL = auto()  # until the connection ends
    NOTHING = auto()


class ResponseParser:
    """Of one response.

    Attributes:
        status: 0 until the head has come.
        keeps_open: Whether the server takes another request on this connection, once this response is complete.
    """

    def __init__(self) -> None:
        self.status = 0
        self.keeps_open = False
        self._expects = _Expects.HEAD
        self._left = 0  # bytes of a chunk or of a counted body
        self._rest = b""  # of a head or a line that is not complete

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        return self._expects is _Expects.NOTHING

    def feed(self, data: bytes) -> bytes:
        """Take what has come; what it adds to the body.

        Raises:
            ConnectionError: It is no HTTP.
        """
        data, self._rest = self._rest + data, b""
        if self._expects is _Expects.HEAD:
            data = self._after_head(data)
        if self._expects is _Expects.COUNTED:
            body, data = data[: self._left], data[self._left :]
            self._left -= len(body)
            if not self._left:
                self._expects = _Expects.NOTHING
        elif self._expects is _Expects.ALL:
            return data
        elif self._expects in (_Expects.HEAD, _Expects.NOTHING):
            body = b""
        else:
            return self._chunks(data)
        if data and self.is_complete:
            self.keeps_open = False  # nobody has asked for these
        return body

    def end(self) -> None:
        """The connection has ended.

        Raises:
            ConnectionError: That was too early.
        """
        if self._expects is _Expects.ALL:
            self._expects = _Expects.NOTHING
        if not self.is_complete:
            raise ConnectionError("the server broke off before its answer was complete")

    def _after_head(self, data: bytes) -> bytes:
        """What follows the head, if that is complete; else all waits."""
        while self._expects is _Expects.HEAD:
            head, end, after = data.partition(b"\r\n\r\n")
            if len(head) > MAX_HEAD_BYTES or not b"HTTP/1.".startswith(head[:7]):
                raise _no_http(head)
            if not end:
                self._rest = data
                return b""
            self._read_head(head)
            data = after
        return data

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise _no_http(head)
        status = int(found[2])
        if 100 <= status < 200 and status != 101:
            return  # the real one follows
        headers: dict[bytes, bytes] = {}
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon:
                raise _no_http(line)
            name, value = name.lower(), value.strip()
            headers[name] = headers[name] + b"," + value if name in headers else value
        self.status = status
        options = {option.strip().lower() for option in headers.get(b"connection", b"").split(b",")}
        self.keeps_open = b"close" not in options if found[1] == b"1" else b"keep-alive" in options
        self._expects = self._read_framing(headers)

    def _read_framing(self, headers: dict[bytes, bytes]) -> _Expects:
        coding, length = headers.get(b"transfer-encoding"), headers.get(b"content-length")
        if self.status in (204, 304):
            return _Expects.NOTHING
        if coding is not None:
            if coding.lower() != b"chunked":
                raise ConnectionError(f"the server sent its answer as {_shown(coding)}; expected chunked")
            return _Expects.CHUNK_SIZE
        if length is None:
            self.keeps_open = False
            return _Expects.ALL
        if not re.fullmatch(rb"\d{1,18}", length):
            raise ConnectionError(f"the server sent {_shown(length)} as the length of its answer; expected a number")
        self._left = int(length)
        return _Expects.COUNTED if self._left else _Expects.NOTHING

    def _chunks(self, data: bytes) -> bytes:
        """The body's part in `data`, from wherever the last one ended."""
        pieces: list[bytes] = []
        at = 0
        while True:
            if self._expects is _Expects.CHUNK:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._expects = _Expects.CHUNK_END
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                if len(self._rest) > MAX_LINE_BYTES:
                    raise _no_http(self._rest)
                break
            line, at = data[at:end], end + 2
            self._read_line(line)
            if self.is_complete:
                self.keeps_open = self.keeps_open and at == len(data)
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_line(self, line: bytes) -> None:
        """A line between chunks, and what follows it."""
        if self._expects is _Expects.CHUNK_END:
            if line:
                raise ConnectionError(f"the server sent a chunk that is longer than it said: {_shown(line)}")
            self._expects = _Expects.CHUNK_SIZE
        elif self._expects is _Expects.TRAILER:
            if not line:
                self._expects = _Expects.NOTHING
        else:
            found = _CHUNK_SIZE.fullmatch(line)
            if found is None:
                raise ConnectionError(f"the server sent {_shown(line)} as the length of a chunk; expected a number")
            self._left = int(found[1], 16)
            self._expects = _Expects.CHUNK if self._left else _Expects.TRAILER


def _no_http(data: bytes) -> ConnectionError:
    return ConnectionError(f"what the server sent is no HTTP: {_shown(data)}")


def _shown(data: bytes) -> str:
    return repr(data[:100])[1:]
