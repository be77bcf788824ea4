"""Renders a model folder's chat template, in jinja's sandbox and with the names that transformers gives templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from preprocess.errors import ClientError, ServiceError

Part = dict[str, str]
Turn = dict[str, Any]


class _TemplateRefusal(jinja2.TemplateError):
    """The template's own `raise_exception`."""


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        takes_parts: Whether it walks over the parts of a turn; else `content` must be one string.
        knows_tools: Whether it tells the model of tools.
        literals: Every string constant in it: what it may look for in the text of a turn.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ServiceError(
                "the model folder's chat template cannot be read as jinja", code="bad_model_folder"
            ) from error
        self._named_tokens = dict(named_tokens)
        self.knows_tools = "tools" in meta.find_undeclared_variables(tree)
        self.literals = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        self.takes_parts = "type" in self.literals or any(node.attr == "type" for node in tree.find_all(nodes.Getattr))

    def render(self, turns: Sequence[Turn], tools: Sequence[Any] = ()) -> str:
        """The prompt's text, ready for the answer. Raises `ClientError` where the template refuses the turns."""
        try:
            return self._template.render(
                messages=turns, tools=tools or None, documents=None, add_generation_prompt=True, **self._named_tokens
            )
        except _TemplateRefusal as error:
            raise ClientError(
                f"the model's chat template refuses these messages: {error.message}",
                code="messages_refused",
                param="messages",
            ) from error
        except Exception as error:  # a template is somebody's program: it may raise anything
            raise ServiceError(
                "The model's chat template failed on these messages.", code="chat_template_failed", status=500
            ) from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; prompts are no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
