"""Subtitle files, read back by FFmpeg's own readers and by the letter of the formats."""

from __future__ import annotations

import io
import re

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.subtitles import Cue, srt, webvtt

CUES = [Cue(0, 4, "A red ball moves to the left."), Cue(4, 3661.5, "Nothing changes."), Cue(3661.5, 7200.25, "Bye.")]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["a --> b", "<b>bold</b>", "a & b", "one\n\ntwo", "\n", "", "WEBVTT", "NOTE x", "1", "a\r\n\r\nb", "STYLE", " x "]
)
cue_lists = st.lists(texts, max_size=6).map(
    lambda said: [Cue(float(i), i + 0.999, text) for i, text in enumerate(said)]
)


def read(text: str, format: str) -> list[tuple[float, float, str]]:
    """(start, end, text) of every cue."""
    found = []
    with av.open(io.BytesIO(text.encode()), format=format) as container:
        stream = container.streams.subtitles[0]
        for packet in container.demux(stream):
            if packet.size:
                start = float(packet.pts * stream.time_base)
                found.append((start, start + float(packet.duration * stream.time_base), bytes(packet).decode()))
    return found


@pytest.mark.parametrize(("write", "format"), [(srt, "srt"), (webvtt, "webvtt")])
def test_players_read_what_was_written(write, format) -> None:  # type: ignore[no-untyped-def]
    assert read(write(CUES), format) == [(cue.start, cue.end, cue.text) for cue in CUES]


def test_a_subrip_file_by_the_letter() -> None:
    assert srt(CUES[:2]) == (
        "1\n00:00:00,000 --> 00:00:04,000\nA red ball moves to the left.\n\n"
        "2\n00:00:04,000 --> 01:01:01,500\nNothing changes.\n\n"
    )


def test_a_webvtt_file_by_the_letter() -> None:
    assert webvtt(CUES[:2]) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:04.000\nA red ball moves to the left.\n\n"
        "00:00:04.000 --> 01:01:01.500\nNothing changes.\n"
    )


def test_no_cues() -> None:
    assert (srt([]), webvtt([])) == ("", "WEBVTT\n")


@given(cues=cue_lists)
def test_no_text_breaks_a_subrip_file(cues: list[Cue]) -> None:
    text = srt(cues)
    blocks = text.split("\n\n")[:-1] if text else []
    assert len(blocks) == len(read(text, "srt") if text else [])
    for number, block in enumerate(blocks, start=1):
        first, times, *lines = block.split("\n")
        assert first == str(number)
        assert re.fullmatch(r"\d\d:\d\d:\d\d,\d{3} --> \d\d:\d\d:\d\d,\d{3}", times)
        assert lines
        assert all(line.strip() and "-->" not in line for line in lines)


@given(cues=cue_lists)
def test_no_text_breaks_a_webvtt_file(cues: list[Cue]) -> None:
    """Blocks as the syntax of https://www.w3.org/TR/webvtt1/#file-structure wants them."""
    head, *blocks = webvtt(cues).rstrip("\n").split("\n\n")
    assert head == "WEBVTT"
    for block in blocks:
        times, *lines = block.split("\n")
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} --> \d\d:\d\d:\d\d\.\d{3}", times)
        assert lines
        assert all(line.strip() and "-->" not in line for line in lines)
        assert not re.search(r"<|>|&(?!amp;|lt;|gt;)", "\n".join(lines))
