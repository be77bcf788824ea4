"""Typed questions about pictures → what the pipeline weighs, and its log probabilities → answers.

yes_no  "yes" | "no"                         probability of "yes"
choice  one of the given texts               probability of each
score   a whole number from `min` to `max`   probability of each, and the expected value
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from preprocess.errors import ClientError
from preprocess.wire import Branch, GenerationOptions, Question
from server.complaints import decode, invalid, of_validation
from server.decision_models import Decision, DecisionQuestion, DecisionRequest

MAX_QUESTIONS: Final = 64
MAX_ANSWERS: Final = 64
MAX_ANSWER: Final = 200
MAX_QUESTION: Final = 4_000
OPTIONS: Final = GenerationOptions(max_tokens=1, temperature=0.0, logprobs=0)


_decoder: Final = msgspec.json.Decoder(DecisionRequest)


def decision_from_json(body: bytes | bytearray) -> DecisionRequest:
    """Decode a JSON request."""
    return decode(_decoder, body)


def decision_from_text(pairs: Sequence[tuple[str, str]]) -> DecisionRequest:
    """Convert form fields, which are all text.

    Raises:
        ClientError: A field is unknown, given twice, or no JSON where that is expected.
    """
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name in values:
            raise invalid(name, f"`{name}` was given twice.")
        values[name] = text
    try:
        if "questions" in values:
            values["questions"] = msgspec.json.decode(values["questions"])
        return msgspec.convert(values, DecisionRequest, strict=False)
    except msgspec.ValidationError as error:
        raise of_validation(error, DecisionRequest) from None
    except (msgspec.DecodeError, RecursionError):
        raise invalid("questions", "`questions` is no JSON; in a form it is JSON as text.") from None


def checked_questions(request: DecisionRequest) -> list[DecisionQuestion]:
    """The questions of a request, each sound and with an id.

    Raises:
        ClientError: Naming the place.
    """
    questions = list(request.questions)
    if request.question is not None:
        questions.insert(0, DecisionQuestion(request.question))
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise invalid("questions", f"There are {len(questions)} questions; expected 1 to {MAX_QUESTIONS}.")
    ids: set[str] = set()
    checked = []
    for index, question in enumerate(questions):
        _check(question, f"questions[{index}]")
        name = question.id if question.id is not None else str(index)
        if name in ids:
            raise invalid(f"questions[{index}].id", f"The id {name[:100]!r} belongs to two questions.")
        ids.add(name)
        checked.append(msgspec.structs.replace(question, id=name))
    return checked


def _check(question: DecisionQuestion, path: str) -> None:
    if not 1 <= len(question.question) <= MAX_QUESTION:
        raise invalid(
            f"{path}.question",
            f"`{path}.question` has {len(question.question)} characters; expected 1 to {MAX_QUESTION:,}.",
        )
    given = {name: getattr(question, name) for name in ("choices", "min", "max")}
    wanted = {"yes_no": (), "choice": ("choices",), "score": ("min", "max")}[question.type]
    for name, value in given.items():
        if value is not None and name not in wanted:
            raise invalid(f"{path}.{name}", f"`{path}.{name}` has no meaning for a question of type {question.type}.")
        if value is None and name in wanted:
            raise invalid(f"{path}.{name}", f"`{path}.{name}` is missing; a {question.type} needs it.")
    if question.type == "choice":
        assert question.choices is not None
        choices = question.choices
        if not 2 <= len(choices) <= MAX_ANSWERS:
            raise invalid(f"{path}.choices", f"`{path}.choices` holds {len(choices)}; expected 2 to {MAX_ANSWERS}.")
        for index, choice in enumerate(choices):
            if choice != choice.strip() or not 1 <= len(choice) <= MAX_ANSWER:
                raise invalid(
                    f"{path}.choices[{index}]",
                    f"`{path}.choices[{index}]` must have 1 to {MAX_ANSWER} characters, none of them space at an end.",
                )
        if len({choice.lower() for choice in choices}) < len(choices):
            raise invalid(f"{path}.choices", f"`{path}.choices` holds two that are alike.")
    if question.type == "score":
        assert question.min is not None
        assert question.max is not None
        if not 0 <= question.min < question.max or question.max - question.min >= MAX_ANSWERS or question.max > 1000:
            raise invalid(
                f"{path}.max",
                f"`{path}` asks for {question.min} to {question.max}; expected 0 ≤ min < max ≤ 1,000 and at most "
                f"{MAX_ANSWERS} steps.",
            )


def answers_of(question: DecisionQuestion) -> list[str]:
    """Every possible answer, as it is told to the client."""
    if question.type == "yes_no":
        return ["yes", "no"]
    if question.type == "choice":
        assert question.choices is not None
        return question.choices
    assert question.min is not None
    assert question.max is not None
    return [str(number) for number in range(question.min, question.max + 1)]


def weighed(question: DecisionQuestion) -> Question:
    """The question as the pipeline takes it: an answer may begin with a space and with a capital, or not."""
    answers = answers_of(question)
    instruction = question.instruction
    if instruction is None:
        instruction = {
            "yes_no": "",
            "choice": f"Choose one: {', '.join(answers)}.",
            "score": f"Answer with a number from {question.min} to {question.max}.",
        }[question.type]
    text = f"{question.question} {instruction}".strip()
    options = []
    for answer in answers:
        ways = dict.fromkeys((answer, answer[:1].upper() + answer[1:]))
        options.append([space + way for way in ways for space in ("", " ")])
    return Question(text, options)


def decisions_of(
    questions: Sequence[DecisionQuestion], branches: Sequence[Branch], scores: Mapping[int, Sequence[float]]
) -> list[Decision]:
    """Answers from log probabilities.

    Args:
        questions: As `checked_questions` gave them.
        branches: What was scored.
        scores: By index of a branch, the log probabilities of its `score_ids`.
    """
    totals = [dict.fromkeys(range(len(answers_of(question))), 0.0) for question in questions]
    coverage = [0.0] * len(questions)
    shares: list[list[float]] = []
    for index, branch in enumerate(branches):
        logprobs = scores[index]
        largest = max(logprobs)
        weights = [math.exp(logprob - largest) for logprob in logprobs]
        reached = 1.0 if branch.parent < 0 else shares[branch.parent][branch.edge]
        shares.append([reached * weight / sum(weights) for weight in weights])
        if branch.parent < 0:
            coverage[branch.question] = min(1.0, math.fsum(map(math.exp, logprobs)))
        for option, share in zip(branch.options, shares[index], strict=True):
            if option >= 0:
                totals[branch.question][option] += share
    return [
        _decision(question, list(totals[index].values()), coverage[index]) for index, question in enumerate(questions)
    ]


def _decision(question: DecisionQuestion, shares: list[float], coverage: float) -> Decision:
    answers = answers_of(question)
    best = max(range(len(answers)), key=lambda index: shares[index])
    assert question.id is not None
    return Decision(
        id=question.id,
        type=question.type,
        answer=int(answers[best]) if question.type == "score" else answers[best],
        probability=shares[0] if question.type == "yes_no" else shares[best],
        probabilities=dict(zip(answers, shares, strict=True)),
        coverage=coverage,
        expected=(
            math.fsum(int(answer) * share for answer, share in zip(answers, shares, strict=True))
            if question.type == "score"
            else None
        ),
    )


def questions_of(values: Sequence[str | Mapping[str, object]]) -> list[DecisionQuestion]:
    """Questions that came as Python values; a string is a yes/no question.

    Raises:
        ClientError: Naming the place.
    """
    as_mappings = [{"question": value} if isinstance(value, str) else dict(value) for value in values]
    try:
        text = json.dumps({"questions": as_mappings})
    except (TypeError, ValueError):
        raise ClientError("`questions` is no JSON.", code="invalid_value", param="questions") from None
    return checked_questions(decision_from_json(text.encode()))
