"""What the benchmarks refuse before they start anything: numbers without sense, and options that would do nothing."""

from __future__ import annotations

import pytest

from server.bench import command, load

WRONG = (
    "transformers --rounds 0",
    "transformers --requests 0",
    "load --turns 0",
    "load --max-tokens 1.5",
    "load --seed -1",
    "live --fps 0",
    "live --fps nan",
    "live --seconds inf",
    "live --max-tokens 0",
    "interference --streams 0",
    "interference --picture-every-ms 0",
    "interference --seconds 0",
    "interference --turns 0",
    "interference --rounds 0",
    "interference --picture-tokens -3",
    "pace --streams 0",
    "pace --picture-every-ms -1",
    "pace --seconds soon",
    "pace --clients -1",
    "pace --rounds 0",
    "idle --streams 0",
    "idle --steps 0",
    "idle --kernels -1",
    "idle --seconds 0",
    "speculation --streams 4,0",
    "speculation --rounds 0",
    "speculation --always -1",
    "replay --streams 1,x",
    "replay --accuracy 0,often",
    "replay --second nan",
    "replay --branches 0",
    "replay --rounds 0",
)


@pytest.mark.parametrize("wrong", WRONG)
def test_numbers_that_make_no_sense_are_refused_by_option_and_value(
    wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, option, value = wrong.split()
    with pytest.raises(SystemExit) as ended:
        command.main([kind, f"{option}={value}"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"argument {option}: " in told
    assert value.rpartition(",")[2] in told
    assert "expected" in told


@pytest.mark.parametrize("kind", ["load", "interference"])
def test_options_for_a_server_that_is_not_started_are_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([kind, "--base-url", "http://127.0.0.1:9", "--serve=--max-running 8"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--serve" in told
    assert "--base-url" in told


@pytest.mark.parametrize("reuse", ["unique", "camera"])
def test_turns_are_refused_where_conversations_have_one(reuse: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["load", "--reuse", reuse, "--turns", "4"])
    assert ended.value.code == 2
    assert "--reuse turns" in capsys.readouterr().err


def test_a_lone_flag_reaches_the_server_as_the_help_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(model: str, *options: str) -> None:
        raise RuntimeError(f"would start with {options}")

    monkeypatch.setattr(load, "serving", told)
    assert command.main(["load", "--serve=--exact-decode"]) == 1
    assert "('--exact-decode',)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["load", "--help"])
    assert "--serve='" in capsys.readouterr().out
