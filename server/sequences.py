"""The sequences that a prepared request is for the engine. The dispatcher and the Python API both ask here."""

from __future__ import annotations

from typing import Final

import msgspec

from preprocess.wire import EngineRequest, Prepared

SEED_MASK: Final = (1 << 63) - 1


def sequences_of(prepared: Prepared, n: int) -> list[EngineRequest]:
    """What the engine is asked for a prepared request: one sequence a choice, a branch of its questions, or a part."""
    request, sampling = prepared.request, prepared.request.sampling
    replace = msgspec.structs.replace
    if prepared.branches:
        return [
            replace(request, prompt_ids=branch.prompt_ids, sampling=replace(sampling, score_ids=branch.score_ids))
            for branch in prepared.branches
        ]
    requests = [request, *prepared.further] if prepared.segments else [request] * n
    return [
        replace(each, sampling=replace(each.sampling, seed=(each.sampling.seed + choice) & SEED_MASK))
        for choice, each in enumerate(requests)
    ]
