"""`beholder bench replay`: the mechanism's figures at scripted acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_heads import tiny_head

from engine.speculation.drafter import ChainDrafter
from server.bench.replay import main
from tests.engine.simulated_gpu import load_simulated, no_device, simulate


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


@no_device
def test_a_gpu_checks_chains_and_trees_of_every_length(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch)
    monkeypatch.setattr("engine.load.load_runner", lambda config: load_simulated(tiny_model, max_rows=4))
    captured = []
    from engine.gpu.verify_graphs import VerifyGraphs

    capture = VerifyGraphs._capture
    monkeypatch.setattr(VerifyGraphs, "_capture", lambda self, size: captured.append(size) or capture(self, size))
    arguments = f"--model {tiny_model} --streams 3 --accuracy 0.8 --length 1,7 --tokens 60 --rounds 1 --json"
    assert main(arguments.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    shapes = [("chain", 1), ("chain", 7), ("tree", 1), ("tree", 7), ("auto", 7)]
    assert [(row["drafts"], row["length"]) for row in rows] == shapes
    short, long, *_ = rows
    assert short["drafted/step"] == pytest.approx(1.0, abs=0.2)
    assert 1.5 < short["tokens/step"] < 2.0 < long["tokens/step"] < 6.0
    assert captured[:4] == [(3, width) for width in (2, 4, 8, 16)]
    assert all(rows < 3 for rows, _ in captured[4:])  # where a stream had ended, which is not timed


@no_device
def test_a_models_guesses_are_made_and_the_scripts_are_checked(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch)
    fields = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "head_dim": 64}
    head = str(tiny_head(tmp_path / "head", tiny_model, fields=fields))
    runner = load_simulated(tiny_model, max_rows=4, draft_head=head)
    monkeypatch.setattr("engine.load.load_runner", lambda config: runner)
    asked = []
    assert isinstance(runner.drafter, ChainDrafter)
    guess = runner.drafter.guess
    monkeypatch.setattr(runner.drafter, "guess", lambda *rest: asked.append(rest[1]) or guess(*rest))
    arguments = f"--model {tiny_model} --draft-head {head} --streams 3 --accuracy 0,1 --length 3 --tokens 60 --rounds 1"
    assert main([*arguments.split(), "--shapes", "model,asked", "--json"]) == 0
    wrong, _, right, _ = json.loads(capsys.readouterr().out)
    assert [wrong["drafts"], right["drafts"]] == ["model", "model"]
    assert wrong["drafted/step"] > 2.5
    assert wrong["tokens/step"] <= 1.0
    assert right["tokens/step"] > 3.5
    assert [3, 3, 3] in asked


def test_more_streams_than_may_run_are_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="65 streams, but at most 64 sequences"):
        main(f"--model {tiny_model} --streams 65 --rounds 1".split())


@pytest.mark.parametrize("wrong", ["--accuracy 1.5", "--length 0", "--shapes bush"])
def test_options_that_make_no_sense_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong.split())
    assert "expected" in (told := capsys.readouterr().err) or "must be" in told
