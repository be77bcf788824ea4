"""Careless operators and odd surroundings: the service starts and stays, or says in one line why it does not."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from serving import PATIENCE_S, Served

from server.socket_folder import PREFIX, sweep

EXEC = 'exec "$@"'


@pytest.mark.parametrize(
    ("options", "shell", "word"),
    [
        ({"arena_mb": 60_000}, "", "arena"),
        ({}, f"ulimit -n 12; {EXEC}", "open files"),
        ({"host": "a" * 70}, "", "cannot listen"),
        ({"host": "a." * 300}, "", "cannot listen"),
        ({"max_context": 1}, "", "--max-context"),
        ({"device": "cuda"}, "", "CUDA"),
        ({"kv_tokens": 1 << 30}, "", "kv_tokens"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(
    tiny_model: Path, options: dict[str, object], shell: str, word: str
) -> None:
    if options.get("device") == "cuda" and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    if "arena_mb" in options and psutil.virtual_memory().available > 60_000 << 20:
        pytest.skip("this machine has that much memory")
    with Served(tiny_model, wait=False, shell=shell, **options) as server:
        assert server.process.wait(PATIENCE_S) in (1, 2)
        lines = [line for line in server.text().splitlines() if line]
        assert len(lines) == 1, lines
        assert word in lines[0]
        assert os.listdir(server.sockets.name) == []


def test_it_serves_without_standard_streams_or_a_folder_to_stand_in(tiny_model: Path, tmp_path: Path) -> None:
    """As some service managers start it; and nobody reads what it writes."""
    place = tmp_path / "place"
    place.mkdir()
    shell = f'rmdir "$PWD"; {EXEC} <&- >&- 2>&-'
    with Served(tiny_model, cwd=place, wait=False, shell=shell, host="::") as server:
        server.connect(server.listening_url())  # :: listens on every interface, IPv4 too
        server.wait_until_ready()
        assert httpx.get(server.url.replace("127.0.0.1", "[::1]") + "/ready").status_code == 200


def test_it_outlives_whoever_read_its_log(tiny_model: Path) -> None:
    with Served(tiny_model, wait=False, shell='exec "$@" 2> >(exec true)') as server:
        server.connect(server.listening_url())
        server.wait_until_ready()
        server.kill("detokenizer")  # the launcher has something to say
        server.wait_for(lambda: server.metric("beholder_child_deaths_total"))
        server.wait_until_ready()
        question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert server.client.post("/v1/chat/completions", json=question).status_code == 200


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="these tests run under nohup themselves")
def test_a_closed_terminal_is_a_wish_to_stop_unless_nohup_says_otherwise(tiny_model: Path) -> None:
    with Served(tiny_model) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.process.wait(PATIENCE_S) == 0
        assert os.listdir(server.sockets.name) == []
    with Served(tiny_model, shell=f"trap '' HUP; {EXEC}") as server:
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert server.client.get("/ready").status_code == 200


def test_a_terminal_that_quits_the_server_leaves_nothing(tiny_model: Path) -> None:
    with Served(tiny_model) as server:
        for process in (*server.family(), server.process):  # Ctrl-\ reaches all of them
            process.send_signal(signal.SIGQUIT)
        assert server.process.wait(20) == 0
        assert os.listdir(server.sockets.name) == []


def test_a_process_that_hangs_is_noticed_and_replaced(tiny_model: Path) -> None:
    with Served(tiny_model, hang_timeout_s=3, preprocess_deadline_s=0.5, workers=1) as server:
        hung = {role: server.pids(role)[0] for role in ("engine", "preprocess", "detokenizer")}
        [serves] = server.pids("server")
        question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        os.kill(hung["engine"], signal.SIGSTOP)
        answer = server.client.post("/v1/chat/completions", json=question)
        assert answer.status_code == 503
        assert "no sign of life" in answer.json()["error"]["message"]
        server.wait_for_line("the engine process is up again")
        os.kill(hung["preprocess"], signal.SIGSTOP)
        os.kill(hung["detokenizer"], signal.SIGSTOP)
        server.process.send_signal(signal.SIGSTOP)  # time in which the launcher slept too is nobody's fault
        time.sleep(4.5)
        woke = time.monotonic()
        server.process.send_signal(signal.SIGCONT)
        for name in ("preprocess 0", "detokenizer"):
            server.wait_for_line(f"the {name} process died (no sign of life")
            assert time.monotonic() - woke > 2.9, "they had their time once more"
        for name in ("preprocess 0", "detokenizer"):
            server.wait_for_line(f"the {name} process is up again")
        assert server.pids("server") == [serves]
        assert not {*server.pids("engine"), *server.pids("preprocess"), *server.pids("detokenizer")} & set(
            hung.values()
        )
        assert server.client.post("/v1/chat/completions", json=question).status_code == 200


def test_folders_of_launchers_that_are_gone_are_swept_and_others_are_not(tmp_path: Path) -> None:
    names = ["abandoned", "running", "just-made"]
    folders = {name: tmp_path / f"{PREFIX}{name}" for name in names}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "lock").touch()
        if name != "just-made":
            os.utime(folder, (0, 0))
    with (folders["running"] / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep(tmp_path)
    assert [name for name in names if folders[name].exists()] == ["running", "just-made"]
