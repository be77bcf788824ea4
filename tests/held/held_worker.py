"""The preprocess worker, which never gets done with one picture: `serving.ENDLESS_PICTURE`.

It is caught in C code that keeps the interpreter to itself, as a decoder may be.
"""

from __future__ import annotations

import re

from held import wait_for_start

from preprocess import worker
from preprocess.prepare import Preparer
from preprocess.wire import ImagePart, Job, Prepared, Refused

ENDLESS_PICTURE = b"GIF89a never"
prepare = Preparer.prepare


def _prepare(self: Preparer, job: Job) -> Prepared | Refused:
    parts = [part for message in job.messages for part in message.content]
    if any(isinstance(part, ImagePart) and part.data == ENDLESS_PICTURE for part in parts):
        re.match("(a+)+$", "a" * 60 + "b")  # takes ages
    return prepare(self, job)


if __name__ == "__main__":
    wait_for_start()
    Preparer.prepare = _prepare  # type: ignore[method-assign]
    worker.main()
