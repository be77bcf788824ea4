"""Measures what grammars cost: start, compile, and masks per token, by llguidance and, where it is installed, xgrammar.

    python tests/engine/measure_masks.py MODEL_FOLDER [--batch 16] [--xgrammar]

Answers are written by a random model that may only say what the grammar allows, with a fixed seed. Times are processor
time of the one thread that does the work (a shared machine's waiting does not count), medians and worst of all steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.grammar import Vocabulary
from preprocess.grammar import LIMITS, GrammarCompiler
from preprocess.model_folder import ModelFolder
from preprocess.wire import Grammar

PRESETS = Path(__file__).parents[2] / "server" / "presets"


def preset(name: str) -> Any:
    return json.loads((PRESETS / f"{name}.json").read_text())["response_format"]["json_schema"]["schema"]


INVOICE = {
    "type": "object",
    "properties": {
        "number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
        "date": {"type": "string", "format": "date"},
        "currency": {"enum": ["EUR", "USD", "GBP", "CHF"]},
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer", "minimum": 1},
                    "price": {"type": "number"},
                },
                "required": ["text", "count", "price"],
                "additionalProperties": False,
            },
        },
        "total": {"type": "number"},
    },
    "required": ["number", "date", "currency", "lines", "total"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ORDINARY: dict[str, tuple[str, Any]] = {
    "placard": ("json_schema", preset("museum_placard")),
    "hazards": ("json_schema", preset("hazards")),
    "invoice": ("json_schema", INVOICE),
    "tree": ("json_schema", TREE),
    "any object": ("json_schema", {"type": "object"}),
    "choice": ("choice", ["red", "green", "blue", "something else"]),
}
AWKWARD: dict[str, tuple[str, Any]] = {
    "60 optional": ("json_schema", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}}),
    "enum of 2,000": ("json_schema", {"enum": [f"item number {i}" for i in range(2000)]}),
    "letters": ("regex", r"\p{L}{1,500}"),
    "window": ("regex", "[a-z ]*x[a-z ]{200}"),
    "ambiguous": ("grammar", "start: start start | /[a-z]/"),
    "text of 5,000": ("json_schema", {"type": "string", "maxLength": 5000}),
}


class Guided:
    """llguidance, as the engine uses it."""

    def __init__(self, folder: ModelFolder, size: int) -> None:
        self.vocabulary = Vocabulary(folder, size)
        self.words = len(self.vocabulary.never)
        self.tokenizer: LLTokenizer = self.vocabulary.tokenizer

    def compile(self, kind: str, value: Any) -> Callable[[], Any]:
        text = value if isinstance(value, str) and kind != "json_schema" else json.dumps(value)
        translated = GrammarCompiler().compile(Grammar(kind, text, "g")).text  # type: ignore[arg-type]
        matcher = LLMatcher(self.tokenizer, translated, log_level=0, limits=LIMITS)
        matcher.deep_copy().compute_bitmask()
        return matcher.deep_copy

    def fill(self, matcher: Any, row: np.ndarray[Any, Any]) -> None:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, matcher: Any, token_id: int) -> bool:
        """False when it is over."""
        return bool(matcher.consume_token(token_id)) and not matcher.is_stopped()


class XGrammar:
    """xgrammar, as its documentation shows it."""

    def __init__(self, folder: ModelFolder, size: int) -> None:
        import xgrammar
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder.tokenizer_path))
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=folder.eos_ids)
        self._library: Any = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.words = -(-size // 32)

    def compile(self, kind: str, value: Any) -> Callable[[], Any]:
        if kind == "json_schema":
            compiled = self._compiler.compile_json_schema(json.dumps(value), any_whitespace=False, strict_mode=False)
        elif kind == "regex":
            compiled = self._compiler.compile_regex(value)
        else:
            lines = " | ".join(map(json.dumps, value)) if kind == "choice" else value.replace("start:", "")
            compiled = self._compiler.compile_grammar(f"root ::= {lines}")
        return lambda: self._library.GrammarMatcher(compiled, terminate_without_stop_token=True)

    def fill(self, matcher: Any, row: np.ndarray[Any, Any]) -> None:
        import torch

        matcher.fill_next_token_bitmask(torch.from_numpy(row).unsqueeze(0))

    def accept(self, matcher: Any, token_id: int) -> bool:
        """False when it is over."""
        return bool(matcher.accept_token(token_id)) and not matcher.is_terminated()


def steps(library: Any, new: Callable[[], Any], batch: int, num_steps: int) -> Iterator[tuple[float, float]]:
    """Seconds of masks and of accepting, for the whole batch, of each step."""
    rng = random.Random(7)
    rows = np.zeros((batch, library.words), np.int32)
    matchers = [new() for _ in range(batch)]
    for _ in range(num_steps):
        started_s = time.thread_time()
        for matcher, row in zip(matchers, rows, strict=True):
            library.fill(matcher, row)
        masked_s = time.thread_time()
        chosen = []
        for row in rows:
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            chosen.append(int(allowed[rng.randrange(len(allowed))]) if len(allowed) else -1)
        picked_s = time.thread_time()
        goes_on = [token >= 0 and library.accept(m, token) for m, token in zip(matchers, chosen, strict=True)]
        yield masked_s - started_s, time.thread_time() - picked_s
        matchers = [m if more else new() for m, more in zip(matchers, goes_on, strict=True)]


def measure(name: str, library: Any, kind: str, value: Any, batch: int, num_steps: int) -> None:
    started_s = time.thread_time()
    try:
        new = library.compile(kind, value)
    except Exception as error:  # whatever a library raises for what it does not take
        print(f"| {name} | refused: {str(error).splitlines()[0][:70]} | | | |")
        return
    compile_ms = (time.thread_time() - started_s) * 1e3
    try:
        times = list(steps(library, new, batch, num_steps))
    except Exception as error:
        print(f"| {name} | {compile_ms:.1f} | failed: {str(error).splitlines()[0][:60]} | | |")
        return
    masks = [mask / batch * 1e6 for mask, _ in times]
    accepts = [accept / batch * 1e6 for _, accept in times]
    middle, mean, worst = statistics.median(masks), statistics.mean(masks), max(masks)
    accept = statistics.median(accepts)
    print(f"| {name} | {compile_ms:.1f} | {middle:.0f} | {mean:.0f} | {worst:.0f} | {accept:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--xgrammar", action="store_true", help="measure xgrammar too")
    arguments = parser.parse_args()
    folder = ModelFolder(arguments.model)
    size = int(folder.text_config["vocab_size"])
    for kind in [Guided, *([XGrammar] if arguments.xgrammar else [])]:
        started_s = time.thread_time()
        library = kind(folder, size)
        print(f"\n{kind.__name__}: {size:,} tokens, start {(time.thread_time() - started_s) * 1e3:.0f} ms\n")
        print("| grammar | compile, ms | mask, µs a token: median | mean | worst step | accept, µs |")
        print("|---|---|---|---|---|---|")
        for name, (grammar, value) in {**ORDINARY, **AWKWARD}.items():
            measure(name, library, grammar, value, arguments.batch, arguments.steps)


if __name__ == "__main__":
    main()
