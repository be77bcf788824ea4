"""`guesses.cpp` from Python: all sources of all sequences in one call, for steps so short that Python's own are dear.

`Speculator` asks it where it was built; elsewhere the sources are those of echo.py, ngram.py, forced.py, habit.py.

What they remember beyond an answer stays with `Echo`: it is asked only when answers begin and end.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Final

from engine.speculation import acceptance, continuations, echo, habit, ngram
from engine.speculation.acceptance import Rates
from engine.speculation.chains import DOUBT, LEAST_DOUBT, LEAST_RATE
from engine.speculation.drafting import Drafting, Kind, Proposal
from engine.speculation.echo import Echo
from engine.speculation.lengths import NO_NEEDS, Candidate, Offer
from engine.speculation.told import BRANCHES, KINDS, SOURCES, Bet, Found, Rules, Told

if TYPE_CHECKING:
    from engine.sequence import Sequence

NEARLY_ALWAYS: Final = 0.9
_FORCED: Final = KINDS.index(Kind.GRAMMAR)


class NativeSources:
    """See above.

    Args:
        loaded: The library.
        names: Which sources guess.
        vocab_size: Guesses are below it.
        max_drafts: Most in a row.
        memories: How many trials of a sequence and of a source count (see `Acceptance`).
        beliefs: `PRIOR_WEIGHT`, `RESCUE` and `SURE` of the speculator.
        echo_memory: What sessions have said, where the echo guesses.
    """

    def __init__(
        self,
        loaded: ctypes.PyDLL,
        names: Ordered[str],
        vocab_size: int,
        max_drafts: int,
        *,
        memories: tuple[int, int],
        beliefs: tuple[float, float, float],
        echo_memory: Echo | None,
    ) -> None:
        self._library = loaded
        self._max_drafts = max_drafts
        self._echo = echo_memory
        self._has_grammar = "grammar" in names
        rules = Rules(
            priors=(ctypes.c_double * (2 * len(KINDS)))(
                *(value for kind in KINDS for value in (kind.prior.first, kind.prior.later))
            ),
            prior_weight=beliefs[0],
            most=acceptance.MOST,
            rescue=beliefs[1],
            sure=beliefs[2],
            least_rate=LEAST_RATE,
            least_habit=habit.LEAST,
            fading=habit.FADING,
            sources=sum(SOURCES[name] for name in names),
            vocab_size=vocab_size,
            sequence_memory=memories[0],
            source_memory=memories[1],
            max_tokens=continuations.MAX_TOKENS,
            max_match=continuations.MAX_MATCH,
            near=echo.NEAR,
            firm=echo.FIRM,
            max_astray=echo.MAX_ASTRAY,
            long=ngram.LONG,
            max_prompt=ngram.MAX_PROMPT,
            max_contexts=habit.MAX_CONTEXTS,
        )
        self._at = loaded.beholder_guesses_new(ctypes.addressof(rules))
        self._look, self._choose = loaded.beholder_guesses_look, loaded.beholder_guesses_choose
        self._decide = loaded.beholder_guesses_decide
        self._bet = Bet(doubt=DOUBT, least_doubt=LEAST_DOUBT)
        self._bet_at = ctypes.addressof(self._bet)
        self._reserve(4)

    def __del__(self) -> None:
        self._library.beholder_guesses_free(self._at)

    def look(self, sequences: Ordered[Sequence], needs: array[float]) -> bool:
        """Ask what follows in each sequence. Whether that may be worth checking; `needs`: see `Lengths.needs`."""
        self._tell(sequences)
        surplus: float = self._look(self._at, self._all_at, len(sequences), self._found_at, needs.buffer_info()[0])
        return surplus >= 0.0

    def decide(self, sequences: Ordered[Sequence], offer: Offer, limit: int) -> tuple[int, float]:
        """`look` and `choose` in one. Below 0: nothing is worth a thought."""
        self._tell(sequences)
        self._set(offer)
        needs_at = offer.needs.buffer_info()[0]
        total: int = self._decide(
            self._at, self._all_at, len(sequences), self._found_at, needs_at, self._bet_at, limit, self._lengths_at
        )
        return total, self._bet.rate

    def choose(self, rows: int, offer: Offer, limit: int) -> tuple[int, float]:
        """See `Chooser`: of what the last look has found, as `lengths`; again for other terms, or where some of it may
        not be said.
        """
        self._set(offer)
        total: int = self._choose(self._at, self._found_at, rows, self._bet_at, limit, self._lengths_at)
        return total, self._bet.rate

    def cut(self, sequences: Ordered[Sequence]) -> bool:
        """Take what grammars do not allow out of what was chosen. Whether there was any of it."""
        is_any = False
        for sequence, found, length in zip(sequences, self._found, self._lengths, strict=False):
            if sequence.grammar is not None and length and found.kind != _FORCED:
                allowed = sequence.grammar.count_allowed(found.token_ids[:length])
                if allowed < length:
                    self._shorten(sequence, found, allowed)
                    is_any = True
        return is_any

    def _tell(self, sequences: Ordered[Sequence]) -> None:
        """What they have said since, before a call that asks what follows."""
        if len(sequences) > len(self._found):
            self._reserve(len(sequences))
        for index, sequence in enumerate(sequences):
            drafting, grammar = sequence.drafting, sequence.grammar
            assert drafting is not None
            if not drafting.is_followed:
                self._all[index] = None
                continue
            told = drafting.told or self.begin(sequence, drafting)
            if grammar is not None and self._has_grammar:
                told.said(sequence.output_ids, grammar.forced_tokens())
            else:
                told.said(sequence.output_ids)
            self._all[index] = told.at

    def first(self, sequence: Sequence, limit: int) -> list[tuple[Proposal, Rates]]:
        """All guesses of a sequence's first tokens, at most `limit` in a row, and how probably each is right."""
        drafting = sequence.drafting
        assert drafting is not None
        asked = (drafting.told or self.begin(sequence, drafting)).asked
        asked.limit = limit
        self.look((sequence,), NO_NEEDS)
        asked.limit = self._max_drafts
        return self._proposals(sequence, rescue=False)

    def prefer(self, sequence: Sequence, which: int) -> None:
        """Of the guesses that `first` has found these are taken for the best."""
        assert sequence.drafting is not None
        assert sequence.drafting.told is not None
        self._library.beholder_guesses_prefer(sequence.drafting.told.asked.sequence, which)

    def is_sure(self, count: int) -> bool:
        """Whether for one of so many sequences of the last look the first guess is nearly always right."""
        return any(found.length > 0 and found.first >= NEARLY_ALWAYS for found in self._found[:count])

    def lengths(self, count: int) -> list[int]:
        """How many guesses of each of so many sequences were chosen."""
        return self._lengths[:count]

    def allow(self, sequences: Ordered[Sequence]) -> None:
        """Take what grammars do not allow out of what the last look has found."""
        for sequence, found in zip(sequences, self._found, strict=False):
            if sequence.grammar is not None and found.length and found.kind != _FORCED:
                self._allow(sequence, found)

    def candidates(self, count: int) -> list[Candidate | None]:
        """The best of what the last look has found for each."""
        return [
            Candidate(found.length, Rates(found.first, found.later)) if found.length else None
            for found in self._found[:count]
        ]

    def best(self, index: int, length: int) -> Proposal:
        """The first guesses of the best proposal for a sequence of the last look, by its place there."""
        found = self._found[index]
        return Proposal(KINDS[found.kind], found.token_ids[: min(length, found.length)])

    def proposals(self, sequence: Sequence) -> list[tuple[Proposal, Rates]]:
        """All that the last look found for a sequence, the best first; and how probably each is right where the others
        are wrong.
        """
        return self._proposals(sequence, rescue=True)

    def _proposals(self, sequence: Sequence, *, rescue: bool) -> list[tuple[Proposal, Rates]]:
        drafting = sequence.drafting
        assert drafting is not None
        assert drafting.told is not None
        found = (Found * (BRANCHES + 1))()
        count = self._library.beholder_guesses_proposals(
            self._at, drafting.told.asked.sequence, ctypes.addressof(found), rescue
        )
        return [
            (Proposal(KINDS[own.kind], own.token_ids[: own.length]), Rates(own.first, own.later))
            for own in found[:count]
        ]

    def ended(self, sequence: Sequence) -> None:
        """The sequence's answer is complete."""
        told = None if sequence.drafting is None else sequence.drafting.told
        if told is not None:
            told.said(sequence.output_ids)
            self._all[0] = told.at
            self._look(self._at, self._all_at, 1, None, None)
        if self._echo is not None:
            self._echo.ended(sequence)

    def begin(self, sequence: Sequence, drafting: Drafting) -> Told:
        """Tell the sources of a sequence's prompt and of what it may repeat, before anything is asked of it."""
        prompt, keys = sequence.prompt_ids, sequence.prompt_keys
        earlier, at, is_firm = ([], 0, False) if self._echo is None else self._echo.earlier(sequence)
        known = array("i", earlier)
        address = [ids.__array_interface__["data"][0] for ids in (prompt, keys)]
        begun = self._library.beholder_guesses_begin(
            self._at, *address, len(prompt), known.buffer_info()[0], len(known), at, is_firm
        )
        drafting.told = told = Told(self._library, begun, sequence.max_tokens, self._max_drafts)
        return told

    def _allow(self, sequence: Sequence, found: Found) -> None:
        """Cut what a grammar does not let through out of the best proposal, which then may be another."""
        assert sequence.grammar is not None
        while found.length:
            allowed = sequence.grammar.count_allowed(found.token_ids[: found.length])
            if allowed == found.length:
                return
            self._shorten(sequence, found, allowed)

    def _shorten(self, sequence: Sequence, found: Found, length: int) -> None:
        """Of the best proposal only so many guesses may be said."""
        assert sequence.drafting is not None
        assert sequence.drafting.told is not None
        told_at = sequence.drafting.told.asked.sequence
        self._library.beholder_guesses_cut(self._at, told_at, length, ctypes.addressof(found))

    def _set(self, offer: Offer) -> None:
        """The terms of the next choice."""
        bet = self._bet
        bet.steps, bet.plain_s, bet.looking_s = offer.steps.buffer_info()[0], offer.plain_s, offer.looking_s
        bet.credit_s, bet.rate = offer.credit_s, offer.rate

    def _reserve(self, count: int) -> None:
        """Have room for so many sequences."""
        self._all, self._found = (ctypes.c_void_p * count)(), (Found * count)()
        self._lengths = (ctypes.c_int32 * count)()
        self._all_at, self._found_at = ctypes.addressof(self._all), ctypes.addressof(self._found)
        self._lengths_at = ctypes.addressof(self._lengths)
