"""The pictures that a session keeps: the newest frame, earlier ones for context, and the pinned ones."""

from __future__ import annotations

from collections.abc import Iterable

from server.stream.mailbox import Frame


class Gallery:
    """Keeps few pictures; what waits in the mailbox is not here."""

    def __init__(self) -> None:
        self.latest: Frame | None = None
        self.pinned: dict[int, Frame] = {}
        self._window: list[Frame] = []

    def with_context(self, frame: Frame, num_frames: int) -> list[Frame]:
        """The frame after earlier ones that were captioned.

        They grow to 2n before they are cut to n, so that most prompts begin as the last one did, and the engine has
        computed that beginning.
        """
        if not num_frames or frame.is_clip:
            return [frame]
        if frame in self._window:
            return list(self._window)
        shown = [*self._window, frame]
        return shown if len(shown) <= 2 * num_frames else shown[-num_frames:]

    def captioned(self, shown: list[Frame], num_frames: int) -> None:
        """The response to what `with_context` gave has begun: it is the context of the next one."""
        if num_frames and shown and not shown[-1].is_clip:
            self._window = shown[-2 * num_frames :]

    def keep_context(self, num_frames: int) -> None:
        """Change how many earlier frames are kept."""
        self._window = self._window[-2 * num_frames :] if num_frames else []

    def forget(self, frame: Frame | None) -> None:
        """A frame that cannot be decoded is no context, and nothing to ask about."""
        self._window = [kept for kept in self._window if kept is not frame]
        if self.latest is frame:
            self.latest = None

    def find(self, frame_id: int, waiting: Iterable[Frame]) -> Frame | None:
        """The frame of that id, the newest of several."""
        return next((frame for frame in reversed(self._all(waiting)) if frame.id == frame_id), None)

    def ids(self, waiting: Iterable[Frame]) -> str:
        """For people: ids of the frames that may be asked about."""
        return ", ".join(map(str, sorted({frame.id for frame in self._all(waiting)}))) or "none"

    def num_bytes(self, elsewhere: Iterable[Frame]) -> int:
        """Encoded bytes of everything here and elsewhere."""
        frames = {*self._all(elsewhere), *self.pinned.values()}
        return sum(len(frame.data) for frame in frames)

    def clear(self) -> None:
        """Keep nothing."""
        self.latest = None
        self.pinned.clear()
        self._window.clear()

    def _all(self, waiting: Iterable[Frame]) -> list[Frame]:
        latest = [] if self.latest is None else [self.latest]
        return [*self._window, *waiting, *latest]
