"""The rules of `session.update`: a patch becomes new settings, or is refused as a whole, naming the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import UNSET

from preprocess.errors import ClientError
from preprocess.options import bounded
from server.complaints import decode, invalid, unsupported
from server.request_models import DEFAULT_PROMPT
from server.shape_models import TextFormat
from server.stream.client_events import Ask
from server.stream.sampling import Question, asked_question, below, session_question
from server.stream.settings_events import SESSION_SAMPLING, SessionPatch, SessionSettings, Trigger, TriggerPatch
from server.stream.terms import TRIGGERS, Terms

MAX_TEXT: Final = 32_768
"""Most characters of a prompt or of instructions."""
MAX_INTERVAL_MS: Final = 86_400_000
_patch_decoder: Final = msgspec.json.Decoder(SessionPatch)
DEFAULT_INTERVAL_MS: Final = 1000.0
DEFAULT_THRESHOLD: Final = 4.0


@dataclass(frozen=True)
class Configuration:
    """What holds for a session. `own`: the fields that its client has set; `shown` has the others too."""

    own: Mapping[str, Any]
    question: Question
    shown: SessionSettings

    def pinning(self, pinned_ids: list[int]) -> Configuration:
        """The same with other pinned pictures."""
        return Configuration(self.own, self.question, msgspec.structs.replace(self.shown, pinned_ids=pinned_ids))


def first_configuration(terms: Terms) -> Configuration:
    """What holds before the first `session.update`."""
    return _configuration({}, [], terms)


def patched(raw: msgspec.Raw, current: Configuration, terms: Terms) -> Configuration:
    """The configuration after a patch.

    Raises:
        ClientError: Naming the field; nothing has changed then.
    """
    try:
        patch = decode(_patch_decoder, bytes(raw))
    except ClientError as error:
        raise below("session", error) from None
    given = {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}
    own = dict(current.own)
    if given.keys() & {"prompt", "preset"}:  # both are one question
        own.pop("prompt", None)
        own.pop("preset", None)
    pinned_ids = current.shown.pinned_ids
    for name, value in given.items():
        if name == "pinned_ids":
            pinned_ids = _still_pinned(value, pinned_ids)
        elif value is None:
            own.pop(name, None)
        elif name == "trigger":
            own[name] = _trigger(value, current.shown.trigger)
        else:
            check = _CHECKS.get(name)
            own[name] = check(value) if check else value
    configuration = _configuration(own, pinned_ids, terms)
    _check_together(configuration.shown, terms)
    return configuration


def _configuration(own: dict[str, Any], pinned_ids: list[int], terms: Terms) -> Configuration:
    question = session_question(own, terms)
    sampling = {name: getattr(question.shown, name) for name in SESSION_SAMPLING}
    sampling["response_format"] = sampling["response_format"] or TextFormat()
    fields = {name: value for name, value in own.items() if name not in sampling}
    fields.setdefault("model", terms.model_names[0])
    fields.setdefault("prompt", None if "preset" in own else DEFAULT_PROMPT)
    return Configuration(own, question, SessionSettings(**fields, **sampling, pinned_ids=pinned_ids))


def _still_pinned(wanted: list[int] | None, pinned_ids: list[int]) -> list[int]:
    absent = set(wanted or []) - set(pinned_ids)
    if absent:
        raise invalid(
            "session.pinned_ids", f"`session.pinned_ids` names {min(absent)}, which is not pinned; send the picture."
        )
    return list(dict.fromkeys(wanted or []))


def _check_together(settings: SessionSettings, terms: Terms) -> None:
    if settings.model not in terms.model_names:
        raise ClientError(
            f"The model {settings.model[:200]!r} is not served here; expected {' or '.join(terms.model_names)}.",
            status=404,
            code="model_not_found",
            param="session.model",
        )
    if settings.preempt and settings.trigger.mode == "continuous":
        raise invalid(
            "session.preempt",
            "`session.preempt` with the continuous trigger would end every response before it is done; expected "
            "another trigger, or false.",
        )
    bounded("session.max_pixels", settings.max_pixels, 1, terms.limits.max_pixels)
    num_images = len(settings.pinned_ids) + max(1, 2 * settings.context_frames)
    if num_images > terms.limits.max_images:
        raise invalid(
            "session.context_frames",
            f"`session.context_frames` {settings.context_frames} and {len(settings.pinned_ids)} pinned pictures make "
            f"{num_images} pictures in a prompt; at most {terms.limits.max_images} are accepted.",
        )


def check_ask(ask: Ask, configuration: Configuration, terms: Terms) -> Question:
    """What one `response.create` asks, and how its answer is sampled.

    Raises:
        ClientError: Naming the field.
    """
    for name in ("stream", "session_id", "priority"):
        if getattr(ask, name) is not None:
            raise unsupported(f"response.{name}", f"`response.{name}` means nothing here: leave it out.")
    for name in ("prompt", "instructions"):
        text = getattr(ask, name)
        if text is not None:
            _text(f"response.{name}")(text)
    model = configuration.shown.model
    if ask.model is not None and ask.model != model:
        raise invalid("response.model", f"`response.model` is not the session's ({model}): leave it out.")
    check_metadata(ask.metadata)
    return asked_question(ask, configuration.own, configuration.question, terms)


def check_metadata(metadata: dict[str, str] | None) -> None:
    """Bounds of what is only echoed, as OpenAI has them.

    Raises:
        ClientError: It is too large.
    """
    given = metadata or {}
    if len(given) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in given.items()):
        raise invalid(
            "response.metadata",
            "`response.metadata` is too large; expected at most 16 keys of 64 and values of 512 characters.",
        )


# ---- single fields --------------------------------------------------------------------------------------------------


def _word(path: str, *words: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in words:
            shown = ", ".join(words[:-1]) + " or " + words[-1]
            raise invalid(path, f"`{path}` is {value[:80]!r}; expected {shown}.")
        return value

    return check


def _text(path: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if not value or len(value) > MAX_TEXT:
            raise invalid(path, f"`{path}` has {len(value)} characters; expected 1 to {MAX_TEXT}.")
        return value

    return check


def _context_frames(value: int) -> int:
    bounded("session.context_frames", value, 0, 1024)
    return value


def _trigger(patch: TriggerPatch, before: Trigger) -> Trigger:
    path = "session.trigger"
    mode: Any = before.mode if patch.mode is UNSET else "manual" if patch.mode is None else patch.mode
    _word(f"{path}.mode", *TRIGGERS)(mode)
    default = Trigger(mode, DEFAULT_INTERVAL_MS if mode == "interval" else 0.0, DEFAULT_THRESHOLD)
    values: dict[str, float] = {}
    for name, modes, low, high in (
        ("interval_ms", ("interval", "on_change"), 10 if mode == "interval" else 0, MAX_INTERVAL_MS),
        ("change_threshold", ("on_change",), 0, 100),
    ):
        value = getattr(patch, name)
        if value is UNSET and mode == before.mode:
            value = getattr(before, name)
        elif value is UNSET or value is None:
            value = getattr(default, name)
        if not math.isfinite(value):
            raise invalid(f"{path}.{name}", f"`{path}.{name}` is no number.")
        if mode not in modes and value != getattr(default, name):  # what is shown may be sent back
            raise invalid(
                f"{path}.{name}", f"`{path}.{name}` has no meaning with the trigger {mode}; expected {modes[0]}."
            )
        bounded(f"{path}.{name}", value, low, high)
        values[name] = value
    return Trigger(mode, **values)


_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    "instructions": _text("session.instructions"),
    "prompt": _text("session.prompt"),
    "prompt_position": _word("session.prompt_position", "before", "after"),
    "overflow": _word("session.overflow", "latest", "queue"),
    "context_frames": _context_frames,
    "detail": _word("session.detail", "auto", "low", "high"),
}
