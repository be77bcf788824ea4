"""Typed reading of `config.json`: a field has a type, a default where transformers has one, and errors that name it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preprocess.errors import ModelError

_MISSING: Any = object()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: The file is missing, is no JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a Hugging Face model folder was expected") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


class Fields:
    """One object of a configuration file. A field that is null counts as absent, as in transformers.

    Args:
        values: The object.
        where: What errors put before a field's name, such as ``"config.json: text_config."``.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def section(self, name: str) -> Fields:
        """A nested object; empty when absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Fields(value, f"{self.where}{name}.")

    def integer(self, name: str, default: int = _MISSING, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, value, f"a whole number of at least {minimum}")
        return value

    def number(self, name: str, default: float = _MISSING) -> float:
        """A number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(name, value, "a number above 0")
        return float(value)

    def between(self, name: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.error(
                name, value, f"a number from {low} to {high}" if high < math.inf else f"a number of at least {low}"
            )
        return float(value)

    def flag(self, name: str, default: bool = _MISSING) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str = _MISSING) -> str:
        """One of `allowed`; what else the file says is refused by name."""
        value = self._get(name, default)
        if value not in allowed:
            raise self.error(name, value, " or ".join(repr(word) for word in allowed))
        return str(value)

    def square(self, name: str, default: int = _MISSING) -> int:
        """A side length, written as a number or as a pair of equal numbers."""
        value = self._get(name, default)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            value = value[0]
        return Fields({name: value}, self.where).integer(name)

    def refuse(self, name: str, *, unless: Any, reason: str) -> None:
        """Refuses a field that changes the result and is not implemented.

        Raises:
            ModelError: The field is there and is not `unless`.
        """
        if self.has(name) and self.values[name] != unless:
            raise ModelError(f"{self.where}{name} is {self.values[name]!r}: {reason}")

    def error(self, name: str, value: Any, expected: str) -> ModelError:
        """The error for a field with a wrong value."""
        return ModelError(f"{self.where}{name} is {value!r}, expected {expected}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelError(f"{self.where}{name} is missing")
        return default
