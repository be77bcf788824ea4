"""The rules of the Realtime API's settings: what is refused by name, and what sampling and pictures they make."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from preprocess.errors import ClientError
from preprocess.options import bounded
from preprocess.wire import GenerationOptions
from server.complaints import invalid, unsupported
from server.request_models import Sampling
from server.sampling_rules import generation_options
from server.stream.conversation import Item, PictureTerms
from server.stream.realtime_events import HARMLESS, UNSERVED, Extras, RealtimeConfig, ResponseParams
from server.stream.sampling import DEFAULT_TOKENS
from server.stream.server_events import SessionLimits


def options_of(
    max_output_tokens: int | str | None, extras: Extras, limits: SessionLimits, path: str
) -> GenerationOptions:
    """How a response is sampled. Raises `ClientError`, naming the field below `path`."""
    if isinstance(max_output_tokens, str) and max_output_tokens != "inf":
        raise invalid(
            f"{path}.max_output_tokens",
            f"`{path}.max_output_tokens` is {max_output_tokens[:40]!r}; expected a number or inf.",
        )
    limit = limits.max_response_tokens
    tokens = min(DEFAULT_TOKENS, limit) if isinstance(max_output_tokens, str) else max_output_tokens
    if tokens is not None and not 1 <= tokens <= limit:
        raise invalid(
            f"{path}.max_output_tokens", f"`{path}.max_output_tokens` is {tokens}; expected 1 to {limit} or inf."
        )
    values = msgspec.structs.asdict(extras)
    del values["detail"], values["max_pixels"]
    try:
        bounded("max_pixels", extras.max_pixels, 1, limits.max_pixels)
        return generation_options(Sampling(max_tokens=tokens, **values))
    except ClientError as error:
        name = f"{path}.beholder.{error.param}"
        message = error.message.replace(f"`{error.param}`", f"`{name}`", 1)
        raise ClientError(message, code=error.code, param=name) from None


def picture_terms(extras: Extras, limits: SessionLimits) -> PictureTerms:
    """How pictures are taken."""
    return PictureTerms(limits.max_frame_bytes, extras.detail or "auto", extras.max_pixels or 0)


def check_brings_pictures(extras: Extras | None, given: Sequence[Item] | None, *, camera: bool) -> None:
    """Refuse what is said of a response's pictures where it brings none. `camera`: whether one of a camera waits."""
    brings = camera if given is None else any(item.num_images for item in given)
    for name in ("detail", "max_pixels"):
        if not brings and getattr(extras, name, None) is not None:
            path = f"response.beholder.{name}"
            raise invalid(
                path,
                f"`{path}` is of the pictures that a response brings, in its `input` or from the camera, and there "
                "is none: set it in the session before its pictures come.",
            )


def merged(session: Extras, response: Extras | None) -> Extras:
    """A response's own settings, and the session's where it says nothing."""
    if response is None:
        return session
    given = {name: value for name, value in msgspec.structs.asdict(response).items() if value is not None}
    return msgspec.structs.replace(session, **given)


def refuse_unserved(given: RealtimeConfig | ResponseParams, path: str) -> None:
    """Raises `ClientError` for a field that is known and asks for what is not served."""
    if given.output_modalities not in (None, ["text"]):
        raise unsupported(
            f"{path}.output_modalities", f'`{path}.output_modalities` is not supported except as ["text"].'
        )
    for name in UNSERVED:
        value = getattr(given, name, None)
        if not _asks_for_nothing(value) and value not in HARMLESS.get(name, ()):
            raise unsupported(f"{path}.{name}", f"`{path}.{name}` is not supported: leave it out.")


def _asks_for_nothing(value: object) -> bool:
    """Such as a turn detection of null."""
    return value is None or (isinstance(value, dict) and all(map(_asks_for_nothing, value.values())))
