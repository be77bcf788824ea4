"""A server to measure, started as `beholder serve` starts it, with all its processes."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Final

import psutil

from server.settings import Settings

READY_TIMEOUT_S: Final = 600.0
"""A large model's weights and kernels take their time."""
END_TIMEOUT_S: Final = 60.0


def add_serve_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--serve`, a list of options for `serving`."""
    parser.add_argument(
        "--serve",
        type=shlex.split,
        default=[],
        metavar="'--option value …'",
        help="options of `beholder serve` for the server that is started",
    )


@contextlib.contextmanager
def serving(model: str, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server's address and its launcher, once it is ready; SIGTERM ends it.

    Args:
        model: Folder; empty: the bundled model.
        *options: Of `beholder serve`.

    Raises:
        RuntimeError: It did not become ready; with what it said.
    """
    folder = Settings.load({"model": model}).resolve_model().model
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-P", "-c", "from server.cli import main; main()", "serve", "--port", "0"]
        process = subprocess.Popen([*command, "--model", folder, *options], stdout=log, stderr=log)
        try:
            yield _url_when_ready(process, log), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(END_TIMEOUT_S)


def _url_when_ready(process: subprocess.Popen[bytes], log: IO[str]) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        log.seek(0)
        for line in log.read().splitlines():
            if "ready" in line and "http://" in line:
                return line[line.index("http://") :].split()[0]
        time.sleep(0.05)
    log.seek(0)
    raise RuntimeError("the server did not become ready:\n" + log.read())
