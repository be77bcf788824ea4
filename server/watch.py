"""`beholder watch`: says what a live source shows, as long as it shows something new.

The newest frame is described, then again the newest one: what came in between is dropped, so the words are never about
an old picture. A frame that hardly differs from the last one described costs no work of the model.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from preprocess.change import change, thumbnail
from server.live_source import LiveFrame, LiveSource

if TYPE_CHECKING:
    from server.offline import Beholder

DEFAULT_MIN_CHANGE: Final = 4.0
"""Percent, see `preprocess.change`."""


class Sighting(msgspec.Struct, frozen=True):
    """What was said of a frame.

    `at_s`: the frame's time, in seconds since the first. `frame_age_ms`: from the frame's arrival to the first word.
    `dropped`: frames since the last sighting that nobody looked at.
    """

    at_s: float
    text: str
    frame_age_ms: float
    total_ms: float
    dropped: int


@dataclass
class Tally:
    """What became of the frames."""

    described: int = 0
    unchanged: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Watch:
    """How to watch.

    Attributes:
        prompt: What to ask about each frame.
        every_s: Least time from the start of one description to the next.
        min_change: Percent by which a frame must differ from the last one described; 0 describes every frame.
        max_captions: Stop after so many; None goes on until the source ends.
        sampling: Sampling fields of the HTTP interface.
    """

    prompt: str
    every_s: float = 0.0
    min_change: float = DEFAULT_MIN_CHANGE
    max_captions: int | None = None
    sampling: dict[str, object] | None = None

    def run(
        self,
        beholder: Beholder,
        source: LiveSource,
        on_piece: Callable[[LiveFrame, str], None],
        on_sighting: Callable[[Sighting], None],
    ) -> Tally:
        """Watch until the source ends: `on_piece` gets text as it comes, `on_sighting` the whole."""
        tally = Tally()
        limits = beholder.settings.preprocess_config().limits
        reference = b""
        next_number = 0
        while self.max_captions is None or tally.described < self.max_captions:
            frame = source.newest()
            if frame is None:
                break
            dropped = frame.number - next_number
            tally.dropped += dropped
            next_number = frame.number + 1
            data = _encoded(frame)
            if self.min_change > 0:
                seen = thumbnail(data, limits)
                if reference and change(reference, seen) < self.min_change:
                    tally.unchanged += 1
                    continue
                reference = seen
            started = time.monotonic()
            pieces: list[str] = []
            first_s = started
            for piece in beholder.stream(data, self.prompt, **(self.sampling or {})):
                if not pieces:
                    first_s = time.monotonic()
                pieces.append(piece)
                on_piece(frame, piece)
            ended = time.monotonic()
            tally.described += 1
            on_sighting(
                Sighting(
                    at_s=round(frame.at_s, 3),
                    text="".join(pieces).strip(),
                    frame_age_ms=round((first_s - frame.captured_s) * 1e3, 1),
                    total_ms=round((ended - started) * 1e3, 1),
                    dropped=dropped,
                )
            )
            time.sleep(max(started + self.every_s - time.monotonic(), 0))
        return tally


class Printer:
    """Prints what is seen: a line a sighting, growing as the words come, or JSON.

    Args:
        echo: `typer.echo`, or whatever takes its `nl`.
        as_json: One object a line.
    """

    def __init__(self, echo: Callable[..., None], *, as_json: bool) -> None:
        self._echo = echo
        self._as_json = as_json
        self._number = -1

    def on_piece(self, frame: LiveFrame, piece: str) -> None:
        """A piece of text has come."""
        if self._as_json:
            return
        if frame.number != self._number:
            self._number = frame.number
            minutes, seconds = divmod(int(frame.at_s), 60)
            self._echo(f"[{minutes // 60}:{minutes % 60:02d}:{seconds:02d}] ", nl=False)
            piece = piece.lstrip()
        self._echo(piece.replace("\n", " "), nl=False)

    def on_sighting(self, sighting: Sighting) -> None:
        """All of it has come."""
        self._echo(msgspec.json.encode(sighting) if self._as_json else "")


def _encoded(frame: LiveFrame) -> bytes:
    """As a file that costs nothing to make or read."""
    buffer = io.BytesIO()
    frame.image.save(buffer, "BMP")
    return buffer.getvalue()
