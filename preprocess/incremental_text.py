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

    Tokens that spell one byte (``<0x0A>``) go through an incremental UTF-8 decoder. The whole text decoded at once is
    the same, except that it shows a replacement character for *every* byte of a run that is not valid from end to end;
    a stream cannot know the end. Any other U+FFFD at the end may be half a character; it waits, but not for long.
    """

    def __init__(self, tokenizer: Tokenizer, byte_tokens: dict[int, int]) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens
        self._neutral = next((token_id for token_id, byte in byte_tokens.items() if byte == ord("a")), None)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._num_known = 0  # of `window`: their text is out

    def push(self, token_id: int) -> str:
        """See `IncrementalText`."""
        byte = self._byte_tokens.get(token_id)
        if byte is not None:
            text = self._end_window() + self._decoder.decode(bytes((byte,)))
            if self._neutral is not None:  # what follows is not the beginning of the text
                self._window, self._num_known = [self._neutral], 1
            return text
        before = self._decoder.decode(b"", final=True)
        self._window.append(token_id)
        text = self._new_text()
        num_open = len(self._window) - self._num_known
        if text.endswith(_REPLACEMENT) and num_open < _MAX_OPEN_TOKENS:
            return before
        if text:
            self._window = self._window[-(num_open + _CONTEXT_TOKENS) :]
            self._num_known = len(self._window)
        return before + text

    def flush(self) -> str:
        """See `IncrementalText`."""
        return self._end_window() + self._decoder.decode(b"", final=True)

    def _end_window(self) -> str:
        text = self._new_text()
        self._num_known = len(self._window)
        return text

    def _new_text(self) -> str:
        if self._num_known == len(self._window):
            return ""
        known = self._decode(self._window[: self._num_known])
        return self._decode(self._window)[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
