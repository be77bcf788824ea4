"""Which of the tokens that a verifying row drew stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.speculation.tree import child

if TYPE_CHECKING:
    from engine.batch import SampledToken
    from engine.grammar import GrammarState


def standing(
    drafts: Sequence[int],
    sampled: Sequence[SampledToken],
    grammar: GrammarState | None = None,
    parents: Sequence[int] | None = None,
) -> list[SampledToken]:
    """The first token always; after one that stands, the one drawn behind the draft that guessed it, if any did.

    This is exact whatever drew the tokens: the noise of a token hangs on its output index alone (the Gumbel-max trick
    with shared noise), so the token that stands is the one that plain decoding would have drawn. Guesses of the same
    token in a tree share that noise, so at most one of them is right.

    Args:
        drafts: The guesses of the row.
        sampled: One token more than `drafts`.
        grammar: Tokens drawn under other masks than its `right_masks` do not stand.
        parents: See `Row.parents`, with one token before the drafts.
    """
    right = None if grammar is None else grammar.right_masks
    if parents is not None:
        kept = [sampled[0]]
        node = child(drafts, parents, 0, sampled[0].token_id)
        while node is not None and (right is None or right[node]):
            kept.append(sampled[node])
            node = child(drafts, parents, node, sampled[node].token_id)
        return kept
    num = 0
    while num < len(drafts) and sampled[num].token_id == drafts[num] and (right is None or right[num + 1]):
        num += 1
    return list(sampled[: num + 1])
