"""Drafts as a tree: several guesses of one token, each with guesses of what follows it, checked in one row.

      row     0 ──▶ 1 ──▶ 2 ──▶ 3      tokens   0: the last output, 1 to 5: guesses
              │     └───▶ 4            parents  (0, 1, 2, 1, 0) of tokens 1 to 5; None would be the chain (0, 1, 2, …)
              └───▶ 5                  depths   1, 2, 3, 2, 1: where a guess stands in the text, if it stands

A guess sees what is before the row and the tokens that lead to it. Parents come before their children. A row may hold
more tokens than one before its guesses; parents are numbered among all of its tokens then. Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Drafts(NamedTuple):
    """Guesses for one row, and the parent of each among the row's tokens; without parents they are a chain."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None


NO_DRAFTS: Final = Drafts()


def offsets(parents: Ordered[int], num_tokens: int) -> list[int]:
    """How far each of a row's tokens stands behind the first in the text. Raises ValueError for what is no tree."""
    num_given = num_tokens - len(parents)
    known = list(range(num_given))
    for index, parent in enumerate(parents, start=num_given):
        if not num_given - 1 <= parent < index:
            raise ValueError(
                f"token {index} of a row follows token {parent}; expected one from {num_given - 1} to {index - 1}"
            )
        known.append(known[parent] + 1)
    return known


def hidden(parents: Ordered[int], num_tokens: int) -> NDArray[np.bool_]:
    """(tokens, tokens): which of a row's tokens each must not see, since they come later or lead elsewhere."""
    num_given = num_tokens - len(parents)
    seen = np.tri(num_tokens, dtype=np.bool_)
    for index, parent in enumerate(parents, start=num_given):
        seen[index, :index] = seen[parent, :index]
    return ~seen


def seen_bits(parents: Ordered[int], num_tokens: int) -> list[int]:
    """Which of a row's tokens each sees, as bits of a number: bit i is the row's token i. See `hidden`."""
    num_given = num_tokens - len(parents)
    known = [(2 << index) - 1 for index in range(num_given)]
    for index, parent in enumerate(parents, start=num_given):
        known.append(known[parent] | 1 << index)
    return known


# ---- rows of one token and drafts ------------------------------------------------------------------------------------


def lineages(drafts: Ordered[int], parents: Ordered[int] | None) -> list[tuple[int, ...]]:
    """For each draft the guesses that lead to it, itself the last."""
    known: list[tuple[int, ...]] = [()]
    for draft, parent in zip(drafts, range(len(drafts)) if parents is None else parents, strict=True):
        known.append((*known[parent], draft))
    return known[1:]


def child(drafts: Ordered[int], parents: Ordered[int], node: int, token_id: int) -> int | None:
    """The draft that guesses `token_id` after the row's token `node`, by its number among the row's tokens."""
    for index in range(node, len(drafts)):
        if parents[index] == node and drafts[index] == token_id:
            return index + 1
    return None


def path(drafts: Ordered[int], parents: Ordered[int] | None, token_ids: Ordered[int]) -> list[int]:
    """The drafts that say `token_ids`, as far as there are such, by their numbers among the row's tokens."""
    follows = range(len(drafts)) if parents is None else parents
    nodes: list[int] = []
    for token_id in token_ids:
        node = child(drafts, follows, nodes[-1] if nodes else 0, token_id)
        if node is None:
            break
        nodes.append(node)
    return nodes
