"""Drafts from what the model keeps saying: the token that followed the last two or three nearly every time so far.

A small language model made of counts, learnt from all answers as they are said: halves of words, turns of phrase,
punctuation of a form. A token is guessed once it has come twice, and only while the whole guess is more likely right
than `LEAST`. Two generations of at most `MAX_CONTEXTS` contexts are kept; the older one is forgotten as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.speculation.drafting import Drafting, Kind, Proposal

if TYPE_CHECKING:
    from engine.sequence import Sequence

MAX_CONTEXTS: Final = 16_384
LEAST: Final = 0.4
FADING: Final = 32.0
"""About so many of a context's newest tokens count."""

Context = tuple[int, ...]


class _Next:
    """The token that is expected in a context, and how often it came."""

    __slots__ = ("right", "seen", "token_id")

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.right = 1.0
        self.seen = 1.0

    def add(self, token_id: int) -> None:
        self.seen += 1.0
        if token_id == self.token_id:
            self.right += 1.0
        elif self.right < 0.5 * self.seen:
            self.token_id, self.right, self.seen = token_id, 1.0, 2.0
        if self.seen > FADING:
            self.right *= 0.5
            self.seen *= 0.5

    @property
    def confidence(self) -> float:
        """What a guess is worth; nothing before the second time."""
        return 0.0 if self.right < 2.0 else (self.right - 0.5) / self.seen


class Habit:
    """See `Source`. A sequence's state is how much of its output has been learnt."""

    name = "habit"

    def __init__(self) -> None:
        self._young: dict[Context, _Next] = {}
        self._old: dict[Context, _Next] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def propose(self, sequence: Sequence, drafting: Drafting, limit: int) -> Proposal | None:
        """See `Source.propose`."""
        self._learn(sequence, drafting)
        context = end_of(sequence, len(sequence.output_ids))
        guesses: list[int] = []
        likely = 1.0
        while len(guesses) < limit:
            expected = self._expected(context)
            if expected is None:
                break
            likely *= expected.confidence
            if likely < LEAST:
                break
            guesses.append(expected.token_id)
            context = (*context[-2:], expected.token_id)
        return Proposal(Kind.HABIT, guesses) if guesses else None

    def ended(self, sequence: Sequence) -> None:
        """Learn the rest of the answer."""
        if sequence.drafting is not None:
            self._learn(sequence, sequence.drafting)

    def _learn(self, sequence: Sequence, drafting: Drafting) -> None:
        known = drafting.states.get(self.name, 0)
        assert isinstance(known, int)
        output_ids = sequence.output_ids
        for index in range(known, len(output_ids)):
            context = end_of(sequence, index)
            self._add(context, output_ids[index])
            self._add(context[1:], output_ids[index])
        drafting.states[self.name] = len(output_ids)

    def _add(self, context: Context, token_id: int) -> None:
        found = self._find(context)
        if found is not None:
            found.add(token_id)
            return
        if len(self._young) >= MAX_CONTEXTS:
            self._old, self._young = self._young, {}
        self._young[context] = _Next(token_id)

    def _find(self, context: Context) -> _Next | None:
        found = self._young.get(context)
        if found is None:
            found = self._old.pop(context, None)
            if found is not None:
                self._young[context] = found
        return found

    def _expected(self, context: Context) -> _Next | None:
        """By three tokens if those have been seen often enough, else by two."""
        exact, shorter = self._find(context), self._find(context[1:])
        if exact is None or (shorter is not None and exact.right < 2.0):
            return shorter
        return exact


def end_of(sequence: Sequence, num_output: int) -> Context:
    """The three tokens before output `num_output`; the prompt's where there are not so many."""
    if num_output >= 3:
        return tuple(sequence.output_ids[num_output - 3 : num_output])
    prompt = sequence.prompt_ids[-3:].tolist()
    return tuple([-1, -1, -1, *prompt, *sequence.output_ids[:num_output]][-3:])
