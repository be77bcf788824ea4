"""`beholder calibrate`: how far the probabilities of decisions can be trusted, on questions whose answers are known.

The file has one question a line, as in `POST /v1/decisions`, with `image` (a file, relative to the questions') and the
right `answer`:

    {"image": "cat.jpg", "type": "yes_no", "question": "Is there a cat?", "answer": "yes"}
    {"image": "cat.jpg", "type": "choice", "question": "What colour?", "choices": ["black", "red"], "answer": "black"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from server.options.option import SettingsError

if TYPE_CHECKING:
    from server.decision_models import Decision
    from server.offline import Beholder

NUM_BINS: Final = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one question came to. `confidence` is the probability of the answer that was given."""

    kind: str
    confidence: float
    is_right: bool
    brier: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers of like confidence: how many, how sure on average, and how often right."""

    count: int
    confidence: float
    accuracy: float


def outcome(decision: Decision, answer: str) -> Outcome:
    """Compare a decision with the right answer. The Brier score sums over the answers: 0 is best, 2 worst."""
    probabilities = decision.probabilities
    if answer not in probabilities:
        raise SettingsError(f"the answer {answer!r} is none of {', '.join(probabilities)}")
    brier = math.fsum((share - (name == answer)) ** 2 for name, share in probabilities.items())
    confidence = max(probabilities.values())
    return Outcome(decision.type, confidence, str(decision.answer) == answer, brier, decision.coverage)


def reliability(outcomes: Iterable[Outcome], num_bins: int = NUM_BINS) -> list[Bin]:
    """Answers by confidence, lowest first; empty bins are left out."""

    def place(item: Outcome) -> int:
        return min(int(item.confidence * num_bins), num_bins - 1)

    bins = []
    for _, group in groupby(sorted(outcomes, key=place), key=place):
        items = list(group)
        count = len(items)
        bins.append(
            Bin(count, sum(item.confidence for item in items) / count, sum(item.is_right for item in items) / count)
        )
    return bins


def expected_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error (Naeini et al. 2015): mean distance of confidence and accuracy, by answers."""
    total = sum(item.count for item in bins)
    return sum(item.count * abs(item.confidence - item.accuracy) for item in bins) / total if total else 0.0


def read_questions(file: Path) -> list[tuple[Path, dict[str, Any], str]]:
    """(picture, question, answer) of each line.

    Raises:
        SettingsError: The file cannot be read, or a line is not as expected.
    """
    questions = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
            image, answer = question.pop("image"), question.pop("answer")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise SettingsError(f"{file}, line {number}: expected an object with image, question and answer") from None
        questions.append((file.parent / str(image), question, str(answer)))
    return questions


def calibrate(beholder: Beholder, file: Path) -> str:
    """Ask all questions of a file; the report as text."""
    outcomes: list[Outcome] = []
    for picture, group in groupby(read_questions(file), key=lambda item: item[0]):
        asked = list(group)
        decisions = beholder.decide(picture, [question for _, question, _ in asked])
        outcomes += [outcome(decision, answer) for decision, (_, _, answer) in zip(decisions, asked, strict=True)]
    if not outcomes:
        raise SettingsError(f"{file} holds no questions")
    return report(outcomes)


def report(outcomes: Sequence[Outcome]) -> str:
    """A table for each type of question."""
    lines = []
    for kind in dict.fromkeys(item.kind for item in outcomes):
        own = [item for item in outcomes if item.kind == kind]
        bins = reliability(own)
        count = len(own)
        lines += [
            f"{kind}: {count} questions, {sum(item.is_right for item in own) / count:.1%} right, "
            f"Brier score {sum(item.brier for item in own) / count:.3f}, calibration error {expected_error(bins):.3f}, "
            f"mean coverage {sum(item.coverage for item in own) / count:.1%}",
            "",
            "| answers | confidence | right |",
            "|---|---|---|",
            *(f"| {item.count} | {item.confidence:.1%} | {item.accuracy:.1%} |" for item in bins),
            "",
        ]
    return "\n".join(lines)
