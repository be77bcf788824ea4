"""Typed questions and their answers, as clients write and read them. See `server.decisions`."""

from __future__ import annotations

from typing import Literal

import msgspec

from preprocess.wire import Detail


class DecisionQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question. `choices` belongs to a choice, `min` and `max` to a score.

    `instruction` is what the model is told after the question, in place of the type's own words; "" is nothing.
    """

    question: str
    type: Literal["yes_no", "choice", "score"] = "yes_no"
    id: str | None = None
    choices: list[str] | None = None
    min: int | None = None
    max: int | None = None
    instruction: str | None = None


class DecisionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/decisions`; in a form `questions` is JSON as text. `question` is one yes/no question."""

    questions: list[DecisionQuestion] = []
    question: str | None = None
    context: str | None = None
    model: str | None = None
    detail: Detail | None = None
    image: str | None = None
    images: list[str] | None = None
    session_id: str | None = None
    priority: int | None = None


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one question.

    `answer` is the most likely one. `coverage` is how much of its probability the model gave to the possible answers
    at all, before these were made to sum to 1: where it is low, the model would rather have said something else.
    """

    id: str
    type: str
    answer: str | int
    probability: float
    probabilities: dict[str, float]
    coverage: float
    expected: float | None = None
