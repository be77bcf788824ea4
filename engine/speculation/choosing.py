"""Whom to ask for guesses, and which of them a step checks: those of native sources or of sources in Python, in chains
or trees, or so many of a model.

What of `Speculator` knows nothing of an engine's steps; how much pays is its controller's to say (see `lengths`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Final, Literal

from engine.speculation.asking import SURE, allowed, asked
from engine.speculation.beliefs import MAX_BRANCHES, PRIOR_WEIGHT, RESCUE, SEQUENCE_MEMORY, SOURCE_MEMORY, Beliefs
from engine.speculation.controller import Controller
from engine.speculation.drafting import Drafting, Proposal, Source
from engine.speculation.echo import Echo
from engine.speculation.forced import Forced
from engine.speculation.habit import Habit
from engine.speculation.lengths import Candidate, Lengths
from engine.speculation.merge import Branch, DraftTree
from engine.speculation.model_drafting import ModelDrafting
from engine.speculation.model_lengths import ModelCandidate
from engine.speculation.native_sources import NativeSources
from engine.speculation.ngram import NGrams
from engine.speculation.told import library
from engine.speculation.tree import NO_DRAFTS, Drafts

if TYPE_CHECKING:
    from engine.sequence import Sequence

Mode = Literal["auto", "none", "ngram", "echo", "grammar", "habit", "draft-model", "head"]
SOURCES: Final[dict[str, Callable[[], Source]]] = {"echo": Echo, "ngram": NGrams, "grammar": Forced, "habit": Habit}
UNKNOWN: Final = -1
"""Stands for a guess that a model has yet to make."""


class Choosing:
    """See above.

    Args:
        mode, max_drafts, vocab_size, model, waits, clock: See `Speculator`.

    Attributes:
        model: Who guesses beside the sources; None: nobody.
        controller: Who decides how much is checked.
        beliefs: What came of guesses.
    """

    def __init__(
        self,
        mode: Mode,
        max_drafts: int,
        vocab_size: int,
        model: ModelDrafting | None,
        *,
        waits: bool,
        clock: Callable[[], float],
    ) -> None:
        names = {"auto": tuple(SOURCES)}.get(mode, (mode,))
        self.sources = [SOURCES[name]() for name in names if name in SOURCES] if max_drafts else []
        self._max_drafts = max_drafts
        self._clock = clock
        self._native: NativeSources | None = self._native_sources(vocab_size)
        is_asked = model is not None and max_drafts > 0 and mode in ("auto", model.kind.source)
        self.model = model if is_asked else None
        costs = () if self.model is None else (self.model.cost, self.model.late_cost)
        self.controller: Lengths = Controller(*costs, waits=waits)
        self.beliefs = Beliefs()
        self._vocab_size = vocab_size

    @property
    def sources(self) -> list[Source]:
        """Who guesses, in the order in which they are asked. Others may be put in their place."""
        return self._sources

    @sources.setter
    def sources(self, sources: list[Source]) -> None:
        self._sources = sources
        self._echo = next((source for source in sources if isinstance(source, Echo)), None)
        self._native = None

    @property
    def is_on(self) -> bool:
        """Whether anybody guesses."""
        return bool(self.sources) or self.model is not None

    def _choose(self, sequences: Ordered[Sequence], room: int) -> list[Drafts] | None:
        """What the next step checks; None: nothing."""
        rows = len(sequences)
        if self._native is not None:
            self._native.allow(sequences)
            is_any = None if self.model is not None else self.controller.choose_by(self._native.choose, rows, room)
            if is_any is not None:
                if not is_any:
                    return None
                lengths = self._native.lengths(rows)
                if self.controller.may_branch(rows):
                    lengths = self._branch(sequences, self._native.candidates(rows), lengths, room)
                return [
                    self._drafts(index, sequence, length)
                    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
                ]
            candidates = self._native.candidates(rows)
        else:
            candidates = [self._asked(sequence) for sequence in sequences]
        lengths = self.controller.choose(rows, candidates, room)
        by_model = self._choose_model(sequences, candidates, lengths, room)
        if not any(lengths) and not any(by_model):
            return None
        if any(by_model):
            lengths = [0 if own else length for length, own in zip(lengths, by_model, strict=True)]
        elif self.controller.may_branch(rows):
            lengths = self._branch(sequences, candidates, lengths, room)
        return [
            Drafts((UNKNOWN,) * own) if own else self._drafts(index, sequence, length)
            for index, (sequence, length, own) in enumerate(zip(sequences, lengths, by_model, strict=True))
        ]

    def _drafts(self, index: int, sequence: Sequence, length: int) -> Drafts:
        """The `length` best guesses of what was proposed, which the next step checks."""
        drafting = sequence.drafting
        assert drafting is not None
        if not length:
            drafting.tree = None
            return NO_DRAFTS
        if self._native is not None and drafting.tree is None:
            drafting.proposed = [self._native.best(index, length)]
        chosen = drafting.chosen = drafting.proposed[0]
        tree = drafting.tree
        drafting.drafts = tree.best(length) if tree is not None else Drafts(tuple(chosen.token_ids[:length]))
        return drafting.drafts

    def _choose_model(
        self, sequences: Ordered[Sequence], candidates: Ordered[Candidate | None], lengths: Ordered[int], room: int
    ) -> list[int]:
        """How many tokens the model guesses for each sequence, in the place of `lengths`; 0: nothing."""
        if self.model is None or self.model.is_broken:
            return [0] * len(sequences)
        kind = self.model.kind
        if not self.controller.may_ask_model(len(sequences), self.beliefs.general(kind)):
            return [0] * len(sequences)
        models: list[ModelCandidate | None] = []
        for sequence in sequences:
            assert sequence.drafting is not None
            rates = self.beliefs.rates(sequence.drafting, kind)
            models.append(self.model.candidate(sequence, self._limit(sequence), rates))
        return self.controller.choose_model(len(sequences), candidates, lengths, models, room)

    def _filled(self, sequences: Ordered[Sequence], drafts: Ordered[Drafts]) -> tuple[list[Drafts], float]:
        """The same drafts with those that the model guesses, which may be fewer, and what that took."""
        asked = [index for index, own in enumerate(drafts) if own.token_ids and own.token_ids[0] == UNKNOWN]
        if not asked or self.model is None:
            return list(drafts), 0.0
        wanted = [(sequences[index], len(drafts[index].token_ids)) for index in asked]
        guessed = self.model.draft(wanted, self.controller.most_late)
        took_s = 0.0
        if self.model.took is not None:
            took_s = sum(self.model.took[3:])
            self.controller.guessed(*self.model.took)
        complete = list(drafts)
        for index, token_ids in zip(asked, guessed, strict=True):
            sequence, drafting = sequences[index], sequences[index].drafting
            assert drafting is not None
            made = Proposal(self.model.kind, token_ids) if token_ids else None
            proposal = None if made is None else allowed(sequence, made, self._vocab_size)
            own = NO_DRAFTS if proposal is None else Drafts(tuple(proposal.token_ids))
            if proposal is not None:
                drafting.proposed.insert(0, proposal)
            drafting.chosen, drafting.drafts = proposal, own
            complete[index] = own
            self.model.give_back(sequence, len(drafts[index].token_ids) - len(own.token_ids))
        return complete, took_s

    def _asked(self, sequence: Sequence, limit: int | None = None) -> Candidate | None:
        """The best of what sources in Python guess, as many as may be checked."""
        assert sequence.drafting is not None
        limit = self._limit(sequence) if limit is None else limit
        return asked(self.sources, sequence, sequence.drafting, limit, self.beliefs, self._vocab_size)

    def _branch(
        self, sequences: Ordered[Sequence], candidates: Ordered[Candidate | None], lengths: list[int], room: int
    ) -> list[int]:
        """Drafts of each row, taken from trees where that pays more than chains of these lengths."""
        started_s = self._clock()
        trees: list[DraftTree | None] = []
        for sequence, candidate, length in zip(sequences, candidates, lengths, strict=True):
            tree = None
            if length and candidate is not None and sequence.drafting is not None:
                tree = self._tree(sequence, sequence.drafting, candidate)
            trees.append(tree)
        if not any(trees):
            return lengths
        self.controller.made_trees(len(sequences), self._clock() - started_s)
        limits = [self._limit(sequence) for sequence in sequences]
        gains = [None if tree is None else tree.gains[:most] for tree, most in zip(trees, limits, strict=True)]
        widths = self.controller.branch(candidates, lengths, gains, room)
        if widths is None:
            return lengths
        for sequence, tree in zip(sequences, trees, strict=True):
            assert sequence.drafting is not None
            sequence.drafting.tree = tree
        return widths

    def _tree(self, sequence: Sequence, drafting: Drafting, candidate: Candidate) -> DraftTree | None:
        """What was proposed, as a tree; None where all say the same."""
        if self._native is not None:
            branches = [Branch(*made) for made in self._native.proposals(sequence)]
            drafting.proposed = [branch.proposal for branch in branches]
        else:
            branches = [Branch(made, self.beliefs.rescue_rates(made.kind)) for made in drafting.proposed]
        trunk = Branch(branches[0].proposal, candidate.rates)
        others = []
        for branch in branches[1 : 1 + MAX_BRANCHES]:
            made: Proposal | None = branch.proposal
            if self._native is not None:
                made = allowed(sequence, branch.proposal, self._vocab_size)
            if made is not None and list(made.token_ids) != list(trunk.proposal.token_ids[: len(made.token_ids)]):
                others.append(Branch(made, branch.rates))
        return DraftTree([trunk, *others]) if others else None

    def _limit(self, sequence: Sequence) -> int:
        """Most guesses that a sequence may have checked: one token at least comes without."""
        return min(self._max_drafts, sequence.max_tokens - len(sequence.output_ids) - 1)

    def _first_guesses(self, sequence: Sequence, drafting: Drafting, limit: int) -> tuple[Proposal | None, list[float]]:
        """What is best guessed of an answer's first tokens, and how probably each guess stands."""
        if self._native is not None:
            found = self._native.first(sequence, limit)
        else:
            self._asked(sequence, limit)
            found = [(proposal, self.beliefs.rates(drafting, proposal.kind)) for proposal in drafting.proposed]
        best, gains = 0, [0.0]
        for index, (proposal, rates) in enumerate(found):
            own = rates.gains(len(proposal.token_ids))
            if proposal.kind.source == "echo" and self._echo is not None:
                own = self._echo.survival(sequence, own)
            if sum(own) > sum(gains):
                best, gains = index, own
        if not found:
            return None, []
        if self._native is not None:
            self._native.prefer(sequence, best)
        else:
            drafting.proposed.insert(0, drafting.proposed.pop(best))
        return found[best][0], gains

    def _native_sources(self, vocab_size: int) -> NativeSources | None:
        """The same sources in native code, where that was built."""
        loaded = library()
        if loaded is None or not self.sources:
            return None
        return NativeSources(
            loaded,
            [source.name for source in self.sources],
            vocab_size,
            self._max_drafts,
            memories=(SEQUENCE_MEMORY, SOURCE_MEMORY),
            beliefs=(PRIOR_WEIGHT, RESCUE, SURE),
            echo_memory=self._echo,
        )
