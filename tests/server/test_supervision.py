"""Real processes: what a client sees when one of them dies, and what is left afterwards (nothing)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from PIL import Image
from serving import ENDLESS, ENDLESS_PICTURE, PATIENCE_S, Served


def jpeg(seed: int, size: tuple[int, int] = (320, 240)) -> bytes:
    out = io.BytesIO()
    colour = tuple(random.Random(seed).randrange(256) for _ in range(3))
    Image.new("RGB", size, colour).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    with Served(tiny_model, held=True, dtype="float32", max_running=8, kv_tokens=4096, workers=2) as server:
        yield server


@pytest.fixture
def sound(served: Served) -> Iterator[Served]:
    """The shared server, whole before and after the test."""
    served.wait_until_ready()
    yield served
    served.wait_until_ready()
    served.wait_until_idle()
    assert served.caption(jpeg(1), max_tokens=4).status_code == 200


class Stream(threading.Thread):
    """One streamed chat in the background, which does not end by itself; `lines` are the data lines that came, `error`
    how the connection ended.
    """

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self.url = served.url
        self.body = {
            "messages": [{"role": "user", "content": "tell me everything"}],
            "max_tokens": ENDLESS,
            "ignore_eos": True,
            "stream": True,
        }
        self.lines: list[str] = []
        self.status = 0
        self.error: Exception | None = None
        self.first = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/chat/completions", json=self.body, timeout=PATIENCE_S
            ) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.lines.append(line[6:])
                        if '"content":"' in line and '"content":""' not in line:
                            self.first.set()
        except httpx.HTTPError as error:
            self.error = error
        self.first.set()

    def wait_for_first(self) -> None:
        """Returns once there is some text of it."""
        assert self.first.wait(PATIENCE_S)
        assert self.is_alive(), (self.status, self.error, self.lines)

    def wait_for_end(self) -> None:
        """Returns once it has ended."""
        self.join(PATIENCE_S)
        assert not self.is_alive()


def shared_files(pid: int) -> set[str]:
    """Names in /dev/shm of what a process has open or mapped. Other programs come and go there as they like."""
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        found.add(line.partition("/")[1] + line.partition("/")[2])
    return {name for name in found if name.startswith("/dev/shm/")}


@pytest.mark.parametrize("role", ["engine", "detokenizer"])
def test_a_killed_process_ends_its_streams_with_an_error_and_comes_back(sound: Served, role: str) -> None:
    """Nobody waits until it is back."""
    streams = [Stream(sound) for _ in range(3)]
    for stream in streams:
        stream.wait_for_first()
    sound.hold("starts")
    pid = sound.kill(role)
    for stream in streams:
        stream.wait_for_end()
        assert stream.error is None
        assert "[DONE]" not in stream.lines
        error = json.loads(stream.lines[-1])["error"]
        assert f"The {role} stopped" in error["message"]
    refused = sound.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert refused.status_code == 503
    assert sound.client.get("/health").status_code == 200
    assert sound.client.get("/ready").status_code == 503
    sound.release("starts")
    sound.wait_until_back(role)
    assert sound.client.get("/ready").status_code == 200
    assert sound.pids(role) != [pid]


def test_a_killed_server_process_comes_back_on_the_same_port(sound: Served) -> None:
    stream = Stream(sound)
    stream.wait_for_first()
    workers = sound.pids("preprocess")
    pid = sound.kill("server")
    stream.wait_for_end()
    assert "[DONE]" not in stream.lines
    sound.wait_until_back("server")
    assert sound.client.get("/ready").status_code == 200
    assert sound.pids("server") != [pid]
    assert not set(workers) & set(sound.pids("preprocess"))  # none may write where the new server leases
    sound.wait_until_idle()


def test_killed_workers_lose_no_request(sound: Served) -> None:
    """One worker stands still with the request that it has; the other one serves the rest, and then that one too."""
    answers: list[httpx.Response] = []

    def ask(seed: int) -> None:
        answers.append(sound.caption(jpeg(seed, (2000, 1500)), max_tokens=4))

    os.kill(sound.pids("preprocess")[0], signal.SIGSTOP)
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    sound.wait_for(lambda: len(answers) == 11)
    assert sum(thread.is_alive() for thread in threads) == 1
    sound.kill("preprocess")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [200] * 12
    sound.wait_until_back("preprocess")


def test_disconnects_at_random_times_leave_the_pool_whole(sound: Served) -> None:
    (engine,) = sound.pids("engine")
    generator = random.Random(5)

    def one(seed: int) -> None:
        body = {
            "messages": [{"role": "user", "content": f"story {seed}"}],
            "max_tokens": 60,
            "ignore_eos": True,
            "stream": bool(seed % 2),
        }
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{sound.url}/v1/chat/completions", json=body, timeout=times[seed])

    times = [generator.uniform(0.001, 0.3) for _ in range(200)]
    waiting = iter(range(200))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                seed = next(waiting, None)
            if seed is None:
                return
            one(seed)

    clients = [threading.Thread(target=client) for _ in range(16)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(PATIENCE_S)
    sound.wait_until_idle()
    assert sound.pids("engine") == [engine]


def test_only_the_engine_loads_torch(sound: Served) -> None:
    for role in ("server", "preprocess", "detokenizer", "engine"):
        for pid in sound.pids(role):
            loaded = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
            assert loaded == (role == "engine"), role


def test_a_picture_over_its_deadline_is_refused_and_others_go_on(tiny_model: Path) -> None:
    """The kernel's timer ends what keeps the interpreter to itself."""
    with Served(tiny_model, held=True, workers=1, preprocess_deadline_s=2) as server:
        quick: list[int] = []
        refused: list[httpx.Response] = []
        first = threading.Thread(target=lambda: refused.append(server.caption(ENDLESS_PICTURE, max_tokens=2)))
        first.start()
        server.wait_for(lambda: server.metric("beholder_arena_used_bytes"))  # the worker has it
        behind = threading.Thread(target=lambda: quick.append(server.caption(jpeg(3), max_tokens=2).status_code))
        behind.start()
        first.join(PATIENCE_S)
        behind.join(PATIENCE_S)
        assert refused[0].status_code == 422
        assert refused[0].json()["error"]["code"] == "image_timeout"
        assert quick == [200]
        server.wait_for_line("the preprocess 0 process is up again")
        assert server.client.get("/ready").status_code == 200


def test_sigterm_lets_running_streams_finish_and_leaves_nothing(tiny_model: Path) -> None:
    with Served(tiny_model, held=True, workers=2) as server:
        family = server.family()
        assert len(family) == 5
        shared = {file for process in family for file in shared_files(process.pid)}
        stream = Stream(server)
        stream.wait_for_first()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping: no new requests")
        server.release("answers")
        stream.wait_for_end()
        assert stream.lines[-1] == "[DONE]"
        assert server.process.wait(PATIENCE_S) == 0
        assert not [process for process in family if process.is_running()]
        assert os.listdir(server.sockets.name) == []
        assert not [file for file in shared if os.path.exists(file)]


def test_streams_longer_than_the_grace_time_end_with_an_error(tiny_model: Path) -> None:
    with Served(tiny_model, held=True, grace_s=0.2) as server:
        stream = Stream(server)
        stream.wait_for_first()
        server.process.send_signal(signal.SIGTERM)
        stream.wait_for_end()
        assert server.process.wait(PATIENCE_S) == 0
        assert "[DONE]" not in stream.lines
        assert json.loads(stream.lines[-1])["error"]["code"] == "draining"


def test_a_launcher_killed_outright_takes_every_child_along(tiny_model: Path) -> None:
    with Served(tiny_model) as server:
        family = server.family()
        server.process.kill()
        server.process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive
    with Served(tiny_model) as server:
        assert server.client.get("/ready").status_code == 200


def test_it_starts_in_a_folder_that_holds_somebodys_own_modules(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("server", "preprocess"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not mine')")
    for name in ("engine.py", "msgspec.py", "torch.py", "signal.py"):
        (tmp_path / name).write_text("raise SystemExit('not mine')")
    with Served(tiny_model, cwd=tmp_path) as server:
        assert server.caption(jpeg(2), max_tokens=2).status_code == 200


def test_a_port_in_use_is_one_clear_line(tiny_model: Path, served: Served) -> None:
    port = served.url.rsplit(":", 1)[1]
    with Served(tiny_model, wait=False) as _:
        pass
    with Served(tiny_model, wait=False, port=port) as second:
        assert second.process.wait(PATIENCE_S) == 2
        lines = [line for line in second.text().splitlines() if line]
        assert len(lines) == 1
        assert f"port {port}" in lines[0]


def test_a_model_that_cannot_be_loaded_ends_the_start_with_one_clear_line(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with Served(tmp_path, wait=False) as server:
        assert server.process.wait(PATIENCE_S) == 1
        assert "safetensors" in server.text()
        assert "Traceback" not in server.text()
