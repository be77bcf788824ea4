"""Speculation as the engine sees it: asks the sources for guesses before a step, learns from the step afterwards.

Who is asked and which guesses are checked is in `choosing`, what came of them in `beliefs`; where steps run ahead of
their results, `ahead` says when those are waited for. A draft model or a head is asked only when it has been decided
how much it shall guess (see `model_drafting`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Final

from engine.speculation.ahead import Ahead
from engine.speculation.beliefs import MAX_BRANCHES
from engine.speculation.choosing import SOURCES, Choosing, Mode
from engine.speculation.drafting import Drafting, Proposal, agreement
from engine.speculation.following import Following
from engine.speculation.lengths import Candidate, Offer
from engine.speculation.merge import DraftTree
from engine.speculation.model_drafting import ModelDrafting
from engine.speculation.native_sources import NativeSources
from engine.speculation.step_reports import Outcome, StepReports, is_plain
from engine.speculation.told import MOST
from engine.speculation.tree import NO_DRAFTS, Drafts, lineages, path
from engine.speculation.upkeep import Upkeep, Work

if TYPE_CHECKING:
    from engine.batch import SampledToken
    from engine.scheduler import Plan
    from engine.sequence import Sequence

MODELS: Final = ("draft-model", "head")
PATIENCE: Final = 6
MOST_PATIENCE: Final = 4
"""Native sources are asked before every step; after so many looks that bore no fruit (a third of what a step checked
being right) only before every other one, after twice as many before every fourth, and so on up to this power of two.
"""
AGAIN: Final = 64
"""Where none of the answers is followed, it is asked after so many steps whether they shall be."""


class Speculator(Choosing):
    """Chooses drafts, never what is said.

    Args:
        mode: Which sources guess.
        max_drafts: Most that the runner checks in a row; with 0 nobody guesses.
        vocab_size: Guesses are below it.
        model: A draft model or head, if there is one.
        max_first_drafts: Most that it checks behind the last tokens of a prompt.
        waits: Whether the engine runs ahead of its results but where there are drafts.
        clock: Seconds, monotonic; the one that steps are timed by.

    Attributes:
        max_first_drafts: As given, at most `MOST`.
        ahead: What is known of looks while a step runs, and of waiting for its results.
    """

    def __init__(
        self,
        mode: Mode,
        max_drafts: int,
        vocab_size: int,
        model: ModelDrafting | None = None,
        *,
        max_first_drafts: int = 0,
        waits: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(mode, max_drafts, vocab_size, model, waits=waits, clock=clock)
        self.max_first_drafts = min(max_first_drafts, MOST)
        self.drafted = dict.fromkeys((*SOURCES, *MODELS, "replay"), 0)
        self.accepted = dict(self.drafted)
        self._waits = waits
        self._upkeep = Upkeep(clock)
        self.ahead = Ahead()
        self._reports = StepReports()
        self._outcome = Outcome()
        # An answer has begun of whose like something is remembered, and nothing was staked on it yet. Neither is used
        # up while it is not known what steps take.
        self._is_expected = self._may_stake = False
        self._num_unasked = 0  # steps since the controller was asked
        self._num_unlooked = 0  # and since the last look
        self._num_fruitless = 0  # looks since they bore fruit
        self.following = Following()
        self._rows = 1  # that decoded in the last step
        self._num_ahead = 0  # steps whose results came since drafts were looked for, less one
        self._is_due = False  # they were waited for because of what was promised
        self._is_waiting = False  # for results before the next step, because of guesses
        self._is_idle = False  # was the device before the step that is under way, and nothing came of it

    @property
    def drafting_s(self) -> float:
        """What a model took to guess before the step that is under way."""
        return self._outcome.drafting_s

    def may_be_due(self, running: Ordered[Sequence]) -> bool:
        """Whether to ask `is_due`: a question that takes next to no time, whatever runs."""
        self._is_waiting = False
        if not self.is_on or self._num_ahead < 0:  # that text was looked at when the step in flight was made
            return False
        return self.model is not None or running[-1].drafting is None or self._may_look

    def is_due(self, running: Ordered[Sequence]) -> bool:
        """Whether an engine that runs ahead of its results should wait for them before the next step, so that guesses
        can be made: what would be guessed of the text that is known promises enough. Whoever decodes has a token in
        flight. To be asked only where `may_be_due` says so.
        """
        started_s = self._clock()
        decoding = [sequence for sequence in running if sequence.num_pending and not sequence.is_ending]
        self._begin_all(decoding)
        is_promising = False
        if self.sources and self._may_look:
            promise = self._promise(decoding)
            self.ahead.looked(self._clock() - started_s)
            is_promising = self.ahead.is_worth(promise, self.controller.waiting(len(decoding)))
        self._is_due = self._is_waiting = is_promising or self._is_model_due(len(decoding))
        self._is_expected = self._is_expected and (self._is_due or not self.controller.knows(len(decoding)))
        return self._is_due

    def propose(self, sequences: Ordered[Sequence], room: int) -> list[Drafts]:
        """Drafts of each sequence that decodes, `room` in all at most; a model's are `UNKNOWN` until `draft`."""
        self._rows = len(sequences)
        is_followed = self._begin_all(sequences)
        is_followed = is_followed or self._follow_again(sequences)
        drafts = self._look(sequences, room) if room and is_followed else None
        if self._is_due:
            self._is_due = False
            self.ahead.waited(found=drafts is not None)
        self._is_idle, self._is_waiting = self._is_waiting and drafts is None, drafts is not None
        self._num_ahead = -1  # the step that begins now does not run ahead
        return [NO_DRAFTS] * len(sequences) if drafts is None else drafts

    def scheduled(self) -> None:
        """The next step is made. If results were waited for and `propose` was not asked since, nothing was found: they
        ended whoever decoded, or who does may have no drafts any longer.
        """
        if self._is_due:
            self._is_due = self._is_waiting = False
            self.ahead.waited(found=False)

    def open(self, sequence: Sequence, rows: int, prompt: int, room: int) -> tuple[int, ...]:
        """Guesses of an answer's first tokens, `room` at most, that are worth checking beside the last `prompt` tokens
        of its prompt; `rows`: how many will decode behind that step.
        """
        limit = min(room, self.max_first_drafts, sequence.max_tokens - 1)
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
        self._outcome.looking_s += looking_s
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
        complete, took_s = self._filled(sequences, drafts)
        self._outcome.drafting_s += took_s
        return complete

    def verified(
        self, sequence: Sequence, drafts: Ordered[int], standing: Ordered[SampledToken], num_kept: int
    ) -> None:
        """A step is done: the drafts gave the tokens `standing`, of which the sequence kept some, the rest having come
        after its end.
        """
        if drafts or self._native is not None or not self._waits:
            self._verified(sequence, drafts, standing, num_kept)
            return
        started_s = self._clock()  # nothing was checked: that is part of the look (native sources judge at the next)
        self._verified(sequence, drafts, standing, num_kept)
        self.ahead.judged(self._clock() - started_s)

    def _verified(
        self, sequence: Sequence, drafts: Ordered[int], standing: Ordered[SampledToken], num_kept: int
    ) -> None:
        drafting = sequence.drafting
        if drafting is None:
            return
        chosen, said = drafting.chosen, [token.token_id for token in standing]
        if not drafting.proposed:
            self.beliefs.watch(drafting, said)
            return
        num_accepted = max(num_kept - 1, 0)
        if drafts and chosen is not None:
            if drafting.opens:
                self._outcome.opened += num_accepted
                self.following.opened(num_accepted, len(drafts))
            else:
                self._outcome.gained += num_accepted
            is_model = self.model is not None and chosen.kind is self.model.kind
            if drafting.tree is not None:
                self._verified_tree(drafting, chosen, drafting.tree, said, num_accepted)
            else:
                self.drafted[chosen.kind.source] += len(drafts)
                self.accepted[chosen.kind.source] += num_accepted
                if drafting.told is not None and not is_model:
                    drafting.told.checked(len(said), len(drafts))
                else:
                    self.beliefs.learn_chain(drafting, chosen, said, len(drafts))
            if self.model is not None and is_model:
                self.model.verified(sequence, num_accepted)
        if self._native is None:
            self.beliefs.judge(drafting, said, is_best_known=bool(drafts) and chosen is not None)
        drafting.forget()

    def stepped(self, plan: Plan, elapsed_s: float, *, waited_s: float = 0.0, is_usual: bool = True) -> None:
        """A step took so long, from scheduling or the results of the one before it to its own results, for which the
        host waited at last. `is_usual`: see `Batch`.
        """
        outcome, self._outcome = self._outcome, Outcome()
        elapsed_s -= outcome.looking_s
        self._passed(plan, elapsed_s, waited_s)
        if not is_usual or (outcome.drafting_s == 0.0 and self._reports.is_known(plan)):
            return
        load = plan.room.load
        is_paid = not self._waits and load.tokens > load.rows
        started_s = self._upkeep.start(Work.LEARN) if is_paid else None
        if self._reports.report(plan, outcome, elapsed_s, self.controller):
            self._num_fruitless = 0
        if is_paid:
            self.controller.spent(load.rows, self._upkeep.stop(Work.LEARN, started_s))

    def _begin_all(self, sequences: Ordered[Sequence]) -> bool:
        """They will be looked at. Whether any of them is followed."""
        is_followed = False
        for sequence in sequences:
            drafting = sequence.drafting
            if drafting is None:
                drafting, _ = self._begin(sequence)
            elif drafting.proposed:
                drafting.forget()  # it was retracted before anybody knew what came of that
            is_followed = is_followed or drafting.is_followed
        return is_followed

    def _begin(self, sequence: Sequence) -> tuple[Drafting, bool]:
        """An answer begins. Whether something is remembered that it may repeat."""
        started_s = self._upkeep.start(Work.GREET)
        begun = self._begun(sequence)
        self._paid(self._rows, self._upkeep.stop(Work.GREET, started_s))
        return begun

    def _begun(self, sequence: Sequence) -> tuple[Drafting, bool]:
        drafting = sequence.drafting = Drafting(is_followed=self._may_follow())
        if self.controller.is_drafting:
            self.ahead.expect()  # this answer may be as easily guessed as those before it
        if not drafting.is_followed:
            return drafting, False
        if self._echo is None or not self._echo.resembles(sequence):
            return drafting, False
        if sequence.request.session_id:
            self._num_fruitless = 0
        self._is_expected = self._may_stake = True
        self._num_unlooked = 2**MOST_PATIENCE
        self.ahead.expect()
        return drafting, True

    @property
    def _may_look(self) -> bool:
        return self.ahead.may_look() or not self.controller.is_thrifty

    def _promise(self, sequences: Ordered[Sequence]) -> float:
        """Looks at what would be guessed of texts whose last tokens are on their way. What checking it promises: see
        `Lengths.promised`.
        """
        rows, controller = len(sequences), self.controller
        candidates: list[Candidate | None] = []
        if self._native is None:
            candidates = [self._asked(sequence) for sequence in sequences]
            is_any = any(candidates)
        else:
            is_any = self._native.look(sequences, controller.needs(rows))
            self._stake(rows)
        is_renewing = self._num_ahead > 0
        if not is_any or not controller.may_wait(rows, is_expected=self._is_expected, is_renewing=is_renewing):
            return 1.0
        if self._native is not None:
            promise = controller.promised_by(self._native.choose, rows)
            if promise is not None:
                return promise
            candidates = self._native.candidates(rows)
        return controller.promised(rows, candidates)

    def _is_model_due(self, rows: int) -> bool:
        """Whether a model asks to guess before the next step, of whose guesses nobody knows anything ahead."""
        model = self.model
        if model is None or model.is_broken or not self.ahead.may_ask():
            return False
        return self.controller.may_ask_model(rows, self.beliefs.general(model.kind))

    def _stake(self, rows: int) -> bool:
        """Risk something on an answer that repeats an earlier one. Whether there is one."""
        native, controller = self._native, self.controller
        if not self._may_stake or native is None or not native.is_sure(rows) or not controller.knows(rows):
            return False
        self._may_stake = False
        controller.stake(rows)
        return True

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
        if self._num_unasked < AGAIN or not self._is_borne():
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
            self._outcome.looking_s += elapsed_s
            self.controller.spent(rows, elapsed_s)

    def _look(self, sequences: Ordered[Sequence], room: int) -> list[Drafts] | None:
        """Drafts that are worth checking, if it is worth looking for some; None: nothing is checked."""
        rows, controller = len(sequences), self.controller
        if self._native is not None:
            self._num_unasked += 1
            patience = 2 ** min(self._num_fruitless // PATIENCE, MOST_PATIENCE) - 1
            if not self._is_waiting and self._num_unlooked < patience:  # if it is, that was dear
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
        is_expected = self._is_expected
        self._is_expected = is_expected and not controller.knows(rows)
        self._stake(rows)
        if not controller.may_draft(rows, is_expected=is_expected):
            return None
        work = Work.ASK if self._native is None else Work.LOOK
        started_s = self._upkeep.start(work)
        drafts = self._choose(sequences, room)
        elapsed_s = self._upkeep.stop(work, started_s)
        self._outcome.looking_s += elapsed_s
        controller.looked(rows, elapsed_s, found=drafts is not None)
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
            self._is_expected = self._is_expected and not controller.knows(rows)
            if self._stake(rows):
                offer = controller.offer(rows, 0, is_expected=True) or offer
                total, rate = native.choose(rows, offer, room)
            while total and native.cut(sequences):
                total, rate = native.choose(rows, offer, room)
        drafts = None
        if total > 0:
            lengths = native.lengths(rows)
            if controller.may_branch(rows):
                native.allow(sequences)
                lengths = self._branch(sequences, native.candidates(rows), lengths, room)
            drafts = [self._drafts(index, sequence, lengths[index]) for index, sequence in enumerate(sequences)]
        elapsed_s = self._upkeep.stop(Work.LOOK, started_s)
        if is_asked and offer.is_open:
            controller.answered(rows, total, rate, elapsed_s)
            self._outcome.looking_s += elapsed_s
        else:
            self._paid(rows, elapsed_s)
        return drafts

    def _passed(self, plan: Plan, elapsed_s: float, waited_s: float) -> None:
        """A step is done: of an engine that runs ahead it pays in although nobody asked; and if results were waited
        for in vain before it, that is paid.
        """
        self._num_ahead += 1
        if self._num_ahead > 0:
            is_telling = is_plain(plan) and not self._is_waiting  # who waits for results does nothing else meanwhile
            self.ahead.stepped(elapsed_s, waited_s if is_telling else None)
            if self._waits:
                self.controller.passed(1)
        else:
            self.ahead.paid()
            if self._is_idle and is_plain(plan):
                self.controller.waited(len(plan.chunks), elapsed_s)
        self._is_idle = False

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
        self.beliefs.learn(drafting, trunk.kind, min(agreement(trunk.token_ids, said), checked), checked)
