"""A server to measure, started as `beholder serve` starts it, with all its processes."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from server.settings import Settings

READY: Final = re.compile(r"ready +(https?://\S+) after ")
READY_TIMEOUT_S: Final = 600.0
"""A large model's weights and kernels take their time."""
END_TIMEOUT_S: Final = 60.0


def add_serve_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--serve`, a list of options for `serving`."""
    parser.add_argument(
        "--serve",
        type=shlex.split,
        default=[],
        metavar="OPTIONS",
        help="options of `beholder serve` for what is started, after an equals sign: --serve='--max-running 8'",
    )


def refuse_serve_option(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Ends the program where `--serve` comes with `--base-url`."""
    if given.base_url and given.serve:
        parser.error("--serve is for a server that is started, --base-url names one that runs; leave one of them out")


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
    command = [sys.executable, "-P", "-c", "from server.cli import main; main()", "serve", "--port", "0"]
    with started([*command, "--model", folder, *options]) as found:
        yield found


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[str, psutil.Process]]:
    """What `serving` gives, of any command that says that it is ready as `beholder serve` does.

    Raises:
        RuntimeError: It did not become ready; with what it said.
    """
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield _url_when_ready(process, Path(log.name)), psutil.Process(process.pid)
        finally:
            end(process, END_TIMEOUT_S)


def end(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """Asks a process to end, and kills it with its children if it has not after `timeout_s`."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _url_when_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Reads through a file of its own: the position in `log` is where the process writes next."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := READY.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError("the server did not become ready:\n" + log.read_text(errors="replace"))
