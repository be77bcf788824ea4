"""`beholder serve` as its users run it: a process of its own, spoken to over HTTP. Ended with everything it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import httpx
import psutil

MODULES: Final = {
    "server": "server.process",
    "preprocess": "preprocess.worker",
    "detokenizer": "preprocess.detokenizer",
    "engine": "engine.process",
}


HELD_MODULES: Final = {
    "server": "held_server",
    "preprocess": "held_worker",
    "detokenizer": "held_detokenizer",
    "engine": "held_engine",
}
HELD_START: Final = """
import sys
from server import child_process, cli
child_process.MODULES = {modules}
sys.argv[0] = "beholder"
cli.main()
"""
READY: Final = re.compile(r"ready +(https?://\S+) after ")
ENDLESS: Final = 777
"""`max_tokens` of answers that a held server begins, and does not end before it is told to: see tests/held."""
ENDLESS_PICTURE: Final = b"GIF89a never"
"""What a held server's preprocess worker never gets done with."""
PATIENCE_S: Final = 90.0
"""How long to wait for what must come: far longer than it takes on a machine that has a lot else to do."""
Found = TypeVar("Found")


class Served:
    """A running server. `options` are command-line options without their dashes: ``max_running=4``; `shell` is a
    line of bash that prepares the place and ends in ``exec "$@"``. One that is `held` waits where a test tells it to:
    answers of `ENDLESS` tokens from the start, and what `hold` names.
    """

    def __init__(
        self,
        model: Path,
        *,
        cwd: Path | None = None,
        wait: bool = True,
        shell: str = "",
        held: bool = False,
        hold: str = "",
        **options: object,
    ) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self.sockets = tempfile.TemporaryDirectory()
        self._modules = HELD_MODULES if held else MODULES
        self._held = tempfile.TemporaryDirectory()
        for what in filter(None, ("answers", hold)):
            self.hold(what)
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        command = [str(Path(sys.executable).with_name("beholder"))]
        environment = {**os.environ, "TMPDIR": self.sockets.name}
        if held:
            command = [sys.executable, "-c", HELD_START.format(modules=HELD_MODULES)]
            paths = [str(Path(__file__).with_name("held")), os.environ.get("PYTHONPATH", "")]
            environment.update(HELD=self._held.name, PYTHONPATH=os.pathsep.join(filter(None, paths)))
        self.process = subprocess.Popen(
            [
                *(["bash", "-c", shell, "bash"] if shell else []),
                *command,
                *("serve", "--port", "0", "--model", str(model)),
                *flags,
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
        )
        self.url = ""
        if wait:
            self.connect(self.wait_for(lambda: READY.search(self.text()))[1])

    def connect(self, url: str) -> None:
        """Speak to it at this address from now on."""
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=PATIENCE_S)

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
        self._held.cleanup()

    def hold(self, what: str) -> Path:
        """Hold up ``answers``, ``starts`` or ``news``, as tests/held says; gives the file that does it."""
        file = Path(self._held.name, what)
        file.touch()
        return file

    def release(self, what: str) -> None:
        """Let it go on."""
        Path(self._held.name, what).unlink()

    def kill(self, role: str, index: int = 0) -> int:
        """Kill a process outright; gives the id that it had. `wait_until_back` waits for the next one."""
        pid = self.pids(role)[index]
        self._num_back = self._times_back(role)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_until_back(self, role: str) -> None:
        """Returns once the process that `kill` ended has a successor, and that gets work."""
        self.wait_for(lambda: self._times_back(role) > self._num_back)

    def _times_back(self, role: str) -> int:
        return len(re.findall(rf"the {role}( \d+)? process is up again", self.text()))

    def text(self) -> str:
        """Everything it has printed."""
        return Path(self.log.name).read_text()

    def wait_for(self, condition: Callable[[], Found | None], timeout_s: float = PATIENCE_S) -> Found:
        """What `condition` gives as soon as it is true. Only a fault takes as long as `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"in vain (exit code {self.process.poll()}):\n{self.text()}")
            time.sleep(0.02)
        return found

    def wait_for_line(self, words: str) -> None:
        """Returns once `words` have been printed."""
        self.wait_for(lambda: words in self.text())

    def listening_url(self) -> str:
        """Where it listens, which is long before it is ready."""
        launcher = psutil.Process(self.process.pid)
        port = self.wait_for(
            lambda: [each.laddr.port for each in launcher.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        )[0]
        return f"http://127.0.0.1:{port}"

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
                if self._modules[role] in process.cmdline():
                    found.append(process.pid)
            except psutil.Error:
                continue
        return sorted(found)

    def is_ready(self) -> bool:
        """Whether `/ready` says 200."""
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_ready(self) -> None:
        """Returns once `/ready` says 200. Right after a death it may say so of what is gone: see `wait_until_back`."""
        self.wait_for(self.is_ready)

    def wait_until_idle(self) -> None:
        """Returns once nothing runs, waits or is leased."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "beholder_arena_used_bytes")
        self.wait_for(lambda: not any(self.metric(name) for name in names))

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
