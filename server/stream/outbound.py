"""What an outbox asks of the events in it, and what the server's events have in common."""

from __future__ import annotations

from typing import Final, Self

import msgspec

EVENT_BYTES: Final = 256
"""What an event is reckoned at besides its text."""
MAX_DELTA_CHARS: Final = 16_384
"""Text is not joined beyond that."""


class OutboundEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What an outbox asks of the events in it."""

    def numbered(self, seq: int) -> object:
        """What goes out as the session's `seq`-th event."""
        raise NotImplementedError

    def joined_with(self, later: OutboundEvent) -> Self | None:
        """One event that says what both say, where that is possible."""
        return None

    def replaces(self, earlier: OutboundEvent) -> bool:
        """Whether an earlier event need not go out any more."""
        return False

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes while it waits."""
        return EVENT_BYTES


class ServerEvent(OutboundEvent, frozen=True, kw_only=True):
    """Base of all server events. `seq` counts the session's events from 1; 0 in those that belong to the connection."""

    seq: int = 0

    def numbered(self, seq: int) -> Self:
        """With its `seq`."""
        return msgspec.structs.replace(self, seq=seq)
