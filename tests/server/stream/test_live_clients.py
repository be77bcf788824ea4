"""The live clients in samples/clients say what the model said, whatever the language."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from serving import PATIENCE_S

from preprocess.errors import ServiceError

CLIENTS = Path(__file__).parents[3] / "samples" / "clients"
TEXT = "A small red square on white."


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Three pictures, so far apart that even a busy machine is done with one when the next one comes."""
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "green", "blue")]
    file = tmp_path / "clip.gif"
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=900)
    return file


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    files = []
    for colour in ("red", "green"):
        Image.new("RGB", (64, 48), colour).save(tmp_path / f"{colour}.jpg")
        files.append(str(tmp_path / f"{colour}.jpg"))
    return files


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def execute() -> Run:
    def run(server: Any, *command: str, key: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        given = {**os.environ, "BEHOLDER_URL": server.url, "PYTHONPATH": "", **environment}
        if key:
            given["BEHOLDER_KEY"] = key
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=given, check=False)

    return run


def node() -> list[str]:
    if shutil.which("node") is None:
        pytest.skip("no node here")
    return ["node", "--experimental-websocket", "--no-warnings", str(CLIENTS / "live.mjs")]


def test_python_captions_a_clip_at_its_own_pace(serve: Any, execute: Run, clip: Path, service: Any) -> None:
    server = serve(api_key="sesame")
    done = execute(server, sys.executable, str(CLIENTS / "live.py"), str(clip), "What is it?", key="sesame")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(TEXT) == 3
    assert "[completed, frame age" in done.stdout
    assert service.last[0][0].content[0].text == "What is it?"
    assert not server.hub.sessions


def test_python_reports_why_it_was_closed(serve: Any, execute: Run, clip: Path) -> None:
    done = execute(serve(api_key="sesame"), sys.executable, str(CLIENTS / "live.py"), str(clip))
    assert done.returncode != 0
    assert "API key" in done.stderr


@pytest.mark.parametrize("content", [None, b"no clip"])
def test_python_says_at_once_that_a_source_cannot_be_read(
    serve: Any, execute: Run, tmp_path: Path, content: bytes | None
) -> None:
    server, source = serve(), tmp_path / "camera"
    if content is not None:
        source.write_bytes(content)
    done = execute(server, sys.executable, str(CLIENTS / "live.py"), str(source))
    assert done.returncode != 0
    assert "camera" in done.stderr
    assert "Traceback" not in done.stderr


def test_javascript_captions_pictures_with_a_ticket(
    serve: Any, execute: Run, pictures: list[str], service: Any
) -> None:
    server = serve(api_key="sesame")
    done = execute(server, *node(), *pictures, key="sesame")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{TEXT}   [completed]") == 2
    assert [message[0][0].content[-1].data for message in service.submitted] == [
        Path(file).read_bytes() for file in pictures
    ]


def test_javascript_reports_a_refusal(serve: Any, execute: Run, pictures: list[str], service: Any) -> None:
    done = execute(serve(api_key="sesame"), *node(), *pictures, key="wrong")
    assert done.returncode != 0
    assert "API key" in done.stderr
    service.failure = ServiceError("the engine stopped", code="engine_restarting", retry_after_s=0.05)
    done = execute(serve(), *node(), *pictures)
    assert "the engine stopped" in done.stderr


def test_javascript_says_what_is_wrong_and_ends(
    server: Any, execute: Run, pictures: list[str], tmp_path: Path, service: Any
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody else listens there
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = execute(server, *node(), *pictures, BEHOLDER_URL=nobody)
    assert (done.returncode, done.stderr.strip()) == (1, f"no answer from {nobody}")
    done = execute(server, *node(), str(tmp_path / "nowhere.jpg"))
    assert done.returncode == 1
    assert "no such file" in done.stderr
    assert "at " not in done.stderr  # a line, and no trace
    (tmp_path / "page.html").write_text("<h1>no picture</h1>")
    done = execute(server, *node(), str(tmp_path / "page.html"), pictures[0])
    assert done.returncode == 0
    assert "cannot be read" in done.stderr
    assert done.stdout.count(f"{TEXT}   [completed]") == 1


SCRIPT = """
import { live } from "%s";
const sockets = [];
const Real = WebSocket;
globalThis.WebSocket = class extends Real {
  constructor(url, protocols) {
    super([1, 2].includes(sockets.length) ? process.env.NOBODY : url, protocols);
    sockets.push(this);
  }
};
const events = [];
const until = async (what) => { while (!what()) await new Promise((resolve) => setTimeout(resolve, 5)); };
const all = (type) => events.filter((event) => event.type === type);
const source = (async function* () {
  yield new Uint8Array([0xff, 0xd8, 1]);
  await until(() => all("response.output_text.delta").length);
  sockets[0].close(4000);  // not a code by which one leaves
  await until(() => sockets.length > 1);  // and nobody answers, twice
  yield new Uint8Array([0xff, 0xd8, 2]);
  await until(() => all("response.done").length > 1);
})();
await live({ url: process.env.BEHOLDER_URL, source, onEvent: (event) => events.push(event) });
console.log(JSON.stringify(events));
"""


def test_javascript_resumes_a_lost_session(server: Any, execute: Run, service: Any, tmp_path: Path) -> None:
    service.held_after, service.num_held = 1, 1
    (tmp_path / "resume.mjs").write_text(SCRIPT % (CLIENTS / "live.mjs").as_uri())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody else listens there
        nobody = f"ws://127.0.0.1:{taken.getsockname()[1]}"
        done = execute(server, *node()[:-1], str(tmp_path / "resume.mjs"), NOBODY=nobody)
    assert done.returncode == 0, done.stderr
    events = json.loads(done.stdout)
    assert [event["seq"] for event in events if event["seq"]] == list(range(1, len(events)))
    assert [event["status"] for event in events if event["type"] == "response.done"] == ["cancelled", "completed"]
    assert sum(event["type"] == "session.resumed" for event in events) == 1


IDLE = """
import { live } from "%s";
const events = [];
const until = async (what) => { while (!what()) await new Promise((resolve) => setTimeout(resolve, 5)); };
const count = (type) => events.filter((event) => event.type === type).length;
const source = (async function* () {
  for (const answers of [1, 2]) {
    const sessions = count("session.created");
    if (answers === 2) await until(() => count("session.created") > sessions);
    while (count("response.done") < answers) { // on a busy machine a session may end before a picture is there
      const sessions = count("session.created");
      yield new Uint8Array([0xff, 0xd8, answers]);
      await until(() => count("response.done") >= answers || count("session.created") > sessions);
    }
  }
})();
await live({ url: process.env.BEHOLDER_URL, source, onEvent: (event) => events.push(event) });
"""


def test_javascript_begins_another_session_after_a_long_silence(serve: Any, execute: Run, tmp_path: Path) -> None:
    (tmp_path / "idle.mjs").write_text(IDLE % (CLIENTS / "live.mjs").as_uri())
    done = execute(serve(stream_idle_timeout_s=1), *node()[:-1], str(tmp_path / "idle.mjs"))
    assert done.returncode == 0, done.stderr


CLOSING = """
import { live } from "%s";
const sockets = [];
const Real = WebSocket;
globalThis.WebSocket = class extends Real {
  constructor(url, protocols) {
    super(url, protocols);
    sockets.push(this);
  }
  send(data) {
    if (this.readyState !== 1) throw new Error("sent into a socket that is closing");
    if (sockets.length === 2 && String(data).includes("session.close")) return this.close(4000); // and it is lost
    super.send(data);
  }
};
const events = [];
const until = async (what) => { while (!what()) await new Promise((resolve) => setTimeout(resolve, 5)); };
const answers = () => events.filter((event) => event.type === "response.done").length;
const source = (async function* () {
  yield new Uint8Array([0xff, 0xd8, 1]);
  await until(answers);
  sockets[0].close(4000);
  yield new Uint8Array([0xff, 0xd8, 2]); // at once
  await until(() => answers() > 1);
})();
await live({ url: process.env.BEHOLDER_URL, source, onEvent: (event) => events.push(event) });
console.log(sockets.length);
"""


def test_javascript_loses_nothing_in_a_connection_that_is_closing(
    server: Any, execute: Run, service: Any, tmp_path: Path
) -> None:
    """Neither a picture nor the word that it was the last one."""
    (tmp_path / "closing.mjs").write_text(CLOSING % (CLIENTS / "live.mjs").as_uri())
    done = execute(server, *node()[:-1], str(tmp_path / "closing.mjs"))
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr
    assert [message[0][0].content[-1].data[-1] for message in service.submitted] == [1, 2]
    assert not server.hub.sessions


def ask_by_shell(
    execute: Run, server: Any, picture: str, question: str, client: str
) -> subprocess.CompletedProcess[str]:
    """It waits for a time that the caller names; a busy machine needs a longer one."""
    for seconds in (1, 5, 25):
        environment = {"WEBSOCKET_CLIENT": client, "SECONDS_TO_WAIT": str(seconds)}
        done = execute(server, "sh", str(CLIENTS / "live.sh"), picture, question, **environment)
        if done.stdout:
            break
    return done


@pytest.mark.parametrize("client", ["websocat", "websockets"])
def test_shell_lines_ask_about_a_picture(
    server: Any, execute: Run, pictures: list[str], service: Any, client: str
) -> None:
    command = shutil.which(client) or str(Path(sys.executable).with_name(client))
    if not Path(command).exists():
        pytest.skip(f"no {client} here")
    done = ask_by_shell(execute, server, pictures[0], "What?", command)
    assert done.stdout.strip() == TEXT, done.stdout + done.stderr
    (message,) = service.last[0]
    assert [type(part).__name__ for part in message.content] == ["TextPart", "ImagePart"]


def test_shell_questions_may_hold_quotes(server: Any, execute: Run, pictures: list[str], service: Any) -> None:
    command = Path(sys.executable).with_name("websockets")
    if not command.exists():
        pytest.skip("no websockets here")
    question = 'Is a "red" square or a \\ there?'
    done = ask_by_shell(execute, server, pictures[0], question, str(command))
    assert done.stdout.strip() == TEXT, done.stdout + done.stderr
    assert question in [getattr(part, "text", None) for part in service.last[0][0].content]


def test_shell_answers_are_text_and_not_json(server: Any, execute: Run, pictures: list[str], service: Any) -> None:
    command = Path(sys.executable).with_name("websockets")
    if not command.exists():
        pytest.skip("no websockets here")
    service.words = ('A "red"\nsquare', " \\ a line.")
    done = ask_by_shell(execute, server, pictures[0], "What?", str(command))
    assert done.stdout.strip() == 'A "red" square \\ a line.'


def test_shell_names_the_programs_it_lacks(server: Any, execute: Run, pictures: list[str], tmp_path: Path) -> None:
    done = execute(server, str(shutil.which("sh")), str(CLIENTS / "live.sh"), pictures[0], PATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip install websockets" in done.stderr


def test_curl_gets_a_ticket(serve: Any, execute: Run) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    server = serve(api_key="sesame")
    (line,) = [line for line in (CLIENTS / "README.md").read_text().split("`") if line.startswith("curl -X POST")]
    done = execute(server, "sh", "-c", f"{line} -s", key="sesame")
    assert json.loads(done.stdout)["ticket"]


def test_every_live_client_is_in_the_list() -> None:
    listed = (CLIENTS / "README.md").read_text()
    assert all(f"`{file.name}`" in listed for file in CLIENTS.glob("live.*"))
