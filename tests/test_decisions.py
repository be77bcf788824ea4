"""Decisions: probabilities as the model's own distribution has them, whichever way they are asked for."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from serving import Served

import beholder as api
from engine.batch import Row, RowSampling
from preprocess.wire import Branch, Job, Lease, Message, SamplingParams, TextPart
from server.decisions import OPTIONS, decisions_of, questions_of, weighed
from server.sequences import sequences_of

QUESTIONS: list[str | dict[str, Any]] = [
    "Is it red?",
    {"id": "colour", "type": "choice", "question": "Which colour?", "choices": ["red", "red car", "blue bus", "blue"]},
    {"type": "score", "question": "How tidy?", "min": 0, "max": 12},
    {"type": "choice", "question": "Which letter?", "choices": ["naïve", "写真", "x"], "instruction": ""},
]


def picture(seed: int) -> Image.Image:
    return Image.new("RGB", (64, 48), (40 * seed % 256, 99, 7 * seed))


def png(seed: int) -> bytes:
    out = io.BytesIO()
    picture(seed).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def beholder(tiny_model: Path) -> Iterator[api.Beholder]:
    with api.Beholder(tiny_model, dtype="float32", threads=1) as beholder:
        yield beholder


def brute_force(
    beholder: api.Beholder, prompt: list[int], ways: dict[tuple[int, ...], int], end: int
) -> dict[int, float]:
    """P(option), token after token: of what can follow, each by its share. `ways`: spelling → option."""
    runner: Any = beholder._engine.runner
    if len(set(ways.values())) == 1:
        return {next(iter(ways.values())): 1.0}
    following: dict[int, dict[tuple[int, ...], int]] = {}
    for spelling, option in ways.items():
        following.setdefault(spelling[0] if spelling else end, {})[spelling[1:]] = option
    sampling = RowSampling(SamplingParams(max_tokens=1), 0)
    runner.slot_table[0, : len(prompt)] = torch.arange(1, len(prompt) + 1)
    logprobs = runner.logits([Row(0, 0, prompt, sampling)])[0].double().log_softmax(-1)
    weights = {token: math.exp(logprobs[token]) for token in following}
    totals: dict[int, float] = {}
    for token, rest in following.items():
        for option, share in brute_force(beholder, [*prompt, token], rest, end).items():
            totals[option] = totals.get(option, 0.0) + share * weights[token] / sum(weights.values())
    return totals


def test_probabilities_are_those_of_the_model(tiny_model: Path) -> None:
    """Without pictures, since the reference knows none. It writes over slots: nobody may use this engine afterwards."""
    beholder = api.Beholder(tiny_model, dtype="float32", threads=1)
    checked = questions_of(QUESTIONS)
    message = Message("user", [TextPart("Look. ")])
    job = Job("r", [message], OPTIONS, Lease(), 0.0, questions=[weighed(question) for question in checked])
    prepared = beholder._prepare(job)
    running = [
        beholder._start(prepared, msgspec.structs.replace(sequence, request_id=f"r{index}"), 0.0)
        for index, sequence in enumerate(sequences_of(prepared, 1))
    ]
    while any(item.last is None for item in running):
        beholder._step()
    scores = {
        index: [logprob for delta in item.deltas for token in delta.logprobs for _, _, logprob in token.top]
        for index, item in enumerate(running)
    }
    decisions = decisions_of(checked, prepared.branches, scores)
    prompts = beholder._preparer._prompts
    end = beholder._preparer.profile.eos_ids[0]
    for question, decision in zip(job.questions, decisions, strict=True):
        prompt = prompts.encode([Message("user", [*message.content, TextPart(question.text)])], [], []).ids
        ways = {
            tuple(prompts.encode_text(way)): option
            for option, spellings in enumerate(question.options)
            for way in spellings
        }
        expected = brute_force(beholder, prompt, ways, end)
        found = dict(enumerate(decision.probabilities.values()))
        assert found == pytest.approx(expected, abs=1e-5)
        assert sum(found.values()) == pytest.approx(1)
        assert 0 < decision.coverage < 1


def test_answers_are_typed(beholder: api.Beholder) -> None:
    yes_no, choice, score, _ = beholder.decide(picture(1), QUESTIONS)
    assert (yes_no.id, choice.id, score.id) == ("0", "colour", "2")
    assert yes_no.probability == yes_no.probabilities["yes"]
    assert yes_no.answer == ("yes" if yes_no.probability >= 0.5 else "no")
    assert choice.probability == max(choice.probabilities.values()) == choice.probabilities[str(choice.answer)]
    assert isinstance(score.answer, int)
    assert score.expected == pytest.approx(sum(int(name) * share for name, share in score.probabilities.items()))


def test_questions_answer_the_same_alone_and_together_and_share_the_picture(beholder: api.Beholder) -> None:
    together = beholder.decide(picture(2), QUESTIONS)
    for question, decision in zip(QUESTIONS, together, strict=True):
        alone = beholder.decide(picture(2), [question])[0]
        assert alone.probabilities == pytest.approx(decision.probabilities, abs=1e-5)
    before = beholder._engine.stats()
    beholder.decide(picture(3), QUESTIONS)
    after = beholder._engine.stats()
    assert after.vision_queries - after.vision_hits - (before.vision_queries - before.vision_hits) == 1
    assert (
        beholder.decide(picture(3), ["Is it red?"])[0].probability
        != beholder.decide(picture(9), ["Is it red?"])[0].probability
    )


def test_branches_multiply_down_the_tree() -> None:
    branches = [
        Branch(b"", 0, [1, 2], [-1, 1], -1, 0),
        Branch(b"", 0, [3, 4], [0, 2], 0, 0),
    ]
    question = questions_of([{"type": "choice", "question": "?", "choices": ["red car", "blue", "red bus"]}])
    decision = decisions_of(question, branches, {0: [math.log(0.3), math.log(0.1)], 1: [-5.0, -5.0]})[0]
    assert decision.probabilities == pytest.approx({"red car": 0.375, "blue": 0.25, "red bus": 0.375})
    assert decision.coverage == pytest.approx(0.4)


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    with Served(tiny_model, dtype="float32") as server:
        yield server


def test_over_http_as_json_and_as_a_form(served: Served, beholder: api.Beholder) -> None:
    image = "data:image/png;base64," + base64.b64encode(png(4)).decode()
    body = {"image": image, "questions": [q if isinstance(q, dict) else {"question": q} for q in QUESTIONS]}
    as_json = served.client.post("/v1/decisions", json=body).json()
    expected = beholder.decide(picture(4), QUESTIONS)
    for found, decision in zip(as_json["decisions"], expected, strict=True):
        assert found["probabilities"] == pytest.approx(decision.probabilities, abs=1e-4)
    assert as_json["images"][0]["width"] == 64
    assert as_json["usage"]["prompt_tokens"] > 0
    as_form = served.client.post(
        "/v1/decisions", files={"file": ("a.png", png(4))}, data={"questions": json.dumps(body["questions"])}
    ).json()
    for found, other in zip(as_form["decisions"], as_json["decisions"], strict=True):
        assert found["probabilities"] == pytest.approx(other["probabilities"], abs=1e-4)
    one = served.client.post("/v1/decisions", files={"file": ("a.png", png(4))}, data={"question": "Is it red?"}).json()
    assert one["decisions"][0]["probability"] == pytest.approx(as_json["decisions"][0]["probability"], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"questions": []}, "questions", "expected 1 to 64"),
        ({"questions": [{"question": ""}]}, "questions[0].question", "expected 1 to"),
        ({"questions": [{"question": "?", "type": "maybe"}]}, "questions[0].type", "yes_no, choice or score"),
        ({"questions": [{"question": "?", "type": "choice"}]}, "questions[0].choices", "missing"),
        ({"questions": [{"question": "?", "choices": ["a", "b"]}]}, "questions[0].choices", "no meaning"),
        ({"questions": [{"question": "?", "type": "choice", "choices": ["a"]}]}, "questions[0].choices", "2 to 64"),
        ({"questions": [{"question": "?", "type": "choice", "choices": ["a", "A"]}]}, "questions[0].choices", "alike"),
        ({"questions": [{"question": "?", "type": "score", "min": 5, "max": 1}]}, "questions[0].max", "min < max"),
        ({"questions": [{"question": "?", "id": "a"}, {"question": "?", "id": "a"}]}, "questions[1].id", "two"),
        ({"questions": [{"question": "?", "chioces": []}]}, "questions[0].chioces", "`choices`"),
        ({"image": None}, "image", "no picture"),
        ({"image": "data:image/png;base64,AAAA"}, "image", ""),
        ({"temperature": 1}, "temperature", "unknown"),
    ],
)
def test_refusals_name_the_field(served: Served, change: dict[str, Any], param: str | None, words: str) -> None:
    image = "data:image/png;base64," + base64.b64encode(png(4)).decode()
    answer = served.client.post("/v1/decisions", json={"image": image, "questions": [{"question": "?"}], **change})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]
