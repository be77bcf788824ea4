"""A private folder for the sockets between processes, gone when the launcher is.

Only its owner may enter it, so that no other user of the machine can speak to the engine. After a launcher that was
killed outright the folder stays; the next launcher sweeps folders whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PREFIX: Final = "beholder-sockets-"
MAX_FOLDER_LENGTH: Final = 80
"""A socket's path may have about 100 characters; its file name takes the rest."""

YOUNG_S: Final = 60.0
"""A folder that changed so lately may belong to a launcher that has not locked it yet."""


@contextlib.contextmanager
def socket_folder() -> Iterator[str]:
    """Path of a fresh folder that only this user may enter; removed at the end."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > MAX_FOLDER_LENGTH - len(PREFIX) - 8:
        parent = Path("/tmp")
    sweep(parent)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Remove this user's folders whose launcher is gone."""
    for folder in parent.glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            about = folder.stat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < YOUNG_S:
                continue
            with open(folder / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
