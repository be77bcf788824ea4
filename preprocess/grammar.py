"""The shape that a client asks an answer to have → a grammar in the form of llguidance, checked before admission.

A preprocess worker calls `GrammarCompiler.compile`; what cannot be honoured is refused here in the client's words, and
so is what would cost others too much: a grammar is compiled and tried on a vocabulary of single bytes, within limits
on its size, the library's own counters, and processor time. The engine (`engine.grammar`) compiles the same text again
for the model's vocabulary, under the same `LIMITS`.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from preprocess.errors import ClientError
from preprocess.json_schema import MAX_TEXT, clean_schema
from preprocess.wire import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_REGEX: Final = 4_000
MAX_CHOICES: Final = 1_000
MAX_CHOICE: Final = 1_000
TRIAL_S: Final = 0.5
"""Processor time that compiling and the first steps may take; ordinary schemas take a few milliseconds."""
TRIAL_STEPS: Final = 3
SOME_WHITESPACE: Final = r"( |\n {0,16})?"
"""Between the parts of JSON: enough to write it readably, never so much that a weak model fills an answer with it."""

LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_items_in_row=1_000,
    max_lexer_states=10_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class CompiledGrammar(NamedTuple):
    """A grammar as the engine takes it. `leading_space`: the answer may begin with one, which is no part of it."""

    text: str
    leading_space: bool


class GrammarCompiler:
    """Compiles grammars and remembers the last ones: a data job sends the same schema thousands of times.

    Args:
        after_text: Whether answers follow text, as in ``Assistant:``. Models then begin them with a space, and one that
            may not is thrown off its track: so a space may come before what the grammar describes.
    """

    def __init__(self, *, after_text: bool = False) -> None:
        self._after_text = after_text
        self._bytes = LLTokenizer("byte")
        self._known: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar as the engine takes it.

        Raises:
            ClientError: It cannot be honoured.
        """
        known = self._known.pop(grammar, None)
        if known is None:
            shape = _translated(grammar)
            text = json.dumps({"grammars": [shape]})
            may_begin_with_space = self._try(text, grammar)
            known = CompiledGrammar(text, False)
            if self._after_text and not may_begin_with_space:
                start = {"lark_grammar": 'start: SPACE? @shape\nSPACE: " "'}
                known = CompiledGrammar(json.dumps({"grammars": [start, {**shape, "name": "shape"}]}), True)
            if len(self._known) >= 64:
                self._known.popitem(last=False)
        self._known[grammar] = known  # the last one again; offline, threads share this object
        return known

    def _try(self, text: str, grammar: Grammar) -> bool:
        """Refuse what does not compile, has no answer, or is slow. True when a space may come first."""
        started_s = time.thread_time()
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, self._bytes, limits=LIMITS)
        if is_error or messages:
            raise _refusal(grammar, messages[0] if messages else "")
        matcher = LLMatcher(self._bytes, text, log_level=0, limits=LIMITS)
        space_first = False
        for step in range(TRIAL_STEPS):
            if matcher.is_error() or matcher.is_stopped():
                break
            mask = matcher.compute_bitmask()
            space_first = space_first or (step == 0 and bool(mask[0x20 >> 3] >> (0x20 & 7) & 1))
            likely = next((byte for byte in _LIKELY if mask[byte >> 3] >> (byte & 7) & 1), None)
            if likely is None or matcher.is_error():
                break
            matcher.consume_token(likely)
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        if time.thread_time() - started_s > TRIAL_S:
            raise _too_complex(grammar)
        return space_first


_QUOTED: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/')
_LIKELY: Final = (*b'{["a1t-', *range(0x20, 0x7F), *b"\n\t", *range(0x80, 0x100))
"""Bytes by which a trial goes forward: into objects and strings first, where the work is."""


def _translated(grammar: Grammar) -> dict[str, Any]:
    """What was asked, in the library's words: one of its grammars."""
    text, param = grammar.text, grammar.param
    if len(text) > MAX_TEXT:
        raise ClientError(
            f"`{param}` has {len(text):,} characters; at most {MAX_TEXT:,} are accepted.",
            code="grammar_too_complex",
            param=param,
        )
    if grammar.kind == "json_schema":
        schema = clean_schema(_decoded(text, param), param)
        options: JsonCompileOptions = {"lenient": False, "coerce_one_of": False}
        if grammar.any_whitespace:
            options["whitespace_pattern"] = SOME_WHITESPACE
        else:
            options["whitespace_flexible"] = False
        return _only(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    if grammar.kind == "tools":
        return {"lark_grammar": _calls(_decoded(text, param), param)}
    if grammar.kind == "regex":
        if not text or len(text) > MAX_REGEX:
            raise _invalid(param, f"has {len(text):,} characters; expected 1 to {MAX_REGEX:,}.")
        return _only(LLMatcher.grammar_from_regex(text))
    if grammar.kind == "choice":
        choices = _decoded(text, param)
        if not choices or len(choices) > MAX_CHOICES:
            raise _invalid(param, f"holds {len(choices):,} choices; expected 1 to {MAX_CHOICES:,}.")
        for index, choice in enumerate(choices):
            if not choice or len(choice) > MAX_CHOICE:
                raise _invalid(f"{param}[{index}]", f"has {len(choice):,} characters; expected 1 to {MAX_CHOICE:,}.")
        spelled = " | ".join(map(json.dumps, dict.fromkeys(choices)))
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {spelled}"}  # capitals: one lexeme for all
    if "<" in _QUOTED.sub("", text):
        raise _invalid(param, "names tokens (<…>); a grammar can only speak of text.")
    try:
        return {"lark_grammar": any_to_lark(text)}
    except Exception:  # the converter raises bare Exception
        raise _invalid(param, "cannot be read as a grammar (Lark or GBNF).") from None


def _calls(wanted: dict[str, Any], param: str) -> str:
    """Calls in Hermes' form, of any of the functions, at most so many."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": clean_schema(function["parameters"], f"{param}: {function['name']}.parameters"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in wanted["functions"]
    ]
    schema = {"anyOf": calls, "x-guidance": {"lenient": False, "whitespace_pattern": SOME_WHITESPACE}}
    more = f'("\\n" call){{0,{wanted["at_most"] - 1}}}' if wanted["at_most"] > 1 else ""
    return f'start: call {more}\ncall: "<tool_call>\\n" body "\\n</tool_call>"\nbody: %json {json.dumps(schema)}'


def _only(text: str) -> dict[str, Any]:
    """The one grammar in what the library made."""
    [grammar] = json.loads(text)["grammars"]
    return {key: value for key, value in grammar.items() if value is not None and key != "name"}


def _decoded(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _invalid(param, "is no JSON.") from None


def _invalid(param: str, what: str) -> ClientError:
    return ClientError(f"`{param}` {what}", code="invalid_value", param=param)


def _too_complex(grammar: Grammar) -> ClientError:
    return ClientError(
        f"`{grammar.param}` is too complex: each token of the answer would take too long. Make it smaller, flatter, "
        "or with fewer repetitions.",
        code="grammar_too_complex",
        param=grammar.param,
    )


_LIMIT_WORDS: Final = ("too many", "too big", "too large", "too complex", "fuel", "max is", "limit", "panic", "row has")


def _refusal(grammar: Grammar, complaint: str) -> ClientError:
    """The library's complaint in the client's words. It says nothing but what the client's own grammar holds."""
    line = " ".join(complaint.split("\n<")[0].split())[:300]
    if any(word in line for word in _LIMIT_WORDS):
        return _too_complex(grammar)
    is_schema = grammar.kind == "json_schema"
    code = "unsupported_schema" if is_schema else "unsupported_grammar"
    if "NoExtension" in line or "Unsatisfiable" in line:
        reason = line.partition("schema: ")[2]
        what = f"no answer can satisfy it{f': {reason}' if reason else ''}."
    elif line.startswith("oneOf"):
        what = "`oneOf` cannot be enforced where one answer could match several of its schemas. Write `anyOf`."
    elif "Properties only supported" in line:
        what = "`minProperties` and `maxProperties` can be enforced only where all `properties` are `required`."
    elif "not disjoint" in line:
        what = "`patternProperties` cannot be enforced where one name could match several patterns."
    elif "does not exist" in line:
        what = f"`$ref` leads nowhere ({line})."
    elif "look-around" in line or "lookaround" in line:
        what = "look-around (as in `(?=…)`, `\\b`, or `^` and `$` inside) cannot be enforced in a regular expression."
    elif "backreference" in line:
        what = "back-references cannot be enforced in a regular expression."
    else:
        what = f"it cannot be enforced: {line or 'it is not understood'}."
    return ClientError(f"`{grammar.param}`: {what}", code=code, param=grammar.param)
