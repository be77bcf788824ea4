"""A session's events on their way out, and those that went out lately.

    put ──▶ pending (bounded in bytes; text of one response is joined, statistics are overwritten)
               │ take: the event gets its seq here
               ▼
             sent (bounded) ──rewind(last_seq)──▶ again, before what is pending

An event has its seq only once it is on its way, so that joining events leaves no holes. What a lost connection
swallowed is still among the sent ones.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from server.stream.events import FramesStats, ResponseDone, ServerEvent, TextDelta

EVENT_BYTES: Final = 256
"""What an event is reckoned at besides its text."""
KEPT_EVENTS: Final = 4096
MAX_DELTA_CHARS: Final = 16_384

_encoder: Final = msgspec.json.Encoder()


class Outbox:
    """One per session.

    Args:
        max_bytes: Most that may be pending; `overflows` tells when it is more.
        max_kept_bytes: How much of what was sent is kept for `rewind`.
    """

    def __init__(self, max_bytes: int, max_kept_bytes: int) -> None:
        self.last_seq = 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_kept_bytes = max_kept_bytes
        self._pending: deque[ServerEvent] = deque()
        self._again: deque[bytes] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._again) + len(self._pending)

    @property
    def overflows(self) -> bool:
        """Whether more waits than a reader may leave unread."""
        return self.num_bytes > self._max_bytes

    def put(self, event: ServerEvent) -> None:
        """Line an event up."""
        last = self._pending[-1] if self._pending else None
        if (
            isinstance(event, TextDelta)
            and isinstance(last, TextDelta)
            and event.response_id == last.response_id
            and len(last.delta) < MAX_DELTA_CHARS
        ):
            self.num_bytes -= _size(last)
            ids = None if last.token_ids is None else last.token_ids + (event.token_ids or [])
            event = msgspec.structs.replace(last, delta=last.delta + event.delta, token_ids=ids)
            self._pending.pop()
        elif isinstance(event, FramesStats):
            for older in [pending for pending in self._pending if isinstance(pending, FramesStats)]:
                self._pending.remove(older)
                self.num_bytes -= _size(older)
        self._pending.append(event)
        self.num_bytes += _size(event)

    def take(self) -> bytes | None:
        """The next event as JSON, or None."""
        if self._again:
            return self._again.popleft()
        if not self._pending:
            return None
        event = self._pending.popleft()
        self.num_bytes -= _size(event)
        self.last_seq += 1
        data = _encoder.encode(msgspec.structs.replace(event, seq=self.last_seq))
        self._kept.append((self.last_seq, data))
        self._kept_bytes += len(data)
        while self._kept_bytes > self._max_kept_bytes or len(self._kept) > KEPT_EVENTS:
            _, old = self._kept.popleft()
            self._kept_bytes -= len(old)
        return data

    def take_last(self) -> bytes | None:
        """Only the last event, when it tells of the end: for a reader that would take too long to read the others."""
        self._again.clear()
        while len(self._pending) > 1:
            self.num_bytes -= _size(self._pending.popleft())
        return self.take()

    def rewind(self, last_seq: int) -> int | None:
        """Send everything after `last_seq` again, before what is pending.

        Returns:
            None when nothing is missing; else the seq of the first event that is still kept.

        Raises:
            ValueError: No such event has been sent.
        """
        if not 0 <= last_seq <= self.last_seq:
            raise ValueError(last_seq)
        self._again = deque(data for seq, data in self._kept if seq > last_seq)
        first = self._kept[0][0] if self._kept else self.last_seq + 1
        return None if last_seq + 1 >= first else first


def encode(event: ServerEvent) -> bytes:
    """An event that belongs to a connection and not to a session's sequence."""
    return _encoder.encode(event)


def _size(event: ServerEvent) -> int:
    if isinstance(event, TextDelta):
        return EVENT_BYTES + len(event.delta) + 8 * len(event.token_ids or ())
    return EVENT_BYTES + len(event.text) if isinstance(event, ResponseDone) else EVENT_BYTES
