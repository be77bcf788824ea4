"""A JSON request body, taken apart as it arrives, so that one of any size holds the event loop for milliseconds only.

    {"url": "data:image/png;base64,iVBORw0…40 MB…"}  ─▶  skeleton {"url": "data:image/png;base64,iVBO\\0mark:0"}
                                                         and the rest of the string, as it came, for a worker

What a client writes into a picture's or clip's place and is long is cut out of the text while it arrives and never
becomes a Python string here. The skeleton that is left is bounded in bytes and in values, and a large one is read in
a thread, between whose steps the loop gets its turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from preprocess.errors import ClientError
from preprocess.wire import ImagePart, Message, TextPart, VideoPart
from server.routes.connection import BodyBudget, body_chunks, joined

MAX_SKELETON_BYTES: Final = 8 << 20
"""What a body holds besides its pictures and clips: more text than any context takes."""
MAX_VALUES: Final = 100_000
"""Members and items of all its objects and lists."""
LIFT_BYTES: Final = 16 << 10
"""Strings up to this length stay where they are."""
LARGE_BYTES: Final = 64 << 10
"""Reading a skeleton of this size takes less than a millisecond."""
STRINGS_A_TURN: Final = 2000
_KEYS: Final = frozenset({b"url", b"image_url", b"video_url", b"image", b"images", b"video"})
_HEAD_CHARACTERS: Final = 1024
"""Of a longer string that stay where they are."""
_HEAD: Final = re.compile(
    rb"(?:[\x00-\x5b\x5d-\x7f]|[\xc0-\xff][\x80-\xbf]{1,3}|\\u[dD][89abAB]..\\u.{4}|\\u.{4}|\\[^u]){0,%d}"
    % _HEAD_CHARACTERS,
    re.DOTALL,
)
"""What stays of a longer string, as JSON writes it: a data URL's head, which the rules look at. It ends within no
character, of however many bytes or escapes."""
_CHARACTER_BYTES: Final = len(r"\ud83d\ude00")
"""The longest that JSON writes a character."""

T = TypeVar("T")


class JsonBody:
    """A whole body. `skeleton`: JSON, in which marks stand for the rest of the strings that were lifted out."""

    def __init__(self, skeleton: bytes, rests: list[bytes], mark: str) -> None:
        self.skeleton = skeleton
        self._rests = rests
        self._mark = mark

    async def read(self, build: Callable[[bytes], T], messages_of: Callable[[T], list[Message]]) -> T:
        """What a request asks for, with the lifted media in the places that they came from.

        Args:
            build: Makes it from JSON. Runs in a thread where that may take long.
            messages_of: The list in it that holds its media.

        Raises:
            ClientError: As `build` does.
        """
        try:
            made = await self._built(build, self.skeleton)
        except ClientError as error:
            if error.code == "invalid_json" and self._rests:  # places are counted without what was lifted out
                error.message = "The body is no valid JSON: it goes wrong outside of its pictures and clips."
            raise
        if self._put_back(messages_of(made)) != len(self._rests):  # something long that is no picture
            made = await self._built(build, await asyncio.to_thread(self._whole))
        return made

    async def _built(self, build: Callable[[bytes], T], raw: bytes) -> T:
        return build(raw) if len(raw) <= LARGE_BYTES else await asyncio.to_thread(build, raw)

    def _put_back(self, messages: list[Message]) -> int:
        """Replace marks in `messages` by what they stand for; how many there were."""
        if not self._rests:
            return 0
        found = 0
        for i, message in enumerate(messages):
            parts = [part if isinstance(part, TextPart) else self._with_rest(part) for part in message.content]
            replaced = sum(new is not old for new, old in zip(parts, message.content, strict=True))
            if replaced:
                messages[i] = msgspec.structs.replace(message, content=parts)
            found += replaced
        return found

    def _with_rest(self, part: ImagePart | VideoPart) -> ImagePart | VideoPart:
        head, mark, index = part.data_url.rpartition(f"\0{self._mark}:")
        return msgspec.structs.replace(part, data_url=head, rest=self._rests[int(index)]) if mark else part

    def _whole(self) -> bytes:
        """The JSON as it came, where that is not too large."""
        raw = re.sub(
            rb"\\u0000" + self._mark.encode() + rb":([0-9]+)",
            lambda found: msgspec.json.encode(self._rests[int(found[1])].decode("utf-8", "replace"))[1:-1],
            self.skeleton,
        )
        if len(raw) > MAX_SKELETON_BYTES:
            raise _too_much_text()
        return raw


async def read_json(request: Request, max_bytes: int, budget: BodyBudget) -> JsonBody:
    """The body of a request.

    Raises:
        ClientError: As `body_chunks` does; 413 for too much text, 400 for too many values.
        ClientGone: The client left before its end.
    """
    lifter = Lifter()
    async with contextlib.aclosing(body_chunks(request, max_bytes, budget)) as chunks:
        async for chunk in chunks:
            for _ in lifter.feed(chunk):
                await asyncio.sleep(0)
        return await lifter.finish()


class Lifter:
    """Follows JSON text from chunk to chunk, as far as to know where its strings begin and end and what they are of.

    Of text that is no JSON it makes something that is none either.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        self._skeleton = bytearray()
        self._lifted: list[tuple[list[bytes], bool]] = []
        self._num_values = 0
        self._is_inside = False
        self._is_escaped = False
        """The next byte belongs to a backslash."""
        self._start = 0
        """Where in the skeleton the content of the present or last string begins."""
        self._end = 0
        self._key = b""
        self._lifting: list[bytes] | None = None
        self._has_backslash = False
        """In the string that is being lifted: told piece by piece, so that nobody looks through all of it at once."""
        self._may_lift = False

    def feed(self, chunk: bytes) -> Iterator[None]:
        """Take the next piece of text; yields wherever others should have a turn.

        Raises:
            ClientError: There is too much of it.
        """
        position = num_strings = 0
        while position < len(chunk):
            quote = chunk.find(b'"', position)
            end = len(chunk) if quote < 0 else quote
            if not self._is_inside:
                self._outside(chunk[position:end], opens=quote >= 0)
            elif self._inside(chunk[position:end]) and quote >= 0:
                self._quote_in_text()
            elif quote >= 0:
                self._close()
            position = end + 1
            num_strings += 1
            if num_strings % STRINGS_A_TURN == 0:
                yield
        if len(self._skeleton) > MAX_SKELETON_BYTES:
            raise _too_much_text()

    async def finish(self) -> JsonBody:
        """The whole body."""
        if self._lifting is not None:  # text that ends in a string
            self._close()
        rests: list[bytes] = []
        for pieces, has_backslash in self._lifted:
            rests.append(await _text_of(pieces, has_backslash=has_backslash))
            await asyncio.sleep(0)
        return JsonBody(bytes(self._skeleton), rests, self._mark)

    def _outside(self, segment: bytes, *, opens: bool) -> None:
        if segment.lstrip()[:1] == b":":
            self._key = bytes(self._skeleton[self._start : self._end][:16])
        self._skeleton += segment
        self._num_values += segment.count(b",") + segment.count(b"[") + segment.count(b"{")
        if self._num_values > MAX_VALUES:
            raise ClientError(
                f"The body's JSON holds more than {MAX_VALUES:,} values, the most that are accepted in one request.",
                code="too_many_values",
            )
        if opens:
            self._skeleton += b'"'
            self._is_inside = True
            self._start = len(self._skeleton)
            self._may_lift = self._key in _KEYS

    def _inside(self, segment: bytes) -> bool:
        """Take more of a string's content; whether what comes next belongs to a backslash at its end."""
        if segment:
            text = segment.rstrip(b"\\")
            backslashes = len(segment) - len(text)
            self._is_escaped = (backslashes + (self._is_escaped and not text)) % 2 == 1
            self._add(segment)
        return self._is_escaped

    def _add(self, text: bytes) -> None:
        if self._lifting is not None:
            self._lifting.append(text)
            self._has_backslash = self._has_backslash or b"\\" in text
            return
        room = LIFT_BYTES + self._start - len(self._skeleton)
        if not self._may_lift or len(text) <= room:
            self._skeleton += text
            return
        content = bytes(self._skeleton[self._start :]) + text[:room]
        head = _head_bytes(content)  # 12 bytes a character at most, which is less
        self._skeleton[self._start :] = content[:head]
        self._lifting = [content[head:], text[room:]]
        self._has_backslash = any(b"\\" in piece for piece in self._lifting)

    def _quote_in_text(self) -> None:
        """A quotation mark within a string: pictures have none, so this is something else."""
        if self._lifting is not None:
            self._skeleton += b"".join(self._lifting)
            self._lifting = None
        self._may_lift = False
        self._is_escaped = False
        self._skeleton += b'"'

    def _close(self) -> None:
        if self._lifting is not None:
            self._skeleton += f"\\u0000{self._mark}:{len(self._lifted)}".encode()
            self._lifted.append((self._lifting, self._has_backslash))
            self._lifting = None
        self._end = len(self._skeleton)
        self._skeleton += b'"'
        self._is_inside = False


def _head_bytes(content: bytes) -> int:
    """How much of a long string stays where it is."""
    start = content[:_HEAD_CHARACTERS]
    if start.isascii() and b"\\" not in start:  # as of every picture
        return _HEAD_CHARACTERS
    return _HEAD.match(content).end()  # type: ignore[union-attr] # it matches nothing, too


async def _text_of(pieces: list[bytes], *, has_backslash: bool) -> bytes:
    """A string's content from its JSON text, in pieces."""
    if has_backslash:
        return await asyncio.to_thread(lambda: b"".join(_unescaped(pieces)))
    return await joined(pieces)


def _unescaped(pieces: list[bytes]) -> Iterator[bytes]:
    """The same of text with escapes such as ``\\/``, within which pieces may end, as within any character."""
    kept = b""
    for piece in pieces:
        piece = kept + piece
        start = piece.find(b"\\")
        if start < 0:
            start = len(piece)
        yield piece[:start]
        text, kept = _decoded(piece[start:])
        yield text
    yield kept


def _decoded(piece: bytes) -> tuple[bytes, bytes]:
    """As much of it as ends within no character, and what is left of it.

    Whether a backslash at its end begins an escape or ends one is told by all before it: what can be decoded says so.
    """
    for end in range(len(piece), max(-1, len(piece) - _CHARACTER_BYTES), -1):
        with contextlib.suppress(msgspec.DecodeError, UnicodeError):
            return msgspec.json.decode(b'"%b"' % piece[:end], type=str).encode(), piece[end:]
    return piece, b""  # no picture: whoever decodes it says so


def _too_much_text() -> ClientError:
    return ClientError(
        f"The body holds more than {MAX_SKELETON_BYTES >> 20} MiB besides pictures and clips; send less text.",
        status=413,
        code="body_too_large",
    )
