"""The settings of a `vlm.stream.v1` session: what a client sends to change some, and all as the server shows them."""

from __future__ import annotations

from typing import Final, Literal, cast, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from preprocess.wire import Detail
from server.request_models import SamplingFields
from server.shape_models import ResponseFormat, TextFormat

TriggerMode = Literal["manual", "interval", "continuous", "on_change"]
SESSION_SAMPLING: Final = SamplingFields.__struct_fields__
"""Sampling fields and shapes that a session has."""


class TriggerPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What starts responses. With another `mode` than before, what is absent has its default."""

    mode: str | UnsetType | None = UNSET
    interval_ms: float | UnsetType | None = UNSET
    change_threshold: float | UnsetType | None = UNSET


class SettingsPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session has besides sampling, as `SessionPatch` has it."""

    model: str | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    prompt: str | UnsetType | None = UNSET
    preset: str | UnsetType | None = UNSET
    prompt_position: str | UnsetType | None = UNSET
    trigger: TriggerPatch | UnsetType | None = UNSET
    overflow: str | UnsetType | None = UNSET
    preempt: bool | UnsetType | None = UNSET
    context_frames: int | UnsetType | None = UNSET
    detail: str | UnsetType | None = UNSET
    max_pixels: int | UnsetType | None = UNSET
    pinned_ids: list[int] | UnsetType | None = UNSET
    return_token_ids: bool | UnsetType | None = UNSET


_HINTS: Final = get_type_hints(SamplingFields)
SessionPatch: Final = cast(
    "type[SettingsPatch]",
    msgspec.defstruct(
        "SessionPatch",
        [(name, _HINTS[name] | UnsetType, UNSET) for name in SESSION_SAMPLING],
        bases=(SettingsPatch,),
        module=__name__,
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    ),
)
"""The `session` of `session.update`: what is absent stays, null is the default again."""


class Trigger(msgspec.Struct, frozen=True):
    """`interval_ms`: least time between starts. `change_threshold`: percent, see `preprocess.change`."""

    mode: TriggerMode = "manual"
    interval_ms: float = 0.0
    change_threshold: float = 4.0


class SessionSettings(SamplingFields, frozen=True, kw_only=True):
    """All that holds for a session now, the preset's sampling and shape with it. What is null is left to the model.

    `prompt`: the client's own text, which stands where the preset has a place for it; null where the preset does
    without.
    """

    model: str
    instructions: str | None = None
    prompt: str | None
    preset: str | None = None
    prompt_position: Literal["before", "after"] = "before"
    trigger: Trigger = msgspec.field(default_factory=Trigger)
    overflow: Literal["latest", "queue"] = "latest"
    preempt: bool = False
    context_frames: int = 0
    detail: Detail = "auto"
    max_pixels: int | None = None
    pinned_ids: list[int] = msgspec.field(default_factory=list)
    response_format: ResponseFormat = msgspec.field(default_factory=TextFormat)
    return_token_ids: bool = False
    max_tokens: int

    @property
    def num_bytes(self) -> int:
        """Of its texts and shapes, of which there may be many."""
        return len(msgspec.json.encode(self))
