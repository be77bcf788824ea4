"""Speculation as the engine sees it: asks the sources for guesses before a step, learns from the step afterwards.

Sources that guess but are not checked are judged all the same, by whether the token that came was their first guess; so
a source that has become good is noticed while nothing is drafted, and costs the model nothing. A draft model or a head
is no such source: it is asked only when it has been decided how much it shall guess (see `model_drafting`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Final, Literal

from engine.speculation.acceptance import Acceptance, Rates
from engine.speculation.controller import Candidate, Controller, Lengths
from engine.speculation.drafting import Drafting, Kind, Proposal, Source
from engine.speculation.echo import Echo
from engine.speculation.forced import Forced
from engine.speculation.habit import Habit
from engine.speculation.model_drafting import ModelDrafting
from engine.speculation.model_lengths import ModelCandidate
from engine.speculation.ngram import NGrams

if TYPE_CHECKING:
    from engine.batch import SampledToken
    from engine.scheduler import Plan
    from engine.sequence import Sequence

Mode = Literal["auto", "none", "ngram", "echo", "grammar", "habit", "draft-model", "head"]
SOURCES: Final[dict[str, Callable[[], Source]]] = {"echo": Echo, "ngram": NGrams, "grammar": Forced, "habit": Habit}
MODELS: Final = ("draft-model", "head")
UNKNOWN: Final = -1
"""Stands for a guess that a model has yet to make."""

SEQUENCE_MEMORY: Final = 24
SOURCE_MEMORY: Final = 256
SURE: Final = 0.5
PRIOR_WEIGHT: Final = 3.0
"""What other sequences' guesses are worth, in trials of a sequence's own."""
LONGEST_REST: Final = 64
"""An engine that runs ahead of its results waits for them to look for guesses at least once in so many steps."""


class Speculator:
    """Chooses drafts, never what is said.

    Args:
        mode: Which sources guess.
        max_drafts: Most that the runner checks in a row; with 0 nobody guesses.
        vocab_size: Guesses are below it.
        model: A draft model or head, if there is one.
    """

    def __init__(self, mode: Mode, max_drafts: int, vocab_size: int, model: ModelDrafting | None = None) -> None:
        names = {"auto": tuple(SOURCES)}.get(mode, (mode,))
        self.sources: list[Source] = [SOURCES[name]() for name in names if name in SOURCES] if max_drafts else []
        is_asked = model is not None and max_drafts > 0 and mode in ("auto", model.kind.source)
        self.model = model if is_asked else None
        self.controller: Lengths = Controller(None if self.model is None else self.model.cost)
        self.drafted = dict.fromkeys((*SOURCES, *MODELS, "replay"), 0)
        self.accepted = dict(self.drafted)
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._acceptance = {kind: Acceptance(SOURCE_MEMORY) for kind in Kind}
        self._gained = 0
        self._drafting_s = 0.0
        self._rest = 0
        self._next_rest = 1

    @property
    def is_on(self) -> bool:
        """Whether anybody guesses."""
        return bool(self.sources) or self.model is not None

    @property
    def is_due(self) -> bool:
        """Whether an engine that runs ahead of its results should wait for them before the next step, so that guesses
        can be made: while the last ones were worth checking, and else ever more rarely.
        """
        return self.is_on and not self._rest

    def propose(self, sequences: Ordered[Sequence], room: int) -> list[tuple[int, ...]]:
        """Drafts of each sequence that decodes, `room` in all at most; a model's are `UNKNOWN` until `draft`."""
        none: list[tuple[int, ...]] = [()] * len(sequences)
        self._rest = self._next_rest
        are_new = any(sequence.drafting is None for sequence in sequences)
        if not room or not self.controller.may_draft(len(sequences), are_new=are_new):
            return none
        started_s = time.perf_counter()
        candidates: list[Candidate | None] = []
        for sequence in sequences:
            drafting = sequence.drafting
            if drafting is None:
                drafting = sequence.drafting = Drafting()
            candidates.append(self._candidate(sequence, drafting))
        lengths = self.controller.choose(len(sequences), candidates, room)
        by_model = self._choose_model(sequences, candidates, lengths, room)
        drafts = []
        for sequence, length, own in zip(sequences, lengths, by_model, strict=True):
            assert sequence.drafting is not None
            chosen = sequence.drafting.chosen if length and not own else None
            sequence.drafting.chosen = chosen
            drafts.append((UNKNOWN,) * own if chosen is None else tuple(chosen.token_ids[:length]))
        found = any(drafts)
        self.controller.looked(len(sequences), time.perf_counter() - started_s, found=found)
        self._rest = self._next_rest = 1 if found else min(2 * self._next_rest, LONGEST_REST)
        return drafts

    def draft(self, sequences: Ordered[Sequence], drafts: Ordered[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The same drafts with those that the model guesses; sequences have slots for them. It may guess fewer: the
        slots for the rest are given back.
        """
        asked = [index for index, guesses in enumerate(drafts) if guesses and guesses[0] == UNKNOWN]
        if not asked or self.model is None:
            return list(drafts)
        guessed = self.model.draft([(sequences[index], len(drafts[index])) for index in asked])
        if self.model.took is not None:
            self._drafting_s += sum(self.model.took[3:])
            self.controller.guessed(*self.model.took)
        complete = list(drafts)
        for index, token_ids in zip(asked, guessed, strict=True):
            sequence = sequences[index]
            assert sequence.drafting is not None
            proposal = Proposal(self.model.kind, token_ids) if token_ids else None
            if proposal is not None:
                proposal = self._allowed(sequence, proposal)
            if proposal is not None:
                sequence.drafting.proposed.append(proposal)
            sequence.drafting.chosen = proposal
            complete[index] = () if proposal is None else tuple(proposal.token_ids)
            self.model.give_back(sequence, len(drafts[index]) - len(complete[index]))
        return complete

    def verified(
        self, sequence: Sequence, drafts: Ordered[int], standing: Ordered[SampledToken], num_kept: int
    ) -> None:
        """A step is done: the drafts gave the tokens `standing`, of which the sequence kept some, the rest having come
        after its end.
        """
        drafting = sequence.drafting
        if drafting is None or not drafting.proposed:
            return
        chosen = drafting.chosen
        if drafts and chosen is not None:
            num_right, num_accepted = len(standing) - 1, max(num_kept - 1, 0)
            self._gained += num_accepted
            self.drafted[chosen.kind.source] += len(drafts)
            self.accepted[chosen.kind.source] += num_accepted
            self._learn(drafting, chosen.kind, num_right, len(drafts))
            if self.model is not None and chosen.kind is self.model.kind:
                self.model.verified(sequence, num_accepted)
        for proposal in drafting.proposed:
            if proposal is not chosen or not drafts:
                self._learn(drafting, proposal.kind, int(proposal.token_ids[0] == standing[0].token_id), 1)
        drafting.proposed, drafting.chosen = [], None

    def stepped(self, plan: Plan, elapsed_s: float) -> None:
        """A step took so long, from scheduling or the results of the one before it to its own results."""
        gained, self._gained = self._gained, 0
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        self._rest = max(self._rest - 1, 0)
        decoding = [chunk for chunk in plan.chunks if chunk.samples and chunk.count == 1 + len(chunk.drafts)]
        tokens = sum(chunk.count for chunk in decoding)
        if not plan.encodings and len(decoding) == len(plan.chunks):
            self.controller.stepped(len(decoding), tokens, gained, elapsed_s - drafting_s, drafting_s)
        elif not decoding:
            self.controller.prompts(sum(chunk.count for chunk in plan.chunks), elapsed_s)
        elif drafting_s > 0.0:
            self.controller.drafted_beside_prompts(len(decoding), tokens, gained, drafting_s)

    def ended(self, sequence: Sequence) -> None:
        """A sequence's answer is complete."""
        for source in self.sources:
            source.ended(sequence)

    def totals(self) -> dict[str, int]:
        """Running totals by the names of `EngineStats`."""
        fields = {name: name.replace("-", "_") for name in (*SOURCES, *MODELS)}
        drafted = {f"drafted_{field}": self.drafted[name] for name, field in fields.items()}
        return drafted | {f"accepted_{field}": self.accepted[name] for name, field in fields.items()}

    def _choose_model(
        self, sequences: Ordered[Sequence], candidates: Ordered[Candidate | None], lengths: Ordered[int], room: int
    ) -> list[int]:
        """How many tokens the model guesses for each sequence, in the place of `lengths`; 0: nothing."""
        if self.model is None or self.model.is_broken:
            return [0] * len(sequences)
        kind = self.model.kind
        general = self._acceptance[kind].rates(kind.prior, PRIOR_WEIGHT)
        if not self.controller.may_ask_model(len(sequences), general):
            return [0] * len(sequences)
        models: list[ModelCandidate | None] = []
        for sequence in sequences:
            assert sequence.drafting is not None
            rates = self._rates(sequence.drafting, kind)
            models.append(self.model.candidate(sequence, self._limit(sequence), rates))
        return self.controller.choose_model(len(sequences), candidates, lengths, models, room)

    def _limit(self, sequence: Sequence) -> int:
        return min(self._max_drafts, sequence.max_tokens - len(sequence.output_ids) - 1)

    def _candidate(self, sequence: Sequence, drafting: Drafting) -> Candidate | None:
        """The best of what the sources guess."""
        limit = self._limit(sequence)
        drafting.proposed, drafting.chosen = [], None
        best, most = None, 0.0
        for source in self.sources if limit > 0 else ():
            proposal = source.propose(sequence, drafting, limit)
            if proposal is not None:
                proposal = self._allowed(sequence, proposal)
            if proposal is None:
                continue
            drafting.proposed.append(proposal)
            rates = self._rates(drafting, proposal.kind)
            right = rates.expected(len(proposal.token_ids))
            if right > most:
                drafting.chosen, most = proposal, right
                best = Candidate(len(proposal.token_ids), rates)
            if right >= SURE * limit:
                break  # nobody else could guess much more
        return best

    def _allowed(self, sequence: Sequence, proposal: Proposal) -> Proposal | None:
        """A proposal up to what can never be said."""
        guesses = proposal.token_ids
        if max(guesses) >= self._vocab_size:
            guesses = guesses[: next(index for index, guess in enumerate(guesses) if guess >= self._vocab_size)]
        if sequence.grammar is not None and guesses:
            guesses = guesses[: sequence.grammar.count_allowed(guesses)]
        if len(guesses) == len(proposal.token_ids):
            return proposal
        return Proposal(proposal.kind, guesses) if guesses else None

    def _rates(self, drafting: Drafting, kind: Kind) -> Rates:
        general = self._acceptance[kind].rates(kind.prior, PRIOR_WEIGHT)
        own = drafting.acceptance.get(kind)
        return general if own is None else own.rates(general, PRIOR_WEIGHT)

    def _learn(self, drafting: Drafting, kind: Kind, right: int, guessed: int) -> None:
        self._acceptance[kind].add(right, guessed)
        own = drafting.acceptance.get(kind)
        if own is None:
            own = drafting.acceptance[kind] = Acceptance(SEQUENCE_MEMORY)
        own.add(right, guessed)
