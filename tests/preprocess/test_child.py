"""What a child process does once it is ready."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import msgspec

from preprocess.child import Boot, Child


def test_what_was_loaded_is_no_more_looked_at_by_the_garbage_collector(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = Child(Boot("server", 0, 1, str(tmp_path), writing, -1, 0, msgspec.Raw(b"{}")))
    frozen_before = gc.get_freeze_count()
    try:
        child.ready()
        assert gc.get_freeze_count() > frozen_before
        assert b'"ready"' in os.read(reading, 4096)
    finally:
        gc.unfreeze()
        child.context.term()
        os.close(reading)
        os.close(writing)
