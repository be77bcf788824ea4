"""Tools as OpenAI's clients write them: functions that the model may ask for, its calls, and how free it is to call."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function. `parameters` is the JSON schema of its arguments. `strict` holds where a call is required."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool: always a function."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which function."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(msgspec.Struct, frozen=True):
    """A call's function and its arguments, JSON as text."""

    name: str
    arguments: str


class ToolCallOut(msgspec.Struct, frozen=True):
    """A call that the model makes, and that clients send back."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new of a call: its name at first, then its arguments piece by piece."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk of a stream adds to a call."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None
