"""`beholder bench replay`: the mechanism's figures at scripted acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.bench.replay import main


def test_tokens_a_step_follow_from_the_script(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--model {tiny_model} --streams 1,2 --accuracy 0,1 --second 1 --length 3 --tokens 40 --rounds 1 --json"
    assert main(arguments.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    found = {(row["streams"], row["drafts"], row["accuracy"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 2 * 3
    for streams in (1, 2):
        for shape in ("chain", "tree"):
            wrong, right = (found[streams, shape, accuracy] for accuracy in (0, 1))
            assert right["tokens/step"] > 3.0
            assert wrong["drafted/step"] > 2.5
            assert wrong["tokens/step"] <= 1.0 if shape == "chain" else wrong["tokens/step"] > 1.5


@pytest.mark.parametrize("wrong", ["--accuracy 1.5", "--length 0", "--shapes bush"])
def test_options_that_make_no_sense_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong.split())
    assert "expected" in (told := capsys.readouterr().err) or "must be" in told
