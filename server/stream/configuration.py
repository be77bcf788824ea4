"""The rules of `session.update`: a patch becomes new settings, or is refused as a whole, naming the field."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from preprocess.errors import ClientError
from preprocess.options import bounded
from preprocess.wire import GenerationOptions
from server.complaints import invalid, of_validation, unsupported
from server.request_models import SAMPLING_FIELDS, Sampling
from server.sampling_rules import generation_options
from server.settings import Settings
from server.stream.events import (
    SESSION_SAMPLING,
    Ask,
    Capabilities,
    SessionLimits,
    SessionPatch,
    SessionSettings,
    Trigger,
    TriggerPatch,
)
from server.stream.presets import DEFAULT_PRESET, PRESETS

TRIGGERS: Final = ("manual", "interval", "continuous", "on_change")
MAX_TEXT: Final = 32_768
"""Most characters of a prompt or of instructions."""
MAX_INTERVAL_MS: Final = 86_400_000
DEFAULT_TOKENS: Final = 256
DEFAULT_INTERVAL_MS: Final = 1000.0
DEFAULT_THRESHOLD: Final = 4.0

T = TypeVar("T")


def limits_of(settings: Settings) -> SessionLimits:
    """What the server's options allow one session."""
    return SessionLimits(
        max_frame_bytes=min(int(settings.max_image_mb * (1 << 20)), settings.stream_message_bytes),
        max_clip_bytes=int(min(settings.max_video_mb, settings.stream_max_held_mb) * (1 << 20)),
        max_message_bytes=settings.stream_message_bytes,
        max_pixels=settings.max_image_pixels,
        max_images=settings.max_images,
        max_fps=settings.stream_max_fps,
        max_messages_per_s=settings.stream_max_messages_per_s,
        max_bytes_per_s=settings.stream_max_mb_per_s * (1 << 20),
        max_held_bytes=int(settings.stream_max_held_mb * (1 << 20)),
        max_queue=settings.stream_max_queue,
        max_response_tokens=settings.stream_max_response_tokens,
        send_queue_bytes=settings.stream_send_queue_kb * 1024,
        idle_timeout_s=settings.stream_idle_timeout_s,
        max_session_s=settings.stream_max_session_s,
        resume_s=settings.stream_resume_s,
    )


CAPABILITIES: Final = Capabilities(triggers=list(TRIGGERS), presets=list(PRESETS), media=["frame", "image", "video"])


def default_settings(model_name: str, limits: SessionLimits) -> SessionSettings:
    """What holds before the first `session.update`."""
    return SessionSettings(
        model=model_name,
        prompt=PRESETS[DEFAULT_PRESET],
        preset=DEFAULT_PRESET,
        max_tokens=min(DEFAULT_TOKENS, limits.max_response_tokens),
    )


def apply_patch(
    raw: msgspec.Raw, current: SessionSettings, model_names: tuple[str, ...], limits: SessionLimits
) -> SessionSettings:
    """The settings after a patch.

    Raises:
        ClientError: Naming the field; nothing has changed then.
    """
    try:
        patch = msgspec.json.decode(raw, type=SessionPatch)
    except msgspec.ValidationError as error:
        raise _below("session", of_validation(error, SessionPatch)) from None
    default = default_settings(model_names[0], limits)
    changes: dict[str, Any] = {}
    for name in patch.__struct_fields__:
        value = getattr(patch, name)
        if value is not UNSET:
            check = _CHECKS.get(name)
            changes[name] = getattr(default, name) if value is None else (check(value) if check else value)
    if patch.model is not UNSET and patch.model is not None and patch.model not in model_names:
        raise ClientError(
            f"The model {patch.model[:200]!r} is not served here; expected {' or '.join(model_names)}.",
            status=404,
            code="model_not_found",
            param="session.model",
        )
    _choose_prompt(patch, changes)
    settings = msgspec.structs.replace(current, **changes)
    _check_together(settings, current, limits)
    return settings


def _choose_prompt(patch: SessionPatch, changes: dict[str, Any]) -> None:
    if isinstance(patch.prompt, str) and isinstance(patch.preset, str):
        raise invalid("session.preset", "`session.prompt` and `session.preset` were both given; expected one of them.")
    if isinstance(patch.preset, str):
        changes["prompt"] = PRESETS[patch.preset]
    elif isinstance(patch.prompt, str):
        changes["preset"] = None
    elif patch.prompt is None or patch.preset is None:
        changes["prompt"], changes["preset"] = PRESETS[DEFAULT_PRESET], DEFAULT_PRESET


def _check_together(settings: SessionSettings, current: SessionSettings, limits: SessionLimits) -> None:
    options(settings, "session")
    if settings.max_tokens > limits.max_response_tokens:
        raise invalid(
            "session.max_tokens",
            f"`session.max_tokens` is {settings.max_tokens}; expected at most {limits.max_response_tokens}.",
        )
    if settings.preempt and settings.trigger.mode == "continuous":
        raise invalid(
            "session.preempt",
            "`session.preempt` with the continuous trigger would end every response before it is done; expected "
            "another trigger, or false.",
        )
    absent = set(settings.pinned_ids) - set(current.pinned_ids)
    if absent:
        raise invalid(
            "session.pinned_ids", f"`session.pinned_ids` names {min(absent)}, which is not pinned; send the picture."
        )
    num_images = len(settings.pinned_ids) + max(1, 2 * settings.context_frames)
    if num_images > limits.max_images:
        raise invalid(
            "session.context_frames",
            f"`session.context_frames` {settings.context_frames} and {len(settings.pinned_ids)} pinned pictures make "
            f"{num_images} pictures in a prompt; at most {limits.max_images} are accepted.",
        )


def options(settings: SessionSettings, path: str, ask: Ask | None = None) -> GenerationOptions:
    """How responses are sampled.

    Raises:
        ClientError: Naming the field below `path`.
    """
    values = {name: getattr(settings, name) for name in SESSION_SAMPLING}
    if ask is not None:
        for name in SAMPLING_FIELDS:  # all of them: none is accepted and ignored
            value = getattr(ask, name)
            if value is not None:
                values[name] = value
        if ask.max_completion_tokens is not None and ask.max_tokens is None:
            values["max_tokens"] = ask.max_completion_tokens
            values.pop("max_completion_tokens", None)
    try:
        return generation_options(Sampling(**values))
    except ClientError as error:
        raise _below(path, error) from None


def _below(path: str, error: ClientError) -> ClientError:
    """The same refusal of a field that lies deeper in the event."""
    if not error.param:
        return ClientError(error.message.replace("The body", f"`{path}`", 1), code=error.code, param=path)
    message = error.message.replace(f"`{error.param}`", f"`{path}.{error.param}`", 1)
    return ClientError(message, code=error.code, param=f"{path}.{error.param}")


def check_ask(ask: Ask, settings: SessionSettings, limits: SessionLimits) -> GenerationOptions:
    """The sampling of one response that was asked for.

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
    if ask.model is not None and ask.model != settings.model:
        raise invalid("response.model", f"`response.model` is not the session's ({settings.model}): leave it out.")
    check_metadata(ask.metadata)
    sampling = options(settings, "response", ask)
    if sampling.max_tokens is not None and sampling.max_tokens > limits.max_response_tokens:
        raise invalid(
            "response.max_tokens",
            f"`response.max_tokens` is {sampling.max_tokens}; expected at most {limits.max_response_tokens}.",
        )
    return sampling


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


def _response_format(value: dict[str, Any]) -> dict[str, str]:
    if value != {"type": "text"}:
        raise unsupported(
            "session.response_format", '`session.response_format` is not supported except as {"type": "text"}.'
        )
    return {"type": "text"}


def _trigger(patch: TriggerPatch) -> Trigger:
    path = "session.trigger"
    mode: Any = _word(f"{path}.mode", *TRIGGERS)(patch.mode)
    for name, modes in (("interval_ms", ("interval", "on_change")), ("change_threshold", ("on_change",))):
        if getattr(patch, name) is not None and mode not in modes:
            raise invalid(
                f"{path}.{name}", f"`{path}.{name}` has no meaning with the trigger {mode}; expected {modes[0]}."
            )
    interval_ms = patch.interval_ms
    if interval_ms is None:
        interval_ms = DEFAULT_INTERVAL_MS if mode == "interval" else 0.0
    threshold = DEFAULT_THRESHOLD if patch.change_threshold is None else patch.change_threshold
    for name, value, low, high in (
        ("interval_ms", interval_ms, 10 if mode == "interval" else 0, MAX_INTERVAL_MS),
        ("change_threshold", threshold, 0, 100),
    ):
        if not math.isfinite(value):
            raise invalid(f"{path}.{name}", f"`{path}.{name}` is no number.")
        bounded(f"{path}.{name}", value, low, high)
    return Trigger(mode, interval_ms, threshold)


_CHECKS: Final[dict[str, Callable[[Any], Any]]] = {
    "instructions": _text("session.instructions"),
    "prompt": _text("session.prompt"),
    "preset": _word("session.preset", *PRESETS),
    "prompt_position": _word("session.prompt_position", "before", "after"),
    "trigger": _trigger,
    "overflow": _word("session.overflow", "latest", "queue"),
    "context_frames": _context_frames,
    "detail": _word("session.detail", "auto", "low", "high"),
    "response_format": _response_format,
}
