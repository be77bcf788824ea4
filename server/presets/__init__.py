"""Presets: a prompt, sampling and a shape under a name. Each is a JSON file; people add a folder of their own.

    {"title": …, "description": …, "prompt": …, "sampling": {…}, "response_format" or "structured_outputs": {…}}

The file's name is the preset's. Where the prompt says ``{prompt}``, the client's own text goes; else that follows the
prompt. What the request itself says counts more than the preset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from preprocess.errors import BeholderError, ClientError
from preprocess.wire import ImagePart, Message, TextPart
from server.options.option import SettingsError, nearest
from server.request_models import SAMPLING_FIELDS, Sampling
from server.sampling_rules import sampling_options
from server.shape_models import SHAPE_FIELDS

FOLDER: Final = Path(__file__).parent
PLACE: Final = "{prompt}"
MAX_BYTES: Final = 256 << 10
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

SomeSampling = TypeVar("SomeSampling", bound=Sampling)


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A preset's file, as it is and as `GET /v1/presets` shows it."""

    title: str
    description: str
    prompt: str
    sampling: dict[str, Any] = {}
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The request's fields that it sets."""
        shapes = {name: getattr(self, name) for name in SHAPE_FIELDS}
        return {**self.sampling, **{name: shape for name, shape in shapes.items() if shape is not None}}

    def prompt_for(self, text: str | None) -> str:
        """Its prompt around the client's own text.

        Raises:
            ClientError: It cannot do without.
        """
        if PLACE in self.prompt:
            if not text:
                raise ClientError("This preset needs a `prompt`: your question.", code="invalid_value", param="prompt")
            return self.prompt.replace(PLACE, text)
        return f"{self.prompt}\n{text}" if text else self.prompt


@lru_cache(maxsize=4)
def load_presets(folder: str) -> dict[str, Preset]:
    """The presets that come with the server, and those of a folder, which may replace them. By name, in order.

    Raises:
        SettingsError: The folder or a file in it cannot be used; which, and why.
    """
    presets = {file.stem: _load(file) for file in sorted(FOLDER.glob("*.json"))}
    if folder:
        if not Path(folder).is_dir():
            raise SettingsError(f"--presets: {folder} is no folder")
        presets |= {file.stem: _load(file) for file in sorted(Path(folder).glob("*.json"))}
    return presets


def find_preset(name: str, folder: str) -> Preset:
    """A preset of the server, or of that folder, by its name. Raises as `preset_of` does."""
    return preset_of(load_presets(folder), name)


def preset_of(presets: Mapping[str, Preset], name: str) -> Preset:
    """A preset by its name.

    Raises:
        ClientError: 404; there is none.
    """
    if name not in presets:
        hint = nearest(name[:64], list(presets)) or f" Known are {', '.join(presets)}."
        raise ClientError(
            f"The preset {name[:64]!r} does not exist.{hint}", status=404, code="preset_not_found", param="preset"
        )
    return presets[name]


def with_preset(request: SomeSampling, preset: Preset) -> SomeSampling:
    """The request with what the preset sets and it leaves open. A shape of its own replaces the preset's."""
    missing = left_open(preset.fields, given_fields(request))
    converted = msgspec.json.decode(msgspec.json.encode(missing), type=Sampling)
    return msgspec.structs.replace(request, **{name: getattr(converted, name) for name in missing})


def values_with_preset(values: Mapping[str, object], preset: Preset) -> dict[str, object]:
    """The same for sampling fields that are Python values."""
    return {**values, **left_open(preset.fields, {name for name, value in values.items() if value is not None})}


def given_fields(request: Sampling) -> set[str]:
    """Names of the sampling fields that a request sets."""
    return {name for name in SAMPLING_FIELDS if getattr(request, name) is not None}


def left_open(fields: Mapping[str, Any], given: Set[str]) -> dict[str, Any]:
    """Those of the fields that nothing given stands for: both names of a limit are one, both fields of a shape too."""
    if "max_completion_tokens" in given:
        given = {*given, "max_tokens"}
    if given & set(SHAPE_FIELDS):
        given = {*given, *SHAPE_FIELDS}
    return {name: value for name, value in fields.items() if name not in given}


def ask_preset(messages: list[Message], preset: Preset) -> list[Message]:
    """A chat whose last user turn asks what the preset asks, with that turn's own text in its place."""
    last = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    if last < 0:
        raise ClientError("A preset needs a user message with a picture.", code="invalid_value", param="messages")
    content = messages[last].content
    text = "\n".join(part.text for part in content if isinstance(part, TextPart))
    # Emptied, not left out: refusals name pictures by their place.
    emptied = [part if isinstance(part, ImagePart) else TextPart("") for part in content]
    asked = Message("user", [*emptied, TextPart(preset.prompt_for(text))])
    return [*messages[:last], asked, *messages[last + 1 :]]


def _load(file: Path) -> Preset:
    try:
        if not _NAME.fullmatch(file.stem):
            raise SettingsError(f"--presets: {file}: expected a name of small letters, digits, - and _")
        if file.stat().st_size > MAX_BYTES:
            raise SettingsError(f"--presets: {file} is larger than {MAX_BYTES >> 10} KiB")
        preset = msgspec.json.decode(file.read_bytes(), type=Preset)
        for name in preset.sampling:
            if name not in SAMPLING_FIELDS or name in SHAPE_FIELDS:
                raise SettingsError(f"--presets: {file}: `sampling` cannot hold {name}.")
        sampling_options(preset.fields)
    except OSError as error:
        raise SettingsError(f"--presets: {file} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, BeholderError) as error:
        raise SettingsError(f"--presets: {file}: {error}") from None
    return preset
