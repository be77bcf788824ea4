"""Token ids → text, one id at a time: what may still change with the next id is kept back.

Every id is looked at alone and in order, so however a stream is cut into events, its text is the same.
"""

from __future__ import annotations

import codecs
from typing import Final, Protocol

from tokenizers import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_MAX_OPEN_TOKENS: Final = 8
"""Tokens that can wait for the rest of a character: more than the four of a character spelled in bytes ever need."""

_CONTEXT_TOKENS: Final = 4
"""Tokens decoded again before new ones, because a decoder treats the beginning of a text in its own way."""


class IncrementalText(Protocol):
    """The text of one sequence."""

    def push(self, token_id: int) -> str:
        """New text that is certain now."""
        ...

    def flush(self) -> str:
        """What was kept back, at the end of the sequence."""
        ...


class ByteLevelText:
    """For byte-level tokenizers: bytes of tokens through an incremental UTF-8 decoder. Keeps at most three."""

    def __init__(self, table: dict[int, bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `IncrementalText`."""
        return self._decoder.decode(self._table.get(token_id, b""))

    def flush(self) -> str:
        """See `IncrementalText`."""
        return self._decoder.decode(b"", final=True)


class WindowText:
    """For other tokenizers: decodes a few tokens again with each new one, and takes what was added.

    A U+FFFD at the end may be half a character; it waits, but never for more than `_MAX_OPEN_TOKENS`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_known = 0  # of `window`: their text is out

    def push(self, token_id: int) -> str:
        """See `IncrementalText`."""
        self._window.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._window) - self._num_known < _MAX_OPEN_TOKENS:
            return ""
        if text:
            self._window = self._window[max(self._num_known - _CONTEXT_TOKENS, 0) :]
            self._window = self._window[-(_MAX_OPEN_TOKENS + _CONTEXT_TOKENS) :]
            self._num_known = len(self._window)
        return text

    def flush(self) -> str:
        """See `IncrementalText`."""
        text = self._new_text()
        self._num_known = len(self._window)
        return text

    def _new_text(self) -> str:
        known = self._decode(self._window[: self._num_known])
        return self._decode(self._window)[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
