"""Which of the tokens that a verifying row drew stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.batch import SampledToken
    from engine.grammar import GrammarState


def standing(
    drafts: Sequence[int], sampled: Sequence[SampledToken], grammar: GrammarState | None = None
) -> list[SampledToken]:
    """The first token always; each further one while the draft that it was computed from is the token before it.

    This is exact whatever drew the tokens: the noise of a token hangs on its output index alone (the Gumbel-max trick
    with shared noise), so the token that stands is the one that plain decoding would have drawn.

    Args:
        drafts: The guesses of the row.
        sampled: One token more than `drafts`.
        grammar: Tokens drawn beyond its `num_masks` do not stand.
    """
    last = len(drafts) if grammar is None else min(len(drafts), grammar.num_masks - 1)
    num = 0
    while num < last and sampled[num].token_id == drafts[num]:
        num += 1
    return list(sampled[: num + 1])
