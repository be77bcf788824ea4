"""What an option is, and how its value is read from text: the command line, the environment and Python agree."""

from __future__ import annotations

import difflib
import math
import re
import typing
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

ENVIRONMENT_PREFIX: Final = "BEHOLDER_"
_LINK: Final = re.compile(
    r"BEHOLDER_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_LINKED: Final = re.compile(r"(tcp|udp|sctp)://")


class SettingsError(Exception):
    """An option is unknown or has a value that cannot be. The message says what came and what is expected."""


class Option(msgspec.Struct, frozen=True):
    """What belongs to an option besides its name, type and default. `low` and `high` are inclusive bounds."""

    help: str
    unit: str = ""
    low: float | None = None
    high: float | None = None


def flag_name(name: str) -> str:
    """``max_body_mb`` → ``--max-body-mb``."""
    return "--" + name.replace("_", "-")


def environment_name(name: str) -> str:
    """``max_body_mb`` → ``BEHOLDER_MAX_BODY_MB``."""
    return ENVIRONMENT_PREFIX + name.upper()


def is_service_link(variable: str, text: str) -> bool:
    """Whether Kubernetes made a variable, of a service whose name begins as ours do: pods get the addresses of all.

    ``BEHOLDER_PORT=tcp://10.0.0.1:80``, ``BEHOLDER_SERVICE_HOST``, ``BEHOLDER_UI_PORT_80_TCP_ADDR`` and so on.
    """
    return _LINK.fullmatch(variable) is not None or (variable.endswith("_PORT") and _LINKED.match(text) is not None)


def nearest(name: str, known: list[str]) -> str:
    """`` Did you mean …?`` for the closest known name, or nothing when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


class Field(msgspec.Struct, frozen=True):
    """An option as `load` and the command line need it. `kind` is the plain type: str, int, float, bool or tuple."""

    name: str
    kind: type
    choices: tuple[str, ...]
    default: Any
    option: Option


def fields_of(settings: type[msgspec.Struct]) -> dict[str, Field]:
    """The options that a struct declares, in their order."""
    hints = typing.get_type_hints(settings, include_extras=True)
    fields = {}
    for field in msgspec.structs.fields(settings):
        annotated, option = typing.get_args(hints[field.name])
        origin = typing.get_origin(annotated)
        choices = typing.get_args(annotated) if origin is Literal else ()
        kind = str if origin is Literal else (origin or annotated)
        fields[field.name] = Field(field.name, kind, choices, field.default, option)
    return fields


_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


def parse(field: Field, value: object, *, source: str) -> object:
    """One option's value from a string or a Python value, checked.

    Raises:
        SettingsError: Names `source`, the value and what is expected.
    """
    shown = "a value" if field.name == "api_key" else repr(value)
    refusal = SettingsError(f"{source}: expected {expected(field)}, got {shown}")
    if field.kind is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise refusal
        return tuple(item.strip() for item in items if item.strip())
    if field.kind is bool:
        if isinstance(value, bool):
            return value
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in _TRUE + _FALSE:
            raise refusal
        return word in _TRUE
    if field.kind is str:
        text = str(value) if isinstance(value, Path) else value
        if not isinstance(text, str) or "\0" in text or (field.choices and text not in field.choices):
            raise refusal
        return text
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise refusal
    try:
        number = field.kind(value.replace("_", "") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        raise refusal from None
    if isinstance(value, float) and number != value:  # int(2.5) would be accepted silently
        raise refusal
    if not math.isfinite(number):
        raise refusal
    option = field.option
    if (option.low is not None and number < option.low) or (option.high is not None and number > option.high):
        raise refusal
    return number


def expected(field: Field) -> str:
    """What an option takes, in words."""
    if field.choices:
        return "one of " + ", ".join(field.choices)
    if field.kind is bool:
        return "true or false"
    if field.kind is tuple:
        return "words with commas between them"
    if field.kind is str:
        return "a string"
    kind = "a whole number" if field.kind is int else "a number"
    unit = f" of {field.option.unit}" if field.option.unit else ""
    low, high = field.option.low, field.option.high
    return f"{kind}{unit} from {low:.12g} to {high:.12g}" if low is not None else kind
