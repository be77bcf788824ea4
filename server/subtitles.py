"""Timed captions as subtitle files: SubRip (.srt) and WebVTT (https://www.w3.org/TR/webvtt1/)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

_LINE_BREAKS: Final = re.compile(r"\s*[\r\n\u0085\u2028\u2029]\s*")
_NOT_TEXT: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Cue(msgspec.Struct, frozen=True):
    """What is said of the time from `start` to `end`, in seconds from the start of the clip."""

    start: float
    end: float
    text: str


class SubtitleFile:
    """A file in the making: write `head`, then what `add` gives for each cue.

    Cues without text are left out: in a SubRip file they would end it for some players.
    """

    def __init__(self, format: Literal["srt", "vtt"]) -> None:
        self._is_srt = format == "srt"
        self._number = 0
        self.head = "" if self._is_srt else "WEBVTT\n"

    def add(self, cue: Cue) -> str:
        """The next piece of the file; empty for a cue without text."""
        text = _one_paragraph(cue.text)
        if not text:
            return ""
        if not self._is_srt:
            text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
            return f"\n{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{text}\n"
        self._number += 1
        times = f"{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}"
        return f"{self._number}\n{times}\n{text.replace('-->', '→')}\n\n"


def srt(cues: Iterable[Cue]) -> str:
    """A whole SubRip file."""
    file = SubtitleFile("srt")
    return file.head + "".join(map(file.add, cues))


def webvtt(cues: Iterable[Cue]) -> str:
    """A whole WebVTT file."""
    file = SubtitleFile("vtt")
    return file.head + "".join(map(file.add, cues))


def _one_paragraph(text: str) -> str:
    """An empty line would end the cue."""
    return _LINE_BREAKS.sub("\n", _NOT_TEXT.sub("", text).strip())


def _clock(seconds: float, point: str) -> str:
    """``01:02:03.456``."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
