"""Finds the calls in what a model writes, as it writes it: Hermes' form, which Qwen's models use too.

    text <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call> text

    text ─"<tool_call>"─▶ head ─name known─▶ arguments ─their last brace─▶ tail ─"</tool_call>"─▶ text
                            └── no call after all: it was text ──▶ text
    text ─"<tool_call>" once more than wanted─▶ over

Arguments are passed on as they come. What is no call, or calls nobody that was offered, is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Set
from typing import Final

from server.tool_models import FunctionCall, FunctionDelta, ToolCallDelta, ToolCallOut

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MAX_HEAD: Final = 64 << 10
"""A call whose name and arguments cannot be told apart by then is text."""
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("[A-Za-z0-9_-]{1,64}")\s*,\s*"arguments"\s*:\s*(?=\{)')

Piece = str | ToolCallDelta


class ToolCallParser:
    """One answer's text, taken apart. `calls` are those found so far.

    Args:
        names: The functions that were offered.
        at_most: From where the model begins a further call on, nothing is passed on; None: there may be any number.
    """

    def __init__(self, names: Set[str], at_most: int | None = None) -> None:
        self._names = names
        self._at_most = at_most
        self._state = "text"
        self._buffer = ""
        self._space = ""
        self._after_call = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._found: list[tuple[str, str, list[str]]] = []

    @property
    def calls(self) -> list[ToolCallOut]:
        """Every call, with the arguments that have come."""
        return [ToolCallOut(call_id, FunctionCall(name, "".join(parts))) for call_id, name, parts in self._found]

    def feed(self, text: str) -> list[Piece]:
        """The next piece of the answer; what it adds to text and calls."""
        pieces: list[Piece] = []
        self._buffer += text
        while self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """The answer is over: what was held back. A call that was not complete stays as far as it came."""
        pieces: list[Piece] = []
        if self._state == "text":
            self._say(self._buffer, pieces)
        elif self._state == "head":
            self._say(OPEN + self._buffer, pieces)
        self._buffer = ""
        if self._space and not self._after_call:
            pieces.append(self._space)
        self._space = ""
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """Take what can be told of the buffer. True when there may be more."""
        if self._state == "text":
            return self._text(pieces)
        if self._state == "head":
            return self._head(pieces)
        if self._state == "arguments":
            return self._arguments(pieces)
        if self._state == "over":
            self._buffer = ""
            return False
        before, found, after = self._buffer.partition(CLOSE)
        if found:
            self._state, self._buffer = "text", after
        else:
            self._buffer = before[-len(CLOSE) :]
        return bool(found)

    def _text(self, pieces: list[Piece]) -> bool:
        before, found, after = self._buffer.partition(OPEN)
        if found:
            self._say(before, pieces)
            self._state, self._buffer = "head", after
            if self._at_most is not None and len(self._found) >= self._at_most:
                self._state = "over"
            return True
        held = next((n for n in range(min(len(OPEN) - 1, len(before)), 0, -1) if before.endswith(OPEN[:n])), 0)
        self._say(before[: len(before) - held], pieces)
        self._buffer = before[len(before) - held :]
        return False

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """Text outside of calls. White space waits: beside a call it is no content."""
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            pieces.append(said.lstrip() if self._after_call else said)
            self._after_call = False

    def _head(self, pieces: list[Piece]) -> bool:
        match = _HEAD.match(self._buffer)
        if match is not None and json.loads(match[1]) in self._names:
            self._begin(json.loads(match[1]), pieces)
            self._state, self._buffer = "arguments", self._buffer[match.end() :]
            self._depth, self._in_string, self._escaped = 0, False, False
            return True
        body, found, after = self._buffer.partition(CLOSE)
        if found:
            call = _whole_call(body, self._names)
            if call is None:
                self._say(OPEN + body + CLOSE, pieces)
            else:
                self._begin(call[0], pieces)
                self._add(call[1], pieces)
            self._state, self._buffer = "text", after
            return True
        if len(self._buffer) > MAX_HEAD:
            self._say(OPEN + self._buffer, pieces)
            self._state, self._buffer = "text", ""
        return False

    def _arguments(self, pieces: list[Piece]) -> bool:
        for place, character in enumerate(self._buffer):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._add(self._buffer[: place + 1], pieces)
                    self._state, self._buffer = "tail", self._buffer[place + 1 :]
                    return True
        self._add(self._buffer, pieces)
        self._buffer = ""
        return False

    def _begin(self, name: str, pieces: list[Piece]) -> None:
        call_id = f"call_{secrets.token_hex(12)}"
        self._space = ""
        self._after_call = True
        self._found.append((call_id, name, []))
        pieces.append(ToolCallDelta(len(self._found) - 1, FunctionDelta(name, ""), call_id, "function"))

    def _add(self, text: str, pieces: list[Piece]) -> None:
        if text:
            self._found[-1][2].append(text)
            pieces.append(ToolCallDelta(len(self._found) - 1, FunctionDelta(arguments=text)))


def _whole_call(body: str, names: Set[str]) -> tuple[str, str] | None:
    """Name and arguments of a call that is written in another order, or without arguments; None when it is none."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or call["name"] not in names:
        return None
    arguments = call.get("arguments", {})
    return (call["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None
