"""Reads a multipart form as it arrives: files stay in memory under the body's cap, nothing is written to disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from preprocess.errors import ClientError
from server.routes.connection import joined

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELDS = 64
BYTES_A_TURN = 32 << 10
"""The parser is in Python, and what looks like the beginning of many boundaries keeps it busy."""


@dataclass
class Form:
    """A parsed form, in order. `files`: (field name, content); `fields`: (field name, text)."""

    files: list[tuple[str, bytes]] = field(default_factory=list)
    fields: list[tuple[str, str]] = field(default_factory=list)


async def read_form(content_type: str, chunks: AsyncIterator[bytes], *, max_files: int) -> Form:
    """Parse a ``multipart/form-data`` body.

    Args:
        content_type: The request's header, with its boundary.
        chunks: The body; whoever makes them caps it.
        max_files: One file more is refused.

    Raises:
        ClientError: It is no such form, or has too many parts.
    """
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 1 <= len(boundary) <= 256:
        raise _malformed("its content-type header names no boundary")
    reader = _FormReader(max_files)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        async for chunk in chunks:
            for start in range(0, len(chunk), BYTES_A_TURN):
                parser.write(chunk[start : start + BYTES_A_TURN])
                await asyncio.sleep(0)
        parser.finalize()
    except (FormParserError, ValueError):  # also when the boundary itself is none
        raise _malformed("it does not keep to the format") from None
    if not reader.ended:
        raise _malformed("it ends before its last boundary")
    return Form([(name, await joined(pieces)) for name, pieces in reader.files], reader.fields)


def _malformed(what: str) -> ClientError:
    return ClientError(f"The form (multipart/form-data) cannot be read: {what}.", code="invalid_form")


class _FormReader:
    """Collects the parser's callbacks into a form, one part at a time."""

    def __init__(self, max_files: int) -> None:
        self.files: list[tuple[str, list[bytes]]] = []
        self.fields: list[tuple[str, str]] = []
        self.ended = False
        self._max_files = max_files
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        self._pieces: list[bytes] = []
        self._name = ""
        self._is_file = False

    def callbacks(self) -> MultipartCallbacks:
        """What `MultipartParser` calls, by the names it knows."""
        return {
            "on_part_begin": self._on_part_begin,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _on_part_begin(self) -> None:
        self._disposition = b""
        self._pieces = []
        self._header_name.clear()
        self._header_value.clear()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        options = parse_options_header(self._disposition)[1]
        name = options.get(b"name", b"")
        try:
            self._name = name.decode()
        except UnicodeDecodeError:
            raise _malformed("a field's name is no UTF-8") from None
        if not self._name:
            raise _malformed("a part has no field name")
        self._is_file = b"filename" in options
        if self._is_file and len(self.files) >= self._max_files:
            raise ClientError(
                f"The form holds more than {self._max_files} pictures, the most that are accepted in one request.",
                code="too_many_images",
            )
        if not self._is_file and len(self.fields) >= MAX_FIELDS:
            raise ClientError(f"The form holds more than {MAX_FIELDS} fields.", code="invalid_form")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def _on_part_end(self) -> None:
        if self._is_file:
            self.files.append((self._name, self._pieces))
        else:
            try:
                self.fields.append((self._name, b"".join(self._pieces).decode()))
            except UnicodeDecodeError:
                raise ClientError(
                    f"`{self._name[:200]}` is no UTF-8 text. If it is a file, send it with a file name "
                    f"(curl -F {self._name[:40]}=@picture.jpg).",
                    code="invalid_value",
                    param=self._name[:200],
                ) from None
        self._pieces = []

    def _on_end(self) -> None:
        self.ended = True
