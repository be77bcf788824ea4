"""What clients wrote, before a chat template sees it: every text of a chat, and characters that stand in for others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Final

from preprocess.wire import Message, TextPart, ToolCall

_LAST_PRIVATE: Final = 0x10FFFD
"""Stand-ins are taken downwards from here, skipping what the client used itself."""


def texts(messages: Sequence[Message]) -> Iterator[str]:
    """Every text part, in order."""
    for message in messages:
        for part in message.content:
            if isinstance(part, TextPart):
                yield part.text


def free_characters(messages: Sequence[Message], tools: Sequence[Any]) -> Iterator[str]:
    """Private characters that occur nowhere in the client's text."""
    used: set[str] = set()
    for text in texts(messages):
        used.update(text)
    for text in _strings([*tools, *(arguments_of(call) for message in messages for call in message.tool_calls)]):
        used.update(text)
    return (chr(_LAST_PRIVATE - step) for step in count() if chr(_LAST_PRIVATE - step) not in used)


def arguments_of(call: ToolCall) -> Any:
    """The arguments of an earlier call, as a JSON value."""
    return json.loads(call.arguments)


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def translated(value: Any, table: dict[int, str]) -> Any:
    """A JSON value with characters replaced in every string."""
    if isinstance(value, str):
        return valid_unicode(value).translate(table)
    if isinstance(value, dict):
        return {valid_unicode(key).translate(table): translated(item, table) for key, item in value.items()}
    return [translated(item, table) for item in value] if isinstance(value, list) else value


def valid_unicode(text: str) -> str:
    """Half surrogate pairs, which no tokenizer takes, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
