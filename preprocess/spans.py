"""Where in a prompt the placeholders of each picture and frame stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from preprocess.errors import ServiceError

Span = tuple[int, int]
"""Start and length of a run of placeholder ids."""


def spans_of(ids: Sequence[int], vision_ids: Set[int], num_tokens: Sequence[int]) -> list[list[Span]]:
    """Runs of placeholder ids, dealt to the pictures and frames in order."""
    runs = iter(_runs(ids, vision_ids))
    spans: list[list[Span]] = []
    start = length = 0
    for wanted in num_tokens:
        mine: list[Span] = []
        while wanted:
            if not length:
                start, length = next(runs, (0, 0))
                if not length:
                    raise ServiceError("The prompt has too few placeholders.", code="preprocess_failed", status=500)
            taken = min(wanted, length)
            mine.append((start, taken))
            start, length, wanted = start + taken, length - taken, wanted - taken
        spans.append(mine)
    if length or next(runs, None) is not None:
        raise ServiceError("The prompt has too many placeholders.", code="preprocess_failed", status=500)
    return spans


def _runs(ids: Sequence[int], vision_ids: Set[int]) -> Iterator[Span]:
    start: int | None = None
    for position, token_id in enumerate(ids):
        if token_id in vision_ids:
            start = position if start is None else start
        elif start is not None:
            yield start, position - start
            start = None
    if start is not None:
        yield start, len(ids) - start
