"""The rules of tools: what a request may offer and demand, and how the turns of a conversation with calls must look."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from preprocess.errors import ClientError
from preprocess.json_schema import MAX_TEXT
from preprocess.wire import Grammar, ToolCall
from server.complaints import invalid
from server.tool_models import NamedTool, Tool, ToolCallOut, ToolChoice

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}}


def tools_of(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> tuple[str, Grammar | None, frozenset[str]]:
    """What the model is told of (JSON for the template), the grammar of a call that it must make, and all names.

    Raises:
        ClientError: The tools cannot be, or what is chosen is none of them.
    """
    if not tools:
        if choice not in {None, "none"}:
            raise invalid("tool_choice", "`tool_choice` needs `tools`.")
        if parallel is not None:
            raise invalid("parallel_tool_calls", "`parallel_tool_calls` needs `tools`.")
        return "", None, frozenset()
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"`tools` holds {len(tools)}; at most {MAX_TOOLS} are accepted.")
    described: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        name = tool.function.name
        path = f"tools[{index}].function.name"
        if not _NAME.fullmatch(name):
            raise invalid(path, f"`{path}` is no name; expected 1 to 64 letters, digits, - and _.")
        if name in described:
            raise invalid(path, f"`{path}`: two functions are called {name}.")
        parameters = tool.function.parameters
        described[name] = {
            "name": name,
            "description": tool.function.description or "",
            "parameters": _NO_ARGUMENTS if parameters is None else parameters,
        }
    if choice == "none":
        return "", None, frozenset()
    told = _text([{"type": "function", "function": function} for function in described.values()])
    wanted = list(described)
    if isinstance(choice, NamedTool):
        if choice.function.name not in described:
            known = ", ".join(described)
            raise invalid("tool_choice.function.name", f"`tool_choice` names no tool; expected one of {known}.")
        wanted = [choice.function.name]
    elif choice != "required":
        return told, None, frozenset(described)
    at_most = 1 if parallel is False or isinstance(choice, NamedTool) else MAX_CALLS
    shape = {"functions": [described[name] for name in wanted], "at_most": at_most}
    return told, Grammar("tools", _text(shape), "tools"), frozenset(described)


def calls_of(calls: list[ToolCallOut], path: str) -> list[ToolCall]:
    """Calls of an earlier answer that come back.

    Raises:
        ClientError: One has arguments that are no JSON object.
    """
    checked = []
    for index, call in enumerate(calls):
        place = f"{path}[{index}].function.arguments"
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise invalid(place, f"`{place}` is no JSON object.")
        checked.append(ToolCall(call.id, call.function.name, call.function.arguments or "{}"))
    return checked


def _text(value: object) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        raise invalid("tools", "`tools` cannot be written as JSON.") from None
    if len(text) > MAX_TEXT:
        raise ClientError(
            f"`tools` has {len(text):,} characters; at most {MAX_TEXT:,} are accepted.",
            code="grammar_too_complex",
            param="tools",
        )
    return text
