"""`beholder serve` as its users run it: a process of its own, spoken to over HTTP. Ended with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx
import psutil

MODULES: Final = {
    "server": "server.process",
    "preprocess": "preprocess.worker",
    "detokenizer": "preprocess.detokenizer",
    "engine": "engine.process",
}


class Served:
    """A running server. `options` are command-line options without their dashes: ``max_running=4``; `shell` is a
    line of bash that prepares the place and ends in ``exec "$@"``.
    """

    def __init__(
        self, model: Path, *, cwd: Path | None = None, wait: bool = True, shell: str = "", **options: object
    ) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.sockets = tempfile.TemporaryDirectory()
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [str(Path(sys.executable).with_name("beholder")), "serve", "--port", "0", "--model", str(model)]
        self.process = subprocess.Popen(
            [*(["bash", "-c", shell, "bash"] if shell else []), *command, *flags],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, "TMPDIR": self.sockets.name},
        )
        self.url = ""
        if wait:
            self.connect(self._ready_url())

    def connect(self, url: str) -> None:
        """Speak to it at this address from now on."""
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60)

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = self.family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)
        for process in family:  # only what this object started
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        self.sockets.cleanup()

    def text(self) -> str:
        """Everything it has printed."""
        return Path(self.log.name).read_text()

    def _ready_url(self, timeout_s: float = 60) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.text().splitlines():
                if "ready" in line and "://" in line:
                    return line[line.index("http") :].split()[0]
            time.sleep(0.05)
        raise AssertionError(f"not ready (exit code {self.process.poll()}):\n{self.text()}")

    def family(self) -> list[psutil.Process]:
        """The child processes that run now."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def pids(self, role: str) -> list[int]:
        """Process ids of a role, as the process table has them."""
        found = []
        for process in self.family():
            try:
                if MODULES[role] in process.cmdline():
                    found.append(process.pid)
            except psutil.Error:
                continue
        return sorted(found)

    def wait_until_ready(self, timeout_s: float = 30) -> float:
        """Seconds until `/ready` says 200."""
        started = time.monotonic()
        while time.monotonic() < started + timeout_s:
            try:
                if self.client.get("/ready").status_code == 200:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready again within {timeout_s} s:\n{self.text()}")

    def caption(self, picture: bytes, **fields: Any) -> httpx.Response:
        """`POST /v1/captions` with one picture."""
        data = {name: str(value) for name, value in fields.items()}
        return self.client.post("/v1/captions", files={"file": ("picture", picture)}, data=data)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
        assert values, f"no metric {name}"
        return sum(values)
