"""Captions of a clip part by part: the parts are choices of one request, so the engine runs them side by side."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from preprocess.wire import ClipInfo, Delta
from server.intake import Call
from server.routes.answering import Answer, Timings, collect
from server.routes.chat import CompletionUsage, completion_usage
from server.subtitles import Cue, srt, webvtt


class TimedCaption(Cue, frozen=True, kw_only=True):
    """One part of the clip."""

    index: int
    finish_reason: str


class TimedCaptions(msgspec.Struct, frozen=True, kw_only=True):
    """The answer as JSON. `text` is that of all parts, a line each."""

    id: str
    object: Literal["caption.timed"] = "caption.timed"
    created: int
    model: str
    text: str
    segments: list[TimedCaption]
    clip: ClipInfo
    usage: CompletionUsage
    timings: Timings


async def timed_captions(caption_id: str, request: Request, call: Call, answer: Answer) -> Response:
    """Run all parts to their end and answer in the format that was asked for."""
    segments = answer.generation.segments
    texts: list[list[str]] = [[] for _ in segments]
    finish_reasons = [""] * len(segments)

    def on_delta(index: int, delta: Delta) -> None:
        texts[index].append(delta.text)
        finish_reasons[index] = delta.finish_reason or finish_reasons[index]

    await collect(request, answer, on_delta)
    cues = [
        TimedCaption(start=start, end=end, text="".join(pieces).strip(), index=index, finish_reason=reason)
        for index, ((start, end), pieces, reason) in enumerate(zip(segments, texts, finish_reasons, strict=True))
    ]
    if call.format == "srt":
        return Response(srt(cues), media_type="application/x-subrip")
    if call.format == "vtt":
        return Response(webvtt(cues), media_type="text/vtt")
    body = TimedCaptions(
        id=caption_id,
        created=answer.arrival.unix_s,
        model=answer.context.settings.model_name,
        text="\n".join(cue.text for cue in cues),
        segments=cues,
        clip=answer.generation.clips[0],
        usage=completion_usage(answer.usage()),
        timings=answer.timings(),
    )
    return Response(msgspec.json.encode(body), media_type="application/json")
