"""The calibration report: perfect forecasts score perfectly, overconfident ones do not; files are read and refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from server.calibration import expected_error, outcome, read_questions, reliability
from server.cli import app
from server.decision_models import Decision
from server.options.option import SettingsError


def decision(yes: float) -> Decision:
    return Decision("0", "yes_no", "yes" if yes >= 0.5 else "no", yes, {"yes": yes, "no": 1 - yes}, 0.5)


def test_honest_probabilities_have_no_error_and_boasts_have() -> None:
    rng = random.Random(1)
    honest, boastful = [], []
    for _ in range(20_000):
        yes = rng.random()
        answer = "yes" if rng.random() < yes else "no"
        honest.append(outcome(decision(yes), answer))
        boastful.append(outcome(decision(0.99 if yes >= 0.5 else 0.01), answer))
    assert expected_error(reliability(honest)) < 0.02
    assert expected_error(reliability(boastful)) == pytest.approx(0.24, abs=0.02)
    assert sum(item.count for item in reliability(honest)) == 20_000


def test_brier_scores() -> None:
    assert outcome(decision(1.0), "yes").brier == 0
    assert outcome(decision(1.0), "no").brier == 2
    with pytest.raises(SettingsError, match="is none of yes, no"):
        outcome(decision(1.0), "maybe")


@pytest.mark.parametrize("line", ["{", "[]", '{"image": "a"}', "3"])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text("\n" + line)
    with pytest.raises(SettingsError, match="line 2"):
        read_questions(file)


def test_the_command(tiny_model: Path, tmp_path: Path) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    lines = [
        {"image": "a.png", "question": "Is it red?", "answer": "yes"},
        {"image": "a.png", "question": "Is it blue?", "answer": "no"},
        {"image": "a.png", "question": "Which?", "type": "choice", "choices": ["red", "blue"], "answer": "red"},
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["calibrate", str(tmp_path / "q.jsonl"), "--model", str(tiny_model), "--threads", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "yes_no: 2 questions" in result.output
    assert "choice: 1 questions" in result.output
