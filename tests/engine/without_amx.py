"""Machines with AMX leave long chunks to torch, which sums otherwise, unless weights have 8 bits: tests of what the
native step promises for every token have it compute every token, wherever they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.cpu.native import library


@contextmanager
def without_amx() -> Iterator[None]:
    """Models that are loaded meanwhile leave nothing to torch."""
    loaded = library()
    with pytest.MonkeyPatch.context() as patch:
        if loaded is not None:
            patch.setattr(loaded, "beholder_has_amx", lambda: 0)
        yield
