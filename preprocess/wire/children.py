"""What the launcher tells the server of the other processes."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["server", "preprocess", "detokenizer", "engine"]


class ChildState(msgspec.Struct, frozen=True, tag="child"):
    """A child process came up (`up`) or died. `reason` tells how it died, such as ``"signal SIGKILL"``."""

    role: Role
    index: int
    up: bool
    reason: str = ""
    generation: int = 0
    """Counts the processes that have filled this place: a later one has a larger number."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Stop intake, finish streams within `grace_s`, then exit 0."""

    grace_s: float
