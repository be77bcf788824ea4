"""Processes of `beholder serve` that wait for a test's word, so that no test depends on how quick they are.

This folder is on the path of the processes of `serving.Served(…, held=True)`, which run its modules. Files in the
folder that ``HELD`` names hold them up, each as long as it is there.

- ``answers``: answers of `ENDLESS` tokens come no further than their beginning.
- ``starts``: processes that start anew do not become ready.
- ``news``: the server does not hear who came up; those that it was told of are listed in the file, a line each.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER = Path(os.environ["HELD"])


def held(what: str) -> bool:
    """Whether something is to wait."""
    return (FOLDER / what).exists()


def wait_for_start() -> None:
    """Returns when processes may become ready."""
    while held("starts"):
        time.sleep(0.01)
