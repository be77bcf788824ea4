"""The client programs in samples/clients do what they say, and report a refusal in its own words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import PATIENCE_S

from preprocess.errors import ClientError, ServiceError

CLIENTS = Path(__file__).parents[2] / "samples" / "clients"
TEXT = "A small red square on white."
COMMANDS = {
    "caption.sh": ["sh", str(CLIENTS / "caption.sh")],
    "caption.py": [sys.executable, str(CLIENTS / "caption.py")],
    "chat.py": [sys.executable, str(CLIENTS / "chat.py")],
    "caption.mjs": ["node", str(CLIENTS / "caption.mjs")],
}


@pytest.fixture(params=COMMANDS)
def run(request, served, tmp_path):
    command = COMMANDS[request.param]
    needs = {"sh": "curl", "node": "node"}.get(command[0])
    if needs and shutil.which(needs) is None:
        pytest.skip(f"no {needs} here")
    picture = tmp_path / "a picture.jpg"
    picture.write_bytes(b"not looked at")

    def run(*more):
        environment = {**os.environ, "BEHOLDER_URL": served.url, "PYTHONPATH": ""}
        return subprocess.run(
            [*command, str(picture), *more],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environment,
            check=False,
        )

    return run


def test_every_file_is_listed_and_tested():
    files = {file.name for file in CLIENTS.iterdir() if file.name != "README.md"} - {"__pycache__"}
    files = {name for name in files if not name.startswith("live.")}  # tests/server/stream/test_live_clients.py
    assert files == set(COMMANDS)
    assert all(f"`{name}`" in (CLIENTS / "README.md").read_text() for name in files)


def test_it_prints_the_text(run):
    done = run()
    assert done.returncode == 0, done.stderr
    assert TEXT in done.stdout


def test_it_reports_a_refusal(run, service):
    service.refusal = ClientError("The picture is too dark", code="image_undecodable")
    done = run()
    assert done.returncode != 0
    assert "The picture is too dark" in done.stdout + done.stderr


def test_it_notices_a_failure_in_the_middle(run, service):
    service.failure = ServiceError("the engine stopped", code="engine_restarting")
    assert run().returncode != 0


def test_curl_sends_several_in_a_form(served, service, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    files = [tmp_path / "a b.jpg", tmp_path / "c.jpg"]
    for file in files:
        file.write_bytes(file.name.encode())
    environment = {**os.environ, "BEHOLDER_URL": served.url}
    command = [*COMMANDS["caption.sh"], *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=True)
    assert done.stdout.count(TEXT) == 2
    assert [part.data for part in service.last[0][0].content[:-1]] == [b"a b.jpg", b"c.jpg"]
