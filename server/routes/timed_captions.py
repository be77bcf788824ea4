"""Captions of a clip part by part: the parts are choices of one request, so the engine runs them side by side.

A stream gives each part as soon as it and all before it are ready, so that a player can start on an unfinished file.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from preprocess.wire import ClipInfo, Delta
from server.intake import Call
from server.routes.answering import Answer, Timings, collect
from server.routes.chat import CompletionUsage, completion_usage
from server.routes.streaming import DONE, Stream, event_of
from server.subtitles import Cue, SubtitleFile

_MEDIA_TYPES: Final = {"srt": "application/x-subrip", "vtt": "text/vtt"}


class TimedCaption(Cue, frozen=True, kw_only=True):
    """One part of the clip."""

    index: int
    finish_reason: str


class TimedCaptions(msgspec.Struct, frozen=True, kw_only=True):
    """The answer as JSON, and the last event of its stream. `text` is that of all parts, a line each."""

    id: str
    object: Literal["caption.timed"] = "caption.timed"
    created: int
    model: str
    text: str
    segments: list[TimedCaption]
    clip: ClipInfo
    usage: CompletionUsage
    timings: Timings


class _Parts:
    """What has been said of each part so far."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._texts: list[list[str]] = [[] for _ in answer.generation.segments]
        self._finish_reasons: list[str] = ["" for _ in answer.generation.segments]
        self.cues: list[TimedCaption] = []
        """Of the parts that are ready, up to the first that is not."""

    def add(self, index: int, delta: Delta) -> list[TimedCaption]:
        """Take a delta; gives what has become ready."""
        self._texts[index].append(delta.text)
        self._finish_reasons[index] = delta.finish_reason or ""
        ready = []
        while len(self.cues) < len(self._texts) and self._finish_reasons[len(self.cues)]:
            place = len(self.cues)
            start, end = self._answer.generation.segments[place]
            cue = TimedCaption(
                start=start,
                end=end,
                text="".join(self._texts[place]).strip(),
                index=place,
                finish_reason=self._finish_reasons[place],
            )
            self.cues.append(cue)
            ready.append(cue)
        return ready

    def whole(self, caption_id: str) -> TimedCaptions:
        """When all are ready."""
        answer = self._answer
        return TimedCaptions(
            id=caption_id,
            created=answer.arrival.unix_s,
            model=answer.context.settings.model_name,
            text="\n".join(cue.text for cue in self.cues),
            segments=self.cues,
            clip=answer.generation.clips[0],
            usage=completion_usage(answer),
            timings=answer.timings(),
        )


async def timed_captions(caption_id: str, request: Request, call: Call, answer: Answer) -> Response:
    """Run all parts and answer in the format that was asked for."""
    if call.stream and call.format == "timed_json":
        return Stream(answer, _Events(caption_id, answer))
    if call.stream:
        return Stream(answer, _FilePieces(call, answer), _MEDIA_TYPES[call.format])
    parts = _Parts(answer)
    await collect(request, answer, parts.add)
    if call.format == "timed_json":
        return Response(msgspec.json.encode(parts.whole(caption_id)), media_type="application/json")
    file = _file(call)
    return Response(file.head + "".join(map(file.add, parts.cues)), media_type=_MEDIA_TYPES[call.format])


def _file(call: Call) -> SubtitleFile:
    return SubtitleFile("srt" if call.format == "srt" else "vtt")


class _Events:
    """Each part, then the whole; see `server.routes.streaming.Told`."""

    def __init__(self, caption_id: str, answer: Answer) -> None:
        self._id = caption_id
        self._parts = _Parts(answer)

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def add(self, index: int, delta: Delta) -> bytes:
        """Parts that have become ready."""
        return b"".join(map(_event, self._parts.add(index, delta)))

    def end(self) -> bytes:
        """The whole."""
        return _event(self._parts.whole(self._id)) + DONE


class _FilePieces:
    """The file as it grows; see `server.routes.streaming.Told`."""

    def __init__(self, call: Call, answer: Answer) -> None:
        self._parts = _Parts(answer)
        self._file = _file(call)

    def begin(self) -> bytes:
        """What stands before all parts."""
        return self._file.head.encode()

    def add(self, index: int, delta: Delta) -> bytes:
        """Parts that have become ready."""
        return "".join(map(self._file.add, self._parts.add(index, delta))).encode("utf-8", "replace")

    def end(self) -> bytes:
        """Nothing."""
        return b""


def _event(what: TimedCaption | TimedCaptions) -> bytes:
    return event_of(msgspec.json.encode(what))
