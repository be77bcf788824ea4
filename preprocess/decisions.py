"""Questions with given answers → the places where those answers part, each a short sequence for the engine to score.

The spellings of all options form a tree of tokens. Where it has one way only, nothing is left to decide; where it
branches, the model's distribution decides, so each branching is one sequence that asks for one step:

    prompt ┬─ "red" ┬─ "car"     two branchings: after the prompt, and after the prompt and "red";
           │        └─ "bus"     P(red bus) = P(red | red, blue) × P(bus | car, bus)
           └─ "blue" ── "car"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from preprocess.errors import ClientError
from preprocess.wire import Branch

MAX_BRANCHES: Final = 256
"""Branchings of all questions of one request."""


@dataclass
class _Node:
    """What has been spelled so far leads to `options`; `ends` are those that may end here."""

    children: dict[int, _Node] = field(default_factory=dict)
    options: set[int] = field(default_factory=set)
    ends: set[int] = field(default_factory=set)


def branches_of(
    question: int, prompt: Sequence[int], spellings: Sequence[Sequence[Sequence[int]]], end_id: int, first: int
) -> list[Branch]:
    """The branchings of one question, parents before children.

    Args:
        question: Its index, for the branches.
        prompt: Its prompt's ids.
        spellings: For each option the token ids of each way to write it.
        end_id: What the model says after an option that is the beginning of another.
        first: Index that the first branch will have among those of the whole request.

    Raises:
        ClientError: Two options are the same to this tokenizer.
    """
    root = _Node()
    for option, ways in enumerate(spellings):
        for ids in ways:
            node = root
            node.options.add(option)
            for token_id in ids:
                node = node.children.setdefault(token_id, _Node())
                node.options.add(option)
            node.ends.add(option)
            if len(node.ends) > 1:
                raise ClientError(
                    f"`questions[{question}]` has two answers that are spelled alike; expected answers that differ.",
                    code="invalid_value",
                    param=f"questions[{question}]",
                )
    branches: list[Branch] = []
    _walk(root, list(prompt), question, end_id, first, branches, -1, 0)
    return branches


def _walk(
    node: _Node,
    ids: list[int],
    question: int,
    end_id: int,
    first: int,
    branches: list[Branch],
    parent: int,
    edge: int,
) -> None:
    while len(node.children) == 1 and not node.ends:  # one way only
        token_id, node = next(iter(node.children.items()))
        ids = [*ids, token_id]
    ways = [(token_id, child) for token_id, child in node.children.items()]
    score_ids = [token_id for token_id, _ in ways]
    options = [next(iter(child.options)) if len(child.options) == 1 else -1 for _, child in ways]
    if node.ends:
        score_ids.append(end_id)
        options.append(next(iter(node.ends)))
    index = first + len(branches)
    encoded = np.asarray(ids, dtype="<i8").tobytes()
    branches.append(Branch(encoded, question, score_ids, options, parent, edge))
    for place, (token_id, child) in enumerate(ways):
        if len(child.options) > 1:
            _walk(child, [*ids, token_id], question, end_id, first, branches, index, place)
