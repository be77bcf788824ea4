"""Speculation as the engine sees it: asks the sources for guesses before a step, learns from the step afterwards.

Sources that guess but are not checked are judged all the same, by whether the token that came was their first guess; so
a source that has become good is noticed while nothing is drafted, and costs the model nothing. But who agrees with the
best one is not: often right where everybody is, it may be wrong whenever a guess hangs on it. A draft model or a head
is no such source: it is asked only when it has been decided how much it shall guess (see `model_drafting`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Final, Literal

from engine.speculation.acceptance import Acceptance, Rates
from engine.speculation.controller import Controller
from engine.speculation.drafting import Drafting, Kind, Proposal, Source, agreement
from engine.speculation.echo import Echo
from engine.speculation.following import Following
from engine.speculation.forced import Forced
from engine.speculation.habit import Habit
from engine.speculation.lengths import Candidate, Lengths, Offer
from engine.speculation.merge import Branch, DraftTree
from engine.speculation.model_drafting import ModelDrafting
from engine.speculation.model_lengths import ModelCandidate
from engine.speculation.native_sources import MOST, NativeSources, library
from engine.speculation.ngram import NGrams
from engine.speculation.tree import NO_DRAFTS, Drafts, lineages, path
from engine.speculation.upkeep import TIMED, Upkeep, Work

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
MAX_BRANCHES: Final = 3
"""Proposals that a tree takes in beside the best one."""
RESCUE: Final = 0.5
"""Where others have guessed wrongly, a source is believed so much less at first."""
PATIENCE: Final = 6
MOST_PATIENCE: Final = 4
"""Native sources are asked before every step; after so many looks that bore no fruit (a third of what a step checked
being right) only before every other one, after twice as many before every fourth, and so on up to this power of two.
"""
UNTIMED: Final = 7
"""Of plain steps alike so many in a row are not timed, since timing them costs as well."""
MOSTLY: Final = 0.75
"""Of a step's tokens so many must be of prompts, that its time may tell what those take."""
LONGEST_REST: Final = 64
"""An engine that runs ahead of its results waits for them to look for guesses at least once in so many steps, where
`Lengths.rest` does not say otherwise.
"""


class Speculator:
    """Chooses drafts, never what is said.

    Args:
        mode: Which sources guess.
        max_drafts: Most that the runner checks in a row; with 0 nobody guesses.
        vocab_size: Guesses are below it.
        model: A draft model or head, if there is one.
        max_first_drafts: Most that it checks behind the last tokens of a prompt.
        takes_trees: Whether the runner checks trees of guesses; if not, all drafts are chains.
        waits: Whether the engine runs ahead of its results but where there are drafts.
        clock: Seconds, monotonic; the one that steps are timed by.
    """

    def __init__(
        self,
        mode: Mode,
        max_drafts: int,
        vocab_size: int,
        model: ModelDrafting | None = None,
        *,
        max_first_drafts: int = 0,
        takes_trees: bool = True,
        waits: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        names = {"auto": tuple(SOURCES)}.get(mode, (mode,))
        self.sources = [SOURCES[name]() for name in names if name in SOURCES] if max_drafts else []
        self._max_drafts = max_drafts
        self._max_first_drafts = min(max_first_drafts, MOST)
        self._native: NativeSources | None = self._native_sources(vocab_size)
        is_asked = model is not None and max_drafts > 0 and mode in ("auto", model.kind.source)
        self.model = model if is_asked else None
        costs = () if self.model is None else (self.model.cost, self.model.late_cost)
        self.controller: Lengths = Controller(*costs, waits=waits)
        self.drafted = dict.fromkeys((*SOURCES, *MODELS, "replay"), 0)
        self.accepted = dict(self.drafted)
        self._vocab_size = vocab_size
        self._takes_trees = takes_trees
        self._waits = waits
        self._clock = clock
        self._upkeep = Upkeep(clock)
        self._looking_s = 0.0  # before the step that is under way, and for what ended with it
        self._acceptance = {kind: Acceptance(SOURCE_MEMORY) for kind in Kind}
        self._rescues = {kind: Acceptance(SOURCE_MEMORY) for kind in Kind}  # where those asked before are wrong
        self._gained = 0
        self._opened = 0
        self.drafting_s = 0.0
        """What a model took to guess before the step that is under way."""
        self._is_expected = False  # an answer has begun of whose like something is remembered
        self._may_stake = False  # and nothing was staked on it yet
        self._num_unasked = 0  # steps since the controller was asked
        self._num_choices = 0
        self._choice_s = 0.0  # what the last one took that was timed
        self._num_unlooked = 0  # and since the last look
        self._num_fruitless = 0  # looks since they bore fruit
        self.following = Following()
        self._rows = 1  # that decoded in the last step
        self._timed_rows = 0
        self._untimed = 0
        self._rest = 0
        self._next_rest = 1
        self._hope = 0  # the same for the first tokens of answers that may repeat others
        self._next_hope = 1
        self._num_ahead = 0  # steps since results were waited for to look
        self._is_waiting = False  # for results before the next step, because of guesses
        self._is_idle = False  # was the device before the step that is under way, and nothing came of it

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

    def is_due(self, running: Ordered[Sequence]) -> bool:
        """Whether an engine that runs ahead of its results should wait for them before the next step, so that guesses
        can be made: while the last ones were worth checking, and else ever more rarely, as far as that can be paid. In
        the same way where the first token of an answer is on its way that may repeat an earlier one.
        """
        if not self.is_on:
            return False
        rows, echo = len(running), None if self._hope else self._echo
        is_due = (not self._rest and self._may_wait(rows)) or (
            echo is not None
            and any(new.num_pending and not new.output_ids and echo.resembles(new) for new in running)
            and (self._next_hope < LONGEST_REST or self._may_wait(rows))
        )
        self._is_waiting = is_due
        return is_due

    def propose(self, sequences: Ordered[Sequence], room: int) -> list[Drafts]:
        """Drafts of each sequence that decodes, `room` in all at most; a model's are `UNKNOWN` until `draft`."""
        repeats = False  # an answer has begun of whose like something is remembered
        self._rows = len(sequences)
        is_followed = False
        for sequence in sequences:
            drafting = sequence.drafting
            if drafting is None:
                drafting, is_repeating = self._begin(sequence)
                repeats = repeats or is_repeating
            elif drafting.proposed:
                drafting.forget()  # it was retracted before anybody knew what came of that
            is_followed = is_followed or drafting.is_followed
        is_followed = is_followed or self._follow_again(sequences)
        drafts = self._look(sequences, room) if room and is_followed else None
        if self._waits:
            self._looked(found=drafts is not None, repeats=repeats)
            self._is_idle, self._num_ahead = self._is_waiting and drafts is None, -1  # the step does not run ahead
        self._is_waiting = drafts is not None
        return [NO_DRAFTS] * len(sequences) if drafts is None else drafts

    def open(self, sequence: Sequence, rows: int, prompt: int, room: int) -> tuple[int, ...]:
        """Guesses of an answer's first tokens, `room` at most, that are worth checking beside the last `prompt` tokens
        of its prompt; `rows`: how many will decode behind that step.
        """
        limit = min(room, self._max_first_drafts, sequence.max_tokens - 1)
        if limit <= 0 or not self.sources:
            return ()
        drafting = sequence.drafting
        is_repeating = False
        if drafting is None:
            drafting, is_repeating = self._begin(sequence)
        elif drafting.proposed:
            drafting.forget()
        if (
            not drafting.is_followed
            or not self._may_open(is_repeating=is_repeating)
            or not self.controller.may_open(rows)
        ):
            return ()
        started_s = self._clock()
        proposal, gains = self._first_guesses(sequence, drafting, limit)
        looking_s = self._clock() - started_s
        self._looking_s += looking_s
        length = self.controller.open(rows, prompt, gains, looking_s)
        guesses = () if proposal is None else tuple(proposal.token_ids[:length])
        if guesses and self._native is not None and sequence.grammar is not None:
            guesses = guesses[: sequence.grammar.count_allowed(guesses)]
        if proposal is not None and guesses:
            drafting.proposed = drafting.proposed or [proposal]
            drafting.chosen, drafting.drafts, drafting.opens = proposal, Drafts(guesses), True
        return guesses

    def draft(self, sequences: Ordered[Sequence], drafts: Ordered[Drafts]) -> list[Drafts]:
        """The same drafts with those that the model guesses; sequences have slots for them. It may guess fewer: the
        slots for the rest are given back.
        """
        asked = [index for index, own in enumerate(drafts) if own.token_ids and own.token_ids[0] == UNKNOWN]
        if not asked or self.model is None:
            return list(drafts)
        guessed = self.model.draft([(sequences[index], len(drafts[index].token_ids)) for index in asked])
        if self.model.took is not None:
            self.drafting_s += sum(self.model.took[3:])
            self.controller.guessed(*self.model.took)
        complete = list(drafts)
        for index, token_ids in zip(asked, guessed, strict=True):
            sequence, drafting = sequences[index], sequences[index].drafting
            assert drafting is not None
            proposal = self._allowed(sequence, Proposal(self.model.kind, token_ids)) if token_ids else None
            own = NO_DRAFTS if proposal is None else Drafts(tuple(proposal.token_ids))
            if proposal is not None:
                drafting.proposed.insert(0, proposal)
            drafting.chosen, drafting.drafts = proposal, own
            complete[index] = own
            self.model.give_back(sequence, len(drafts[index].token_ids) - len(own.token_ids))
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
        chosen, said = drafting.chosen, [token.token_id for token in standing]
        num_accepted = max(num_kept - 1, 0)
        if drafts and chosen is not None:
            if drafting.opens:
                self._opened += num_accepted
                self.following.opened(num_accepted, len(drafts))
            else:
                self._gained += num_accepted
            is_model = self.model is not None and chosen.kind is self.model.kind
            if drafting.tree is not None:
                self._verified_tree(drafting, chosen, drafting.tree, said, num_accepted)
            else:
                self.drafted[chosen.kind.source] += len(drafts)
                self.accepted[chosen.kind.source] += num_accepted
                if drafting.told is not None and not is_model:
                    drafting.told.checked(len(said), len(drafts))
                else:
                    self._learn_chain(drafting, chosen, said, len(drafts))
            if self.model is not None and is_model:
                self.model.verified(sequence, num_accepted)
        if self._native is None:
            best = drafting.proposed[0]
            for proposal in drafting.proposed:
                if proposal is best:
                    is_learnt = bool(drafts) and chosen is not None
                else:  # who says what the best does anyway: no guess hung on it
                    is_learnt = proposal.token_ids[0] == best.token_ids[0]
                if not is_learnt:
                    self._learn(drafting, proposal.kind, int(proposal.token_ids[0] == said[0]), 1)
            if len(drafting.proposed) > 1:
                self._learn_rescues(drafting, said)
        drafting.forget()

    def stepped(self, plan: Plan, elapsed_s: float, *, is_usual: bool = True) -> None:
        """A step took so long, from scheduling or the results of the one before it to its own results. `is_usual`: see
        `Batch`.
        """
        gained, self._gained = self._gained, 0
        opened, self._opened = self._opened, 0
        drafting_s, self.drafting_s = self.drafting_s, 0.0
        looking_s, self._looking_s = self._looking_s, 0.0
        if self._waits:
            self._rest, self._hope = max(self._rest - 1, 0), max(self._hope - 1, 0)
            self._passed(plan, elapsed_s - looking_s)
        if not is_usual or (drafting_s == 0.0 and self._is_alike(plan)):
            return
        if self._waits or plan.room.load.tokens == plan.room.load.rows:
            self._learn_step(plan, elapsed_s - looking_s, gained, opened, drafting_s)
            return
        started_s = self._upkeep.start(Work.LEARN)
        self._learn_step(plan, elapsed_s - looking_s, gained, opened, drafting_s)
        self.controller.spent(plan.room.load.rows, self._upkeep.stop(Work.LEARN, started_s))

    def _learn_step(self, plan: Plan, elapsed_s: float, gained: int, opened: int, drafting_s: float) -> None:
        """What a step took without looking tells of the machine; so many guesses were right."""
        load = plan.room.load
        rows, tokens = load.rows, load.tokens
        if rows < len(plan.chunks):
            self._prompts_stepped(plan, rows, tokens, opened, elapsed_s, drafting_s)
        if 3 * gained >= tokens - rows > 0:
            self._num_fruitless = 0
            self._next_rest = 1
        if not plan.encodings and rows == len(plan.chunks):
            has_trees = self._takes_trees and any(chunk.parents is not None for chunk in plan.chunks)
            self.controller.stepped(rows, tokens, gained, elapsed_s - drafting_s, drafting_s, has_trees=has_trees)
        elif not rows and plan.chunks and not plan.encodings:
            self.controller.prompts(sum(chunk.count for chunk in plan.chunks), elapsed_s)
        elif drafting_s > 0.0 or tokens > rows:
            self.controller.drafted_beside_prompts(rows, tokens, gained, drafting_s)

    def _begin(self, sequence: Sequence) -> tuple[Drafting, bool]:
        """An answer begins. Whether something is remembered that it may repeat."""
        started_s = self._upkeep.start(Work.GREET)
        begun = self._begun(sequence)
        self._paid(self._rows, self._upkeep.stop(Work.GREET, started_s))
        return begun

    def _begun(self, sequence: Sequence) -> tuple[Drafting, bool]:
        drafting = sequence.drafting = Drafting(is_followed=self._may_follow())
        if not drafting.is_followed:
            return drafting, False
        if self._echo is None or not self._echo.resembles(sequence):
            return drafting, False
        if sequence.request.session_id:
            self._num_fruitless = 0
        self._is_expected = self._may_stake = True
        self._num_unlooked = LONGEST_REST
        return drafting, True

    def _may_follow(self) -> bool:
        """Whether to have anything to do with an answer that begins."""
        return not self._is_brief or self.following.follows(is_borne=self._is_borne())

    def _is_borne(self) -> bool:
        """Whether no more was lost than may be, all steps that went by having paid in."""
        self.controller.passed(self._num_unasked)
        self._num_unasked = 0
        return self.controller.may_remember(self._rows)

    def _follow_again(self, sequences: Ordered[Sequence]) -> bool:
        """Of answers none of which is followed: whether they shall be."""
        self._num_unasked += 1
        if self._num_unasked < LONGEST_REST or not self._is_borne():
            return False
        for sequence in sequences:
            if sequence.drafting is not None:
                sequence.drafting.is_followed = True
        return True

    @property
    def _is_brief(self) -> bool:
        """Whether steps may be so short that each thing that is done beside them weighs."""
        return self._native is not None and self.model is None and not self._waits

    def _may_open(self, *, is_repeating: bool) -> bool:
        """Whether to look for an answer's first tokens."""
        return not self._is_brief or self.following.opens(is_repeating=is_repeating)

    def _paid(self, rows: int, elapsed_s: float) -> None:
        """What guessing took beside looking and checking, while a step was being made or its results taken in. A device
        that computes meanwhile is not kept waiting by that.
        """
        if not self._waits:
            self._looking_s += elapsed_s
            self.controller.spent(rows, elapsed_s)

    def _first_guesses(self, sequence: Sequence, drafting: Drafting, limit: int) -> tuple[Proposal | None, list[float]]:
        """What is best guessed of an answer's first tokens, and how probably each guess stands."""
        if self._native is not None:
            found = self._native.first(sequence, limit)
        else:
            self._candidate(sequence, drafting, limit)
            found = [(proposal, self._rates(drafting, proposal.kind)) for proposal in drafting.proposed]
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

    def _prompts_stepped(
        self, plan: Plan, rows: int, tokens: int, opened: int, elapsed_s: float, drafting_s: float
    ) -> None:
        """A step computed prompts beside `rows` that checked `tokens`; what encoding took is no part of what is
        learnt.
        """
        opening = [chunk for chunk in plan.chunks if chunk.opens]
        guesses = sum(len(chunk.drafts) for chunk in opening)
        others = sum(chunk.count for chunk in plan.chunks) - guesses
        is_telling = plan.encoding_s is not None and others - tokens >= MOSTLY * others and drafting_s == 0.0
        taken_s = elapsed_s - plan.encoding_s if is_telling and plan.encoding_s is not None else None
        if opening or (taken_s is not None and tokens == rows):
            self.controller.opened(rows + len(opening), others, guesses, opened, taken_s)

    def _look(self, sequences: Ordered[Sequence], room: int) -> list[Drafts] | None:
        """Drafts that are worth checking, if it is worth looking for some; None: nothing is checked."""
        rows, controller = len(sequences), self.controller
        if self._native is not None:
            self._num_unasked += 1
            patience = 2 ** min(self._num_fruitless // PATIENCE, MOST_PATIENCE) - 1
            is_resting = self._rest > 0 if self._waits else not self._is_waiting
            if is_resting and self._num_unlooked < patience:  # without a rest, results were waited for to look
                self._num_unlooked += 1
                return None
            self._num_unlooked = 0
            self._num_fruitless += 1
            if self._is_brief:
                offer = controller.offer(rows, self._num_unasked, is_expected=self._is_expected)
                if offer is not None:
                    self._num_unasked = 0
                    return self._look_at_once(self._native, sequences, offer, room)
            is_worth = self._native.look(sequences, controller.needs(rows))
            if self.model is None and not is_worth:
                return None
            controller.passed(self._num_unasked - 1)
            self._num_unasked = 0
        is_expected, self._is_expected = self._is_expected, False
        if self._may_stake and self._native is not None and self._native.is_sure(rows):
            self._may_stake = False
            controller.stake(rows)
        if not controller.may_draft(rows, is_expected=is_expected):
            return None
        self._num_choices += 1
        is_timed = self._native is None or self._num_choices % TIMED == 1
        started_s = self._clock() if is_timed else 0.0
        drafts = self._choose(sequences, room)
        if is_timed:
            self._choice_s = self._clock() - started_s
        self._looking_s = self._choice_s
        controller.looked(rows, self._looking_s, found=drafts is not None)
        return drafts

    def _look_at_once(
        self, native: NativeSources, sequences: Ordered[Sequence], offer: Offer, room: int
    ) -> list[Drafts] | None:
        """The same in one native call, for steps so short that each look weighs."""
        rows, controller = len(sequences), self.controller
        for sequence in sequences:
            drafting = sequence.drafting
            if drafting is not None and drafting.told is None and drafting.is_followed:
                started_s = self._upkeep.start(Work.BEGIN)
                native.begin(sequence, drafting)
                self._paid(rows, self._upkeep.stop(Work.BEGIN, started_s))
        started_s = self._upkeep.start(Work.LOOK)
        total, rate = native.decide(sequences, offer, room)
        is_asked = total >= 0
        if is_asked:
            self._is_expected = False
            if self._may_stake and native.is_sure(rows):
                self._may_stake = False
                controller.stake(rows)
                offer = controller.offer(rows, 0, is_expected=True) or offer
                total, rate = native.decide_again(rows, offer, room)
            while total and native.cut(sequences):
                total, rate = native.decide_again(rows, offer, room)
        drafts = None
        if total > 0:
            lengths = native.lengths(rows)
            if self._takes_trees and controller.may_branch(rows):
                native.allow(sequences)
                lengths = self._branch(sequences, native.candidates(rows), lengths, room)
            drafts = [self._drafts(index, sequence, lengths[index]) for index, sequence in enumerate(sequences)]
        elapsed_s = self._upkeep.stop(Work.LOOK, started_s)
        if is_asked and offer.is_open:
            controller.answered(rows, total, rate, elapsed_s)
            self._looking_s += elapsed_s
        else:
            self._paid(rows, elapsed_s)
        return drafts

    def _looked(self, *, found: bool, repeats: bool) -> None:
        """How long an engine that runs ahead need not wait for results again."""
        if found:
            self._rest = 1  # and longer again, if they are not right
        else:
            self._rest = self._next_rest = min(2 * self._next_rest, LONGEST_REST)
        if repeats:
            self._hope = self._next_hope = 1 if found else min(2 * self._next_hope, LONGEST_REST)

    def _may_wait(self, rows: int) -> bool:
        """Whether an engine that runs ahead has done so for long enough."""
        return self._num_ahead >= self.controller.rest(rows)

    def _passed(self, plan: Plan, elapsed_s: float) -> None:
        """A step is done of an engine that runs ahead: it pays in although nobody looked; and if results were waited
        for in vain before it, that is paid.
        """
        self._num_ahead += 1
        if self._num_ahead:
            self.controller.passed(1)
        elif self._is_idle:
            rows, load = len(plan.chunks), plan.room.load
            if load.rows == load.tokens == rows and not plan.encodings:
                self.controller.waited(rows, elapsed_s)
        self._is_idle = False

    def _is_alike(self, plan: Plan) -> bool:
        """Whether a step was plain, as the last ones were, so that its time need not be learnt."""
        rows, load = len(plan.chunks), plan.room.load
        is_plain = load.rows == load.tokens == rows and not plan.encodings
        if is_plain and rows == self._timed_rows and self._untimed < UNTIMED:
            self._untimed += 1
            return True
        self._timed_rows, self._untimed = rows if is_plain else 0, 0
        return False

    def ended(self, sequence: Sequence) -> None:
        """A sequence's answer is complete."""
        if not self.sources or (sequence.drafting is not None and not sequence.drafting.is_followed):
            return
        started_s = self._upkeep.start(Work.END)
        if self._native is not None:
            self._native.ended(sequence)
        else:
            for source in self.sources:
                source.ended(sequence)
        self._paid(self._rows, self._upkeep.stop(Work.END, started_s))

    def totals(self) -> dict[str, int]:
        """Running totals by the names of `EngineStats`."""
        fields = {name: name.replace("-", "_") for name in (*SOURCES, *MODELS)}
        drafted = {f"drafted_{field}": self.drafted[name] for name, field in fields.items()}
        return drafted | {f"accepted_{field}": self.accepted[name] for name, field in fields.items()}

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
                if self._takes_trees and self.controller.may_branch(rows):
                    lengths = self._branch(sequences, self._native.candidates(rows), lengths, room)
                return [
                    self._drafts(index, sequence, length)
                    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
                ]
            candidates = self._native.candidates(rows)
        else:
            candidates = [
                self._candidate(sequence, sequence.drafting, self._limit(sequence))
                for sequence in sequences
                if sequence.drafting is not None
            ]
        lengths = self.controller.choose(rows, candidates, room)
        by_model = self._choose_model(sequences, candidates, lengths, room)
        if not any(lengths) and not any(by_model):
            return None
        if any(by_model):
            lengths = [0 if own else length for length, own in zip(lengths, by_model, strict=True)]
        elif self._takes_trees and self.controller.may_branch(rows):
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
        general = self._acceptance[kind].rates(kind.prior, PRIOR_WEIGHT)
        if not self.controller.may_ask_model(len(sequences), general):
            return [0] * len(sequences)
        models: list[ModelCandidate | None] = []
        for sequence in sequences:
            assert sequence.drafting is not None
            rates = self._rates(sequence.drafting, kind)
            models.append(self.model.candidate(sequence, self._limit(sequence), rates))
        return self.controller.choose_model(len(sequences), candidates, lengths, models, room)

    def _candidate(self, sequence: Sequence, drafting: Drafting, limit: int) -> Candidate | None:
        """The best of what the sources guess."""
        proposed: list[Proposal] = []
        most = 0.0
        for source in self.sources if limit > 0 else ():
            if proposed and most >= SURE * limit:
                break  # nobody else could guess much more
            asked = source.propose(sequence, drafting, limit)
            for made in (asked, *asked.others) if asked is not None else ():
                proposal = self._allowed(sequence, made)
                if proposal is not None:
                    proposed.append(proposal)
                    rates = self._rates(drafting, proposal.kind)
                    most = max(most, rates.expected(len(proposal.token_ids)))
            if source.name == Habit.name and self._echo is not None:
                proposed = self._echo.weighed(drafting, proposed)
        best, best_at, most = None, 0, 0.0
        for index, proposal in enumerate(proposed):
            rates = self._rates(drafting, proposal.kind)
            right = rates.expected(len(proposal.token_ids))
            if right > most:
                best_at, most = index, right
                best = Candidate(len(proposal.token_ids), rates)
        if best_at:
            proposed.insert(0, proposed.pop(best_at))
        drafting.proposed, drafting.chosen, drafting.tree, drafting.drafts = proposed, None, None, NO_DRAFTS
        return best

    def _branch(
        self, sequences: Ordered[Sequence], candidates: Ordered[Candidate | None], lengths: list[int], room: int
    ) -> list[int]:
        """Drafts of each row, taken from trees where that pays more than chains of these lengths."""
        trees: list[DraftTree | None] = []
        for sequence, candidate, length in zip(sequences, candidates, lengths, strict=True):
            tree = None
            if length and candidate is not None and sequence.drafting is not None:
                tree = self._tree(sequence, sequence.drafting, candidate)
            trees.append(tree)
        if not any(trees):
            return lengths
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
            branches = [Branch(made, self._rescue_rates(made.kind)) for made in drafting.proposed]
        trunk = Branch(branches[0].proposal, candidate.rates)
        others = []
        for branch in branches[1 : 1 + MAX_BRANCHES]:
            made = branch.proposal if self._native is None else self._allowed(sequence, branch.proposal)
            if made is not None and agreement(made.token_ids, trunk.proposal.token_ids) < len(made.token_ids):
                others.append(Branch(made, branch.rates))
        return DraftTree([trunk, *others]) if others else None

    def _limit(self, sequence: Sequence) -> int:
        """Most guesses that a sequence may have checked: one token at least comes without."""
        return min(self._max_drafts, sequence.max_tokens - len(sequence.output_ids) - 1)

    def _verified_tree(
        self, drafting: Drafting, trunk: Proposal, tree: DraftTree, said: Ordered[int], num_accepted: int
    ) -> None:
        """What came of a tree: each guess is its proposer's."""
        for lineage in lineages(*drafting.drafts):
            self.drafted[tree.owner(lineage).kind.source] += 1
        for length in range(1, num_accepted + 1):
            self.accepted[tree.owner(said[:length]).kind.source] += 1
        if drafting.told is not None:
            ways = [len(path(*drafting.drafts, made.token_ids)) for made in drafting.proposed[: 1 + MAX_BRANCHES]]
            drafting.told.checked(len(said), max(ways[0], 1), ways)
            return
        checked = max(len(path(*drafting.drafts, trunk.token_ids)), 1)
        self._learn(drafting, trunk.kind, min(agreement(trunk.token_ids, said), checked), checked)

    def _learn_rescues(self, drafting: Drafting, said: Ordered[int]) -> None:
        """Where those asked before were wrong, were those behind them right?"""
        proposed = drafting.proposed[: 1 + MAX_BRANCHES]
        if agreement(proposed[0].token_ids, said) == len(said):
            return
        for index, proposal in enumerate(proposed[1:], start=1):
            guesses = proposal.token_ids
            shared = [agreement(guesses, earlier.token_ids) for earlier in proposed[:index]]
            at = max(shared)  # here it leaves the others
            if at >= min(len(guesses), len(said)) or agreement(guesses, said) < at:
                continue
            tried = [
                earlier.token_ids[at]
                for earlier, length in zip(proposed, shared, strict=False)
                if length == at < len(earlier.token_ids)
            ]
            if tried and said[at] not in tried:
                checked = max(len(path(*drafting.drafts, guesses)) - at, 1) if drafting.tree is not None else 1
                self._rescues[proposal.kind].add(min(agreement(guesses[at:], said[at:]), checked), checked)

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

    def _rescue_rates(self, kind: Kind) -> Rates:
        prior = Rates(RESCUE * kind.prior.first, kind.prior.later)
        return self._rescues[kind].rates(prior, PRIOR_WEIGHT)

    def _learn_chain(self, drafting: Drafting, chosen: Proposal, said: Ordered[int], checked: int) -> None:
        """So many of what was chosen were checked. Where all were right, what came behind them tells of one guess more:
        else nobody would know how right longer chains are where only short ones seem to pay.
        """
        right = len(said) - 1
        guessed = min(checked + (right == checked), len(chosen.token_ids))
        self._learn(drafting, chosen.kind, agreement(chosen.token_ids[:guessed], said), guessed)

    def _learn(self, drafting: Drafting, kind: Kind, right: int, guessed: int) -> None:
        self._acceptance[kind].add(right, guessed)
        own = drafting.acceptance.get(kind)
        if own is None:
            own = drafting.acceptance[kind] = Acceptance(SEQUENCE_MEMORY)
        own.add(right, guessed)
