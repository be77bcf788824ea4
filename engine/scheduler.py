"""The scheduler: chooses, within one budget of tokens and time, what every step computes.

Running sequences come first (one token each), then prompts in chunks, then whoever waits. How much time there is beside
decoding says `engine.step_budget`; how far pictures get in it, `engine.encoding`. Called by `engine.core`, which runs
the plan and reports back with `commit`, `release` and `retract`. Knows nothing of results, clients or devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from engine.encoding import Encoding, Encodings
from engine.kv.cache import KVCache, KVHold
from engine.kv.radix import shared_length
from engine.sequence import Picture, Sequence, State
from engine.speculation.tree import NO_DRAFTS
from engine.step_budget import Queue, Room, StepBudget
from engine.step_costs import Load
from engine.vision_cache import VisionCache
from engine.waiting import OVERDUE_AFTER, WaitingQueue

if TYPE_CHECKING:
    from engine.speculation.speculator import Speculator

MIN_SHARED: Final = 16
"""A request waits for another that is computing at least so many tokens more of its prefix than are cached."""
MAX_DRAFT_SHARE: Final = 2
"""While others have prompts to compute, decoding with drafts may take one part in so many of a step's budget."""
MAX_EXPECTED_OUTPUT: Final = 4096
"""Answers are expected to be no longer than this, whatever `max_tokens` allows."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """`count` tokens of a sequence from position `start`; `samples`: they reach its end, so a token follows.

    The last of them may be `drafts`: guesses of the next tokens, no part of the sequence yet. With `parents` they are a
    tree (see `engine.speculation.tree`), and hold slots in the order in which they stand here. Behind the last tokens
    of a prompt they are guesses of the answer's first ones.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None

    @property
    def opens(self) -> bool:
        """Whether its drafts are guesses of an answer's first tokens."""
        return bool(self.drafts) and self.start + self.count - len(self.drafts) == self.sequence.num_prompt_tokens


@dataclass(slots=True, eq=False)
class Plan:
    """One step. `budget` and `room` are what is left, in tokens and in time. `stuck` cannot go on: alone, and memory is
    full. `encoding_s`: what running the encodings took; None: the device did that among the rest.
    """

    budget: int
    room: Room
    chunks: list[Chunk] = field(default_factory=list)
    encodings: list[Encoding] = field(default_factory=list)
    stuck: Sequence | None = None
    has_retracted: bool = False
    encoding_s: float | None = 0.0

    @property
    def has_work(self) -> bool:
        """Whether it computes anything."""
        return bool(self.chunks or self.encodings)


class Growth:
    """Which part of `max_tokens` answers are expected to use. Falls step by step; a retraction raises it."""

    def __init__(self) -> None:
        self.ratio = 0.7

    def stepped(self) -> None:
        """A step went by."""
        self.ratio = max(self.ratio - 0.001, 0.1)

    def retracted(self) -> None:
        """Memory ran out: expect more."""
        self.ratio = min(self.ratio + 0.2, 1.0)

    def expected(self, sequence: Sequence, hold: KVHold) -> float:
        """Slots that the sequence will still ask for, beside those that it holds."""
        remaining_output = min(sequence.max_tokens - len(sequence.output_ids), MAX_EXPECTED_OUTPUT)
        return sequence.num_tokens - hold.num_slots + remaining_output * self.ratio


class Scheduler:
    """Owns who waits and who runs, in order of admission. Invariant: a sequence has a KV hold exactly while it runs.

    Where a batch is in flight, `schedule` is called only when one more token for each running sequence fits: what is in
    flight is never retracted. Nobody guesses then either: guesses follow a text whose every token is known.
    """

    def __init__(
        self,
        kv: KVCache,
        vision: VisionCache,
        waiting: WaitingQueue,
        *,
        max_batched_tokens: int,
        max_running: int,
        speculator: Speculator | None = None,
        budget: StepBudget | None = None,
        num_slices: Callable[[Ordered[int]], int] | None = None,
        drafts_beside_prompts: bool = True,
    ) -> None:
        self.kv = kv
        self.vision = vision
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.max_batched_tokens = max_batched_tokens
        self.max_running = min(max_running, max_batched_tokens)  # so that decoding never starves a prompt in the budget
        self.speculator = speculator
        self.budget = budget or StepBudget(None)
        self.encodings = Encodings(vision, self.budget, num_slices)
        self._drafts_beside_prompts = drafts_beside_prompts
        self.num_retracted = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        self.growth = Growth()

    @property
    def may_draft(self) -> bool:
        """Whether the next step may have drafts: where the runner does not take them beside prompts, only while nobody
        has a prompt to compute.
        """
        return self._drafts_beside_prompts or self._are_alone(self._decoding())

    def schedule(self, now_s: float) -> Plan:
        """Choose the next step: give its tokens slots, and hold the pictures that it reads."""
        plan = Plan(self.max_batched_tokens, Room(self.budget.costs, Load()))
        self._decode(plan)
        self._continue_prompts(plan)
        self._admit_waiting(plan, now_s)
        while not plan.has_work and len(self.running) > 1:  # nobody can go on: prompts fill the memory
            self._retract_cheapest(plan)
            self._continue_prompts(plan)
        if not plan.chunks and self.running and not self.kv.num_available:
            plan.stuck = self.running[0]
        self.budget.planned(plan.room.load)
        self.growth.stepped()
        return plan

    def commit(self, sequence: Sequence) -> None:
        """Let others use what a finished step computed of this sequence."""
        hold = sequence.hold
        assert hold is not None
        self.kv.commit(hold, sequence.keys(hold.num_committed, sequence.num_computed))

    def drop_passed_pictures(self, sequence: Sequence) -> None:
        """Give up the embeddings that prefill has passed."""
        for picture in sequence.pictures:
            if picture.held and picture.stop <= sequence.num_computed:
                self._drop(sequence, picture)

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """The sequence ends. `keep`: what it computed stays for others."""
        if sequence.output_ids:
            self.budget.answered(sequence.num_prompt_tokens - (sequence.num_cached or 0), len(sequence.output_ids))
        if sequence.state is State.RUNNING:
            self._leave(sequence, keep=keep)
        else:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    def retract(self, sequence: Sequence) -> None:
        """Send a running sequence back to the queue. What it computed stays in the tree while there is room."""
        self._leave(sequence, keep=True)
        sequence.state = State.WAITING
        sequence.num_computed = 0
        sequence.num_pending = 0
        sequence.num_retracted += 1
        sequence.arrived_s = self.budget.now_s
        self.num_retracted += 1
        self.growth.retracted()
        self.waiting.push(sequence)

    def _decode(self, plan: Plan) -> None:
        """One token for each sequence whose prompt is done, and drafts where they pay and there is room; retracts the
        cheapest where slots run out.
        """
        decoding = self._decoding()
        while self.kv.num_available < len(decoding):
            if len(self.running) == 1:
                return
            self._retract_cheapest(plan)
            decoding = self._decoding()
        if not decoding:
            return
        drafts = [NO_DRAFTS] * len(decoding)
        are_alone = self._are_alone(decoding)
        may_draft = self.speculator is not None and (are_alone or self._drafts_beside_prompts)
        if may_draft and not any(sequence.num_pending for sequence in decoding):
            # Guesses must not keep prompts waiting, nor take the slots that the sequences themselves ask for.
            assert self.speculator is not None
            budget = plan.budget if are_alone else plan.budget // MAX_DRAFT_SHARE
            room = min(budget, self.kv.num_available) - len(decoding)
            drafts = self.speculator.propose(decoding, max(room, 0))
        counts = [1 + len(guesses.token_ids) for guesses in drafts]
        self.kv.grow_each([sequence.hold for sequence in decoding if sequence.hold is not None], counts)
        if self.speculator is not None and self.speculator.model is not None:  # it writes to its guesses' slots
            drafts = self.speculator.draft(decoding, drafts)
            counts = [1 + len(guesses.token_ids) for guesses in drafts]
        plan.chunks.extend(
            Chunk(sequence, sequence.num_computed, count, True, *guesses)
            for sequence, count, guesses in zip(decoding, counts, drafts, strict=True)
        )
        plan.budget -= sum(counts)
        plan.room = self.budget.open(len(decoding), sum(counts), self._queue())

    def _queue(self) -> Queue:
        """Those who wait for a first token, or to be resumed."""
        queue, counted = Queue(), set[int]()
        if not self.budget.is_timed:
            return queue
        for sequence in itertools.chain(self.running, self.waiting):
            if sequence.is_decoding or not sequence.is_ready:
                continue
            queue.arrivals_s.append(sequence.arrived_s)
            computed, left = sequence.num_computed, sequence.num_tokens - sequence.num_computed
            queue.prompt_tokens += left
            queue.pairs += left * (computed + left / 2)
            if queue.encoding_s < self.budget.enough_s:
                queue.encoding_s += self.encodings.left_s(sequence, counted)
        queue.rows = min(len(self.running) + len(self.waiting), self.max_running)
        return queue

    def _decoding(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.is_decoding and not sequence.is_ending]

    def _are_alone(self, decoding: Ordered[Sequence]) -> bool:
        """Whether nobody has anything to compute but those that decode."""
        return len(decoding) == len(self.running) and not len(self.waiting)

    def _continue_prompts(self, plan: Plan) -> None:
        """A chunk for each running sequence whose prompt is not done, oldest first."""
        for sequence in self.running:
            if plan.budget and not sequence.is_decoding:
                self._add_chunk(plan, sequence)

    def _admit_waiting(self, plan: Plan, now_s: float) -> None:
        """Let sequences in, best first, until budget, rows or memory end. Nobody passes one that lacks only memory."""
        if not len(self.waiting) or not plan.budget or len(self.running) >= self.max_running or plan.has_retracted:
            return
        if plan.room.is_spent:
            return
        if self.running and self._reserved() >= self.kv.num_available:
            return  # not even one token more: spare the queue its sorting
        for sequence in self.waiting.candidates(self._cached_length):
            if not plan.budget or plan.room.is_spent or len(self.running) >= self.max_running:
                return
            if not sequence.is_ready or self._is_being_computed(sequence):
                continue
            if not plan.room.tokens(1, behind=self._cached_length(sequence)):
                return  # what it reads leaves no time for even one
            if not self._enter(sequence, now_s):
                return
            self._add_chunk(plan, sequence)

    def _enter(self, sequence: Sequence, now_s: float) -> bool:
        """Admit a sequence if its expected growth fits beside that of the running ones. Alone it may always try."""
        hold = self.kv.open(sequence.keys(0, sequence.num_tokens))
        sequence.num_computed = hold.num_slots
        if self.running and self._reserved() + self.growth.expected(sequence, hold) > self.kv.num_available:
            self.kv.close(hold)
            sequence.num_computed = 0
            return False
        self.waiting.admit(sequence, now_s)
        sequence.hold = hold
        sequence.state = State.RUNNING
        self.running.append(sequence)
        if sequence.num_cached is None:
            sequence.num_cached = hold.num_slots
            sequence.clock.admitted_s = now_s
            self.prefix_queried_tokens += sequence.num_prompt_tokens
            self.prefix_hit_tokens += hold.num_slots
        return True

    def _reserved(self) -> float:
        """Slots that the running sequences will probably ask for."""
        return sum(self.growth.expected(other, other.hold) for other in self.running if other.hold is not None)

    def _add_chunk(self, plan: Plan, sequence: Sequence) -> None:
        """As much of the sequence as budget, time, slots and pictures allow; perhaps nothing."""
        start = sequence.num_computed
        most = min(plan.budget, sequence.num_tokens - start, self.kv.num_available)
        count = 0
        while count < most:
            picture = self._unseen(sequence, start + count, start + most)
            stop = most if picture is None else picture.first_position(start + count) - start
            # A few tokens before a picture may cost as much as many: then they come with what follows them.
            if picture is None or plan.room.is_cheap(stop - count):
                fitting = plan.room.tokens(stop - count, behind=start)
                plan.room.take_tokens(fitting, behind=start)
                count += fitting
                if count < stop or picture is None:
                    break
            if not self.encodings.make_readable(plan.room, plan.encodings, sequence, picture):
                break
        if not count:
            return
        assert sequence.hold is not None
        samples = start + count == sequence.num_tokens
        drafts = self._first_drafts(plan, sequence, count) if samples else ()
        self.kv.grow(sequence.hold, count + len(drafts))
        plan.chunks.append(Chunk(sequence, start, count + len(drafts), samples, drafts))
        plan.budget -= count + len(drafts)

    def _first_drafts(self, plan: Plan, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Guesses of an answer's first tokens, which the step that computes the last `count` tokens of its prompt
        checks: where they pay, and keep nobody else waiting.
        """
        if self.speculator is None or not self._drafts_beside_prompts or sequence.output_ids:
            return ()
        budget = (plan.budget - count) // MAX_DRAFT_SHARE
        room = plan.room.tokens(min(budget, self.kv.num_available - count - len(self.running)))
        if room <= 0:
            return ()
        drafts = self.speculator.open(sequence, 1 + plan.room.load.rows, count, room)
        plan.room.take_tokens(len(drafts))
        return drafts

    def _unseen(self, sequence: Sequence, start: int, stop: int) -> Picture | None:
        """The first picture at positions `start` … `stop - 1` that the step cannot read yet."""
        for picture in sequence.pictures:
            if picture.overlaps(start, stop):
                entry = self.vision.find(picture.key) if picture.held else None
                if entry is None or not entry.is_encoded:
                    return picture
        return None

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running prompt will soon have cached much more of this one's prefix than is cached now."""
        if not self.kv.share or sequence.num_retracted or sequence.num_overtaken >= OVERDUE_AFTER:
            return False
        wanted = sequence.prompt_keys[:-1]
        for other in self.running:
            assert other.hold is not None
            num_shareable = other.hold.num_committed  # what is in flight is not
            if num_shareable < len(other.prompt_keys):
                shared = shared_length(other.prompt_keys, wanted)
                if shared > num_shareable and shared - self._cached_length(sequence) >= MIN_SHARED:
                    return True
        return False

    def _cached_length(self, sequence: Sequence) -> int:
        version = self.kv.tree.version
        if sequence.cached_version != version:
            sequence.cached_version = version
            sequence.cached_length = self.kv.cached_length(sequence.keys(0, sequence.num_tokens))
        return sequence.cached_length

    def _retract_cheapest(self, plan: Plan) -> None:
        """Of the lowest class the sequence with the least work to lose, the youngest of several: the largest always
        goes on.
        """
        self.retract(min(self.running, key=lambda other: (other.request.priority, other.num_computed, -other.serial)))
        plan.has_retracted = True

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
        assert sequence.hold is not None
        if keep:
            self.commit(sequence)
        self.kv.close(sequence.hold)
        sequence.hold = None
        for picture in sequence.pictures:
            if picture.held:
                self._drop(sequence, picture)
        self.running.remove(sequence)

    def _drop(self, sequence: Sequence, picture: Picture) -> None:
        picture.held = False
        self.vision.drop(picture.key, (sequence.serial, picture.index))
