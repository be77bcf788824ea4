"""Refusals in this interface's words: which field, what came, what was expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec

from preprocess.errors import ClientError
from server.decision_models import DecisionQuestion
from server.request_models import (
    ChatMessage,
    ImageContent,
    ImageUrl,
    StreamOptions,
    TextContent,
    VideoContent,
    VideoUrl,
)
from server.shape_models import JsonSchema, JsonSchemaFormat, StructuredOutputs

T = TypeVar("T")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")


def invalid(param: str, message: str) -> ClientError:
    """A field has a value that cannot be."""
    return ClientError(message, code="invalid_value", param=param)


def unsupported(param: str, message: str) -> ClientError:
    """A field asks for something that is known and not served."""
    return ClientError(message, code="unsupported_parameter", param=param)


def unknown(name: str, known: Iterable[str], inside: str = "") -> ClientError:
    """A field that does not exist, with the one that was probably meant."""
    path = (f"{inside}.{name}" if inside else name)[:200]
    return ClientError(
        f"The field `{path}` is unknown.{nearest_name(name, known)}", code="unknown_parameter", param=path
    )


def nearest_name(name: str, known: Iterable[str]) -> str:
    """`` Did you mean …?`` for the closest known name, or nothing when none is close."""
    close = difflib.get_close_matches(name[:64], list(known), n=1, cutoff=0.7)
    return f" Did you mean `{close[0]}`?" if close else ""


def decode(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """A request body from JSON.

    Raises:
        ClientError: It is no JSON, or not what is expected, naming the place.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise of_validation(error, decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        place = _BYTE.search(str(error))
        if not body:
            detail = "it is empty"
        elif place:
            detail = f"it goes wrong at byte {place[1]}"
        else:
            detail = "it ends too early, or has text in it that is no Unicode"
        raise ClientError(f"The body is no valid JSON: {detail}.", code="invalid_json") from None
    except RecursionError:
        raise ClientError("The body's JSON is nested too deeply.", code="invalid_json") from None


# msgspec's messages: "Expected `str`, got `int` - at `$.messages[0].role`".
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_WORD: Final = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_WORDS_AT: Final = {
    "role": "system, developer, user, assistant or tool",
    "type": "text, image_url or video_url",
    "detail": "auto, low or high",
    "format": "json, text, timed_json, srt or vtt",
    "response_format.type": "text, json_object or json_schema",
    "questions[].type": "yes_no, choice or score",
    "tools[].type": "function",
    "messages[].tool_calls[].type": "function",
    "tool_choice": "none, auto, required or an object with the function's name",
    "tool_choice.type": "function",
}
_WRONG_TYPE: Final = re.compile(r"Expected `(.*?)`(.*)", re.DOTALL)
_JSON_WORDS: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def of_validation(error: msgspec.ValidationError, model: Any, root: str = "") -> ClientError:
    """msgspec's complaint in this interface's words.

    Args:
        error: What msgspec said.
        model: The struct that was asked for.
        root: Where in a request the value lies, for one that came without its surroundings.
    """
    text, _, where = str(error).rpartition(" - at `")
    if not text:
        text, where = str(error), ""
    path = re.sub(r"^(key` in `)?\$\.?", "", where.rstrip("`")).replace("[...]", "[]")[:200]
    if path.startswith("[") or not path:
        path = root + path
    extra = _UNKNOWN_FIELD.match(text)
    if extra:
        return unknown(extra[1], _fields_at(path, model), inside=path)
    word = _WORDS_AT.get(re.sub(r"\[\d+\]", "[]", path)) or _WORDS_AT.get(path.rpartition(".")[2])
    wrong = _WRONG_WORD.match(text)
    if word and wrong:
        return invalid(path, f"`{path}` is {wrong[1][:100]}; expected {word}.")
    text = _WRONG_TYPE.sub(lambda found: f"expected `{_json_words(found[1])}`{found[2]}", text)
    text = re.sub(r"got `(\w+)`", lambda found: f"got `{_JSON_WORDS.get(found[1], found[1])}`", text)[:400]
    text = text[:1].lower() + text[1:]
    if not path:
        return ClientError(f"The body is not as expected: {text}.", code="invalid_type")
    return ClientError(f"`{path}`: {text}.", code="invalid_type", param=path)


def _json_words(types: str) -> str:
    return " | ".join(_JSON_WORDS.get(word, word) for word in types.split(" | "))


def _fields_at(path: str, model: Any) -> list[str]:
    """Names that an object at a path may have."""
    models: list[Any]
    if path.endswith(".image_url"):
        models = [ImageUrl]
    elif path.endswith(".video_url"):
        models = [VideoUrl]
    elif path.endswith("stream_options"):
        models = [StreamOptions]
    elif path.endswith(".json_schema"):
        models = [JsonSchema]
    elif path.endswith("response_format"):
        models = [JsonSchemaFormat]
    elif path.endswith("structured_outputs"):
        models = [StructuredOutputs]
    elif path.startswith("questions["):
        models = [DecisionQuestion]
    elif ".content[" in path:
        models = [TextContent, ImageContent, VideoContent]
    elif path.endswith("]"):
        models = [ChatMessage]
    else:
        models = [model]
    return [field.name for struct in models for field in msgspec.structs.fields(struct)]
