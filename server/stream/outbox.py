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

from server.stream.outbound import OutboundEvent

KEPT_EVENTS: Final = 4096

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
        self._pending: deque[OutboundEvent] = deque()
        self._again: deque[bytes] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._again) + len(self._pending)

    @property
    def overflows(self) -> bool:
        """Whether more waits than a reader may leave unread."""
        return self.num_bytes > self._max_bytes

    def put(self, event: OutboundEvent) -> None:
        """Line an event up."""
        joined = self._pending[-1].joined_with(event) if self._pending else None
        if joined is not None:
            self.num_bytes -= self._pending.pop().num_bytes
            event = joined
        else:
            for older in [pending for pending in self._pending if event.replaces(pending)]:
                self._pending.remove(older)
                self.num_bytes -= older.num_bytes
        self._pending.append(event)
        self.num_bytes += event.num_bytes

    def take(self) -> bytes | None:
        """The next event as JSON, or None."""
        if self._again:
            return self._again.popleft()
        if not self._pending:
            return None
        event = self._pending.popleft()
        self.num_bytes -= event.num_bytes
        self.last_seq += 1
        data = _encoder.encode(event.numbered(self.last_seq))
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
            self.num_bytes -= self._pending.popleft().num_bytes
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


def encode(event: OutboundEvent) -> bytes:
    """An event that belongs to a connection and not to a session's sequence."""
    return _encoder.encode(event)
