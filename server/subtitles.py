"""Timed captions as subtitle files: SubRip (.srt) and WebVTT (https://www.w3.org/TR/webvtt1/)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

_LINE_BREAKS: Final = re.compile(r"\s*[\r\n\u0085\u2028\u2029]\s*")
_NOT_TEXT: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Cue(msgspec.Struct, frozen=True):
    """What is said of the time from `start` to `end`, in seconds from the start of the clip."""

    start: float
    end: float
    text: str


def srt(cues: Iterable[Cue]) -> str:
    """A SubRip file. Cues without text are left out: they would end the file for some players."""
    spoken = [(cue, _one_paragraph(cue.text).replace("-->", "→")) for cue in cues]
    return "".join(
        f"{number}\n{_clock(cue.start, ',')} --> {_clock(cue.end, ',')}\n{text}\n\n"
        for number, (cue, text) in enumerate(((cue, text) for cue, text in spoken if text), start=1)
    )


def webvtt(cues: Iterable[Cue]) -> str:
    """A WebVTT file."""
    blocks = ["WEBVTT\n"]
    for cue in cues:
        text = _one_paragraph(cue.text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        if text:
            blocks.append(f"{_clock(cue.start, '.')} --> {_clock(cue.end, '.')}\n{text}\n")
    return "\n".join(blocks)


def _one_paragraph(text: str) -> str:
    """An empty line would end the cue."""
    return _LINE_BREAKS.sub("\n", _NOT_TEXT.sub("", text).strip())


def _clock(seconds: float, point: str) -> str:
    """``01:02:03.456``."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
