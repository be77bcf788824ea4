"""Random schemas under llguidance, as we use it, and under xgrammar: refused, finished and valid, finished and not.

    python tests/engine/measure_coverage.py MODEL_FOLDER        # needs xgrammar installed beside everything else

The schemas are those of `tests/test_random_schemas.py`; a walk by a fixed seed writes each answer.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from measure_masks import Guided, XGrammar  # noqa: E402
from test_random_schemas import schemas  # noqa: E402

from preprocess.model_folder import ModelFolder  # noqa: E402

BATCH = 16
NUM_BATCHES = 32
MAX_TOKENS = 300


def walk(library: Any, matcher: Any, ends: list[int], closers: list[int], size: int, seed: int) -> list[int] | None:
    """Tokens of a finished answer; None when it does not finish."""
    rng = random.Random(seed)
    row = np.zeros(library.words, np.int32)
    ids: list[int] = []
    for _ in range(MAX_TOKENS):
        library.fill(matcher, row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size]).tolist()
        if not allowed:
            return None
        welcome = [token for token in ends + closers if token in allowed] if rng.random() < 0.35 else []
        token = rng.choice(welcome or allowed)
        if token in ends:
            return ids
        ids.append(token)
        if not library.accept(matcher, token):
            return ids
    return None


def main() -> None:
    folder = ModelFolder(sys.argv[1])
    size = int(folder.text_config["vocab_size"])
    tokenizer = Tokenizer.from_file(str(folder.tokenizer_path))
    closers = [tokenizer.token_to_id(token) for token in ('"', "}", "]")]
    libraries = {"llguidance": Guided(folder, size), "xgrammar": XGrammar(folder, size)}
    ends = libraries["llguidance"].vocabulary.end_ids  # type: ignore[union-attr]
    counts: dict[str, Counter[str]] = {name: Counter() for name in libraries}
    seed = 0

    @settings(
        max_examples=NUM_BATCHES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(schemas, min_size=BATCH, max_size=BATCH))
    def run(batch: list[Any]) -> None:
        nonlocal seed
        for schema in batch:
            seed += 1
            for name, library in libraries.items():
                counts[name][_outcome(library, schema, ends, closers, size, seed, tokenizer)] += 1

    run()
    for name, counter in counts.items():
        print(f"{name}: {dict(counter)}")


def _outcome(
    library: Any, schema: Any, ends: list[int], closers: list[int], size: int, seed: int, tokenizer: Tokenizer
) -> str:
    try:
        matcher = library.compile("json_schema", schema)()
    except Exception:  # whatever a library raises for what it does not take
        return "refused"
    ids = walk(library, matcher, ends, closers, size, seed)
    if ids is None:
        return "unfinished"
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(ids, skip_special_tokens=False)))
    except (jsonschema.ValidationError, ValueError):
        return "finished, and breaks its schema"
    return "finished and valid"


if __name__ == "__main__":
    main()
