"""The `beholder` command as people type it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import msgspec
import PIL.Image
import pytest
from typer.testing import CliRunner

from server import cli
from server.options.option import environment_name, flag_name
from server.settings import OPTIONS

runner = CliRunner()


def run(*arguments, **environment):
    """The command in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BEHOLDER_")}
    return subprocess.run(
        [sys.executable, "-m", "server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env={**clean, **environment},
        check=False,
    )


def words(text):
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(("command", "names"), [("serve", tuple(OPTIONS)), ("caption", cli.CAPTION_OPTIONS)])
def test_help_shows_every_option_with_default_and_variable(command, names):
    shown = words(runner.invoke(cli.app, [command, "--help"], env={"COLUMNS": "120"}).output)
    for name in names:
        field = OPTIONS[name]
        assert f"{flag_name(name)} " in shown
        assert f"env {environment_name(name)}]" in shown
        assert words(field.option.help) in shown
        if field.kind in (int, float):
            assert f"default {field.default}; env {environment_name(name)}" in shown


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("caption", ("max-images",)),  # each picture is a request of its own
        ("watch", ("presets", "max-images", "max-image-mb", "max-video-frames", "exact-decode")),  # decoded frames
        ("calibrate", ("presets", "max-images")),
    ],
)
def test_commands_have_no_option_that_they_have_no_use_for(command, options):
    shown = runner.invoke(cli.app, [command, "--help"]).output
    assert "--max-context" in shown
    assert not [option for option in options if f"--{option} " in shown]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["caption", "x.mp4", "--segment-s", "2"], "--segment-s is the length of the parts of --timed"),
        (["caption", "x.jpg", "--timed", "srt", "--json"], "--json and --timed cannot be had together"),
        (["caption", "x.jpg", "--presets", "folder"], "--presets is where --preset NAME is looked for"),
        (["watch", "x.mp4", "--reconnect-s", "3"], "--reconnect-s is for addresses"),
        (["watch", "/dev/video0", "--reconnect-s", "0"], "--reconnect-s is for addresses"),
    ],
)
def test_options_that_cannot_matter_beside_others_are_refused(arguments, message):
    done = runner.invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in words(done.output)


def test_version_is_a_command_and_an_option():
    assert runner.invoke(cli.app, ["version"]).output == runner.invoke(cli.app, ["--version"]).output != ""


def test_bench_says_what_it_lacks(monkeypatch, capsys):
    from server.bench import beside_transformers, command

    monkeypatch.setattr(beside_transformers.importlib.util, "find_spec", lambda name: None)
    assert command.main([]) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_fastapi():
    code = (
        "import sys\n"
        "from server import cli\n"
        "sys.argv = ['beholder', 'serve', '--help']\n"
        "try:\n    cli.main()\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'fastapi', 'numpy', 'PIL', 'huggingface_hub', 'zmq', 'uvicorn'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr


def test_the_application_imports_no_torch():
    code = "import sys, server.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["serve", "--prt", "1"], {}, "No such option: --prt"),
        (["serve", "--port", "none"], {}, "beholder: --port: expected a whole number from 0 to 65535, got 'none'\n"),
        (["serve"], {"BEHOLDER_PROT": "1"}, "Did you mean BEHOLDER_PORT?\n"),
        (["serve", "--model", "./nowhere/x"], {}, "beholder: --model: there is no folder './nowhere/x'"),
        (["serve", "./nowhere/x"], {}, "beholder: --model: there is no folder './nowhere/x'"),
        (["serve", "owner/model"], {"HF_HUB_OFFLINE": "1"}, "beholder: --model: there is no folder 'owner/model' here"),
        (["serve", "a", "--model", "b"], {}, "beholder: the model is named twice: 'a', and --model 'b'"),
        (["caption"], {}, "Missing argument"),
        (["caption", "x.jpg", "--port", "1"], {}, "No such option: --port"),
        (["caption", "x.jpg", "--model", "./nowhere/x"], {}, "beholder: --model: there is no folder './nowhere/x'"),
    ],
)
def test_a_wrong_command_line_exits_2_with_a_clear_line(arguments, environment, message):
    done = run(*arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_serve_hands_resolved_settings_to_the_launcher(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    launched = []
    monkeypatch.setattr("server.launch.launch", lambda settings: launched.append(settings) or 7)
    arguments = ["serve", "--model", str(tmp_path), "--port", "81", "--no-prefix-cache", "--allowed-hosts", "a,b"]
    assert runner.invoke(cli.app, arguments).exit_code == 7
    (settings,) = launched
    assert (settings.port, settings.prefix_cache, settings.allowed_hosts) == (81, False, ("a", "b"))
    assert settings.model == str(tmp_path)


def test_version_prints_one_line():
    assert re.fullmatch(r"\d+\S*\n", runner.invoke(cli.app, ["version"]).output)


def test_caption_describes_every_file_and_fails_for_the_bad_one(tiny_model, tmp_path):
    from PIL import Image

    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (40, 30), "red").save(good)
    bad.write_text("no picture")
    options = ["--model", str(tiny_model), "--max-tokens", "4", "--temperature", "0", "--threads", "1"]

    def caption(*arguments):
        return runner.invoke(cli.app, ["caption", *arguments])

    one = caption(str(good), *options)
    assert (one.exit_code, one.stderr) == (0, "")

    many = caption(str(good), str(bad), str(tmp_path / "none.png"), *options)
    assert many.exit_code == 1
    assert many.stdout.startswith(f"{good}: {one.stdout}")
    assert many.stderr.count("\n") == 2
    assert f"beholder: {bad}: " in many.stderr
    assert "No such file or directory" in many.stderr
    assert "Traceback" not in many.stderr

    structured = caption(str(good), "--json", *options)
    answer = msgspec.json.decode(structured.stdout)
    assert answer["text"] + "\n" == one.stdout
    assert answer["file"] == str(good)
    assert answer["usage"]["completion_tokens"] == 4
    assert (answer["images"][0]["width"], answer["images"][0]["height"]) == (40, 30)


def test_caption_with_an_unusable_model_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    done = runner.invoke(cli.app, ["caption", "x.jpg", "--model", str(tmp_path)])
    assert done.exit_code == 1
    assert done.stderr.startswith("beholder: ")
    assert done.stderr.count("\n") == 1


def test_caption_reads_standard_input_and_names_that_are_no_text(tiny_model, tmp_path):
    picture = tmp_path / os.fsdecode(b"\xff.png")
    PIL.Image.new("RGB", (32, 24)).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(picture)
    # The second finds the first one's prefix in the cache, and in bfloat16 a shorter chunk may round otherwise.
    options = ["--model", str(tiny_model), "--dtype", "float32", "--max-tokens", "2", "--json"]
    command = [sys.executable, "-m", "server.cli", "caption", *options, "-", str(picture)]
    with picture.open("rb") as stdin:
        done = subprocess.run(command, stdin=stdin, capture_output=True, timeout=150, check=False)
    first, second = map(msgspec.json.decode, done.stdout.splitlines())
    assert first["text"] == second["text"]
    assert second["file"].endswith("\N{REPLACEMENT CHARACTER}.png")


def test_an_answer_that_cannot_be_written_is_one_line(tiny_model, tmp_path):
    PIL.Image.new("RGB", (32, 24)).save(tmp_path / "a.png")
    command = [sys.executable, "-m", "server.cli", "caption", "--model", str(tiny_model), str(tmp_path / "a.png")]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=150, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def test_prebuild_has_nothing_to_do_on_a_cpu(tiny_model):
    result = run("prebuild", "--model", str(tiny_model), "--device", "cpu", "--kv-tokens", "100")
    assert (result.returncode, result.stderr) == (0, "")
    assert "nothing to compile" in result.stdout


def test_prebuild_refuses_what_a_start_would_refuse(tiny_model):
    result = run("prebuild", "--model", str(tiny_model), "--device", "cpu", "--max-context", "999999999")
    assert result.returncode != 0
    assert "max" in result.stderr
    assert "Traceback" not in result.stderr
