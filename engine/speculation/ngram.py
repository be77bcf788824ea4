"""Drafts from the request's own text: what followed the last few tokens when they stood in prompt or output before.

Prompt lookup, as it is called (Saxena 2023). Pays for text that repeats itself: forms, lists, quotations of the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from engine.speculation.continuations import BREAK, Continuations
from engine.speculation.drafting import Drafting, Kind, Proposal

if TYPE_CHECKING:
    from engine.kv.radix import IdArray
    from engine.sequence import Sequence

LONG: Final = 4
"""A match of so many tokens is believed more."""
MAX_PROMPT: Final = 2048
"""Newest tokens of the prompt that are looked at."""


class NGrams:
    """See `Source`. A sequence's state is its text and how much of its output that holds."""

    name = "ngram"

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        text = drafting.states.get(self.name)
        if not isinstance(text, _Text):
            text = drafting.states[self.name] = _Text(sequence)
        text.follow(sequence)
        matches = text.known.find_all(text.known.ids)
        guesses = [text.known.read(match.at, limit) for match in matches]
        if not guesses or not guesses[0]:
            return None
        # Where both places go on alike, the second says nothing.
        is_other = len(guesses) > 1 and guesses[1] and guesses[1][0] != guesses[0][0]
        older = (Proposal(Kind.NGRAM_OLDER, guesses[1]),) if is_other else ()
        return Proposal(Kind.NGRAM_LONG if matches[0].length >= LONG else Kind.NGRAM_SHORT, guesses[0], older)

    def ended(self, sequence: Sequence) -> None:
        """Nothing is kept beyond a sequence."""


class _Text:
    """Prompt and output of one sequence; a picture is a break."""

    def __init__(self, sequence: Sequence) -> None:
        self.known = Continuations()
        self._num_output = 0
        self.known.extend(text_of(sequence).tolist())

    def follow(self, sequence: Sequence) -> None:
        """Take what was said since."""
        self.known.extend(sequence.output_ids[self._num_output :])
        self._num_output = len(sequence.output_ids)


def text_of(sequence: Sequence) -> IdArray:
    """The newest tokens of a prompt; a picture is a break."""
    first = max(sequence.num_prompt_tokens - MAX_PROMPT, 0)
    ids = sequence.prompt_ids[first:]
    is_text = sequence.prompt_keys[first:] == ids
    is_kept = is_text.copy()
    is_kept[:1] = True
    is_kept[1:] |= is_text[:-1]  # of a picture one token, as the break
    text: IdArray = np.where(is_text, ids, BREAK)[is_kept]
    return text
