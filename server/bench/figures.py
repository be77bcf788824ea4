"""Figures: percentiles, and tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def percentile(values: Sequence[float], q: float) -> float:
    """The value below which `q` percent of `values` lie, between neighbours where needed."""
    return float(np.percentile(np.asarray(values), q))


def table_line(row: Mapping[str, Any], *, header: bool) -> str:
    """A row of a Markdown table, with its heading or without."""
    line = " | ".join(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
    heading = f"| {' | '.join(row)} |\n|{'---|' * len(row)}\n" if header else ""
    return f"{heading}| {line} |"


def print_rows(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print rows that have the same columns."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    for number, row in enumerate(rows):
        print(table_line(row, header=number == 0))
