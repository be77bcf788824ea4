"""Types of argparse options that the benchmarks share: numbers that make sense, or an error that says which do."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, least=1)


def count_from_0(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, least=0)


def counts(text: str) -> list[int]:
    """Whole numbers from 1, with commas between them."""
    try:
        return [count(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers from 1, e.g. 1,8,64") from None


def positive(text: str) -> float:
    """A finite number above 0."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def probability(text: str) -> float:
    """A number from 0 to 1."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a probability, from 0 to 1")
    return number


def probabilities(text: str) -> list[float]:
    """Numbers from 0 to 1, with commas between them."""
    return [probability(part) for part in text.split(",")]


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # which is in no range
