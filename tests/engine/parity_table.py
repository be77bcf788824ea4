"""Prints how far our float32 logits are from those of transformers: a row a family, a column a case.

    python -m tests.engine.parity_table [family …]

The last columns are embeddings of the vision encoder, prefill at every chunk size, and retraction in mid-answer, each
the largest over all cases.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests are no package: makers import each other by name
from tiny_models import FAMILIES

from tests.engine.family_parity import CASES, Checked, pixels_of


def rows(checked: Checked) -> dict[str, float]:
    """The largest difference by column."""
    found: dict[str, float] = {}
    encoder = chunked = retracted = 0.0
    for case in CASES:
        if not checked.shows(case):
            continue
        request, expected = checked.expected(case)
        found[case] = apart(checked.answer(request).logits, expected.logits)
        ours = checked.runner.encode([pixels_of(item.pixels) for item in request.media])
        encoder = max([encoder, *map(apart, ours, checked.reference_embeddings(request))])
        retracted = max(retracted, apart(checked.answer(request, retract_after=(5,)).logits, expected.logits))
        first = checked.request(case, max_tokens=1)
        for chunk in range(1, first.num_prompt_tokens + 1) if first.num_prompt_tokens < 200 else (1, 7, 64):
            chunked = max(chunked, apart(checked.answer(first, chunk=chunk).logits, expected.logits[:1]))
    return {**found, "encoder": encoder, "every chunk size": chunked, "retracted": retracted}


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference."""
    return float((got - expected).abs().max())


def main(families: Iterable[str]) -> None:
    """Print the table in Markdown."""
    columns = [*CASES, "encoder", "every chunk size", "retracted"]
    print("| family |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            found = rows(Checked(FAMILIES[family](Path(folder))))
        cells = (f"{found[column]:.1e}" if column in found else "–" for column in columns)
        print(f"| {family} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:] or FAMILIES)
