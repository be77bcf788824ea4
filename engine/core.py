"""The engine: takes requests, and in each step schedules, runs and reports. One thread calls it; nothing here waits.

    submit ─▶ waiting queue ─▶ ┌ schedule() ─▶ run() ─▶ postprocess() ┐ ─▶ events for the detokenizer
                               └──────────────── step() ──────────────┘

`engine.process` puts sockets around it, offline use calls it directly. Abort and stop are flags: they are honoured
between batches, never in the middle of one.

With a runner that overlaps, a step runs one batch ahead of its results:

    step n:  schedule n ─▶ launch n ─▶ results of n - 1 ─▶ events          the device computes n meanwhile

What ended with n - 1 then computes one token in vain, which nobody sees. A step waits for results first where the next
batch depends on them: grammars, penalties, drafts, memory running out. While drafts pay, each step waits; while they do
not, `Speculator.is_due` looks at the text that is known whether they would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from engine.batch import Flight, OverlappedRunner, Runner, SampledToken
from engine.config import EngineConfig
from engine.departure import Batch, depart
from engine.execution import Execution
from engine.failures import duplicate_id, engine_failed, memory_full, queue_full, rejected, stalled
from engine.grammar import Grammars
from engine.intake import Intake, Limits
from engine.integrity import check
from engine.kv.cache import AHEAD, KVCache
from engine.outputs import Outputs
from engine.scheduler import Chunk, Plan, Scheduler
from engine.sequence import LoadPixels, Sequence, State
from engine.speculation.model_drafting import ModelDrafting
from engine.speculation.speculator import Speculator
from engine.speculation.tree import path
from engine.step_budget import StepBudget
from engine.step_costs import Costs
from engine.vision_cache import LEAST_VISION_CACHE, VisionCache
from engine.vision_ids import VisionIds
from engine.waiting import WaitingQueue
from preprocess.errors import BeholderError
from preprocess.wire import Admitted, EngineRequest, EngineStats, FinishReason, OutputStart, Rejected, TokenEvents

MAX_EMPTY_STEPS: Final = 16
"""After so many steps that had work and computed nothing, the request at the head fails."""

CPU_BATCHED_TOKENS: Final = 512
GPU_BATCHED_TOKENS: Final = 4096
"""Tokens of a step where the configuration leaves them open: so many keep the device busy."""

COMPILE_POLL_S: Final = 0.002
"""How long a step that has nothing to compute waits for a grammar."""

logger = logging.getLogger("beholder.engine")


def batched_tokens(config: EngineConfig, runner: Runner) -> int:
    """`max_batched_tokens`, with 0 replaced."""
    chosen = GPU_BATCHED_TOKENS if isinstance(runner, OverlappedRunner) else CPU_BATCHED_TOKENS
    return config.max_batched_tokens or chosen


class Engine:
    """One model serving many sequences. Invariants: see `check`.

    Args:
        config: Options, resolved.
        runner: The loaded model.
        clock: Seconds, monotonic; used for times in usage, for `retry_after_s` and to keep `costs` up to date.
        costs: How long parts of a step take, so that new pictures do not keep running streams waiting; None: steps are
            bounded by tokens alone, for whoever wants answers, not streams.

    Attributes:
        max_context: Longest prompt + answer that it takes, in tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        costs: Costs | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self._overlapped = runner if isinstance(runner, OverlappedRunner) else None
        ahead = 0 if self._overlapped is None else AHEAD
        self.kv = KVCache(runner.num_slots, runner.slot_table, share=config.prefix_cache, ahead=ahead)
        self.vision = VisionCache(config.vision_cache_bytes or LEAST_VISION_CACHE, runner.embedding_bytes)
        self.waiting = WaitingQueue(config.max_waiting, config.max_waiting_tokens)
        model = None if runner.drafter is None else ModelDrafting(runner.drafter, self.kv, runner.vocab_size, clock)
        self.speculator = Speculator(
            config.speculation,
            runner.max_drafts,
            runner.vocab_size,
            model,
            max_first_drafts=runner.max_first_drafts,
            waits=self._overlapped is not None,
            clock=clock,
        )
        self.budget = StepBudget(
            costs,
            config.itl_target_ms / 1e3,
            config.ttft_target_ms / 1e3,
            overlaps=self._overlapped is not None,
        )
        self.scheduler = Scheduler(
            self.kv,
            self.vision,
            self.waiting,
            max_batched_tokens=batched_tokens(config, runner),
            max_running=min(config.max_running, runner.max_rows),
            speculator=self.speculator if self.speculator.is_on else None,
            budget=self.budget,
            num_slices=runner.num_slices,
            drafts_beside_prompts=runner.drafts_beside_prompts,
        )
        self.max_context = min(config.max_context or runner.max_positions, runner.max_positions)
        self.intake = Intake(
            Limits(self.max_context, self.kv.pool.capacity, runner.vocab_size), self.vision, VisionIds(capacity=8192)
        )
        self.grammars = grammars or Grammars(config.model, runner.vocab_size)
        self._flying: tuple[Flight, Batch] | None = None
        self._landed_s = 0.0
        self._execution = Execution(runner, self.kv.pool, self.vision, self.grammars, clock, self.budget)
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._flagged: dict[int, Sequence] = {}
        self._outputs = Outputs()
        self._next_serial = 0
        self._num_empty_steps = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._sequences or self._outputs)

    @property
    def num_requests(self) -> int:
        """Those that run or wait."""
        return len(self._sequences)

    def submit(self, request: EngineRequest, pixels: LoadPixels) -> Admitted | Rejected:
        """Queue a request, or say why not. `pixels` turns a picture's `Pixels` into a tensor, as often as asked until
        the end.
        """
        try:
            sequence = self._take_in(request, pixels)
        except BeholderError as error:
            return rejected(request.request_id, error)
        self._next_serial += 1
        if request.sampling.grammar:
            sequence.grammar = self.grammars.begin(request.sampling.grammar)
        self._sequences[request.request_id] = sequence
        sequence.arrived_s = self.budget.now_s
        self._prompt_tokens += sequence.num_prompt_tokens
        self.waiting.push(sequence)
        self._outputs.start(sequence)
        return Admitted(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request by the next step. An unknown or finished one is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.is_aborted = True
            self._flagged[sequence.serial] = sequence

    def stop(self, request_id: str, num_tokens: int) -> None:
        """End a request by the next step, keeping its first `num_tokens` output tokens. An unknown or finished one is
        ignored.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.stop_at is None:
            sequence.stop_at = max(num_tokens, 0)
            self._flagged[sequence.serial] = sequence

    def reset(self) -> None:
        """Forget every request without an event for it: whoever sent them is gone."""
        for sequence in list(self._sequences.values()):
            self._release(sequence, keep=True)
        self._flying = None
        self._flagged.clear()
        self._outputs.clear()
        self.speculator.scheduled()  # nothing is waited for any longer

    def step(self) -> list[OutputStart | TokenEvents]:
        """Compute one batch and return what it gave, or the first tokens that the last one gave before anything else is
        begun. Empty when there is nothing to do.
        """
        if not self._sequences:
            self._flying = None
            return self._outputs.take()
        self._end_flagged()
        if self._flying is not None and not self._can_run_ahead(self._flying[1]):
            self._land()
            if self._outputs.has_first:  # told before the next batch is made
                return self._told()
        start_s = self._clock()
        plan = self.scheduler.schedule(start_s)
        self.speculator.scheduled()
        if plan.stuck is not None:
            self._end_stuck(plan.stuck)
        if plan.has_work:
            self._num_steps += 1
            self._compute(plan, start_s)
        elif compiling := [other.grammar for other in self.waiting if other.grammar and not other.is_ready]:
            self.grammars.wait(compiling, COMPILE_POLL_S)
            self._num_empty_steps = 0
        self._watch(plan)
        return self._told()

    def _told(self) -> list[OutputStart | TokenEvents]:
        if self.config.check:
            self.check()
        return self._outputs.take()

    def idle(self) -> bool:
        """Without work: something that makes later work faster. Whether there is more of it."""
        assert not self.has_work
        return self.runner.idle()

    def stats(self) -> EngineStats:
        """Gauges and running totals."""
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.waiting),
            kv_slots_used=self.kv.pool.capacity - self.kv.num_available,
            kv_slots_total=self.kv.pool.capacity,
            num_steps=self._num_steps,
            num_retracted=self.scheduler.num_retracted,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_queried_tokens=self.scheduler.prefix_queried_tokens,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            vision_queries=self.vision.num_queries,
            vision_hits=self.vision.num_hits,
            vision_cache_bytes=self.vision.num_bytes,
            encoding_bytes=self.vision.encoding_bytes,
            device_bytes=self.runner.device_bytes(),
            encoder_slices=self.budget.encoder_slices,
            steps_over_target=self.budget.steps_over_target,
            **self.speculator.totals(),
        )

    def check(self) -> None:
        """Prove between steps that every slot, row, picture and id is owned exactly once. Raises AssertionError
        otherwise.
        """
        in_flight = {} if self._flying is None else self._flying[1].drafts_in_flight()
        check(self._sequences.values(), self.scheduler, self.intake, in_flight)

    def _take_in(self, request: EngineRequest, pixels: LoadPixels) -> Sequence:
        if request.request_id in self._sequences:
            raise duplicate_id(request.request_id)
        now_s = self._clock()
        sequence = self.intake.build(request, self._next_serial, pixels, now_s)
        if not self.waiting.has_room(sequence.num_prompt_tokens):
            self.intake.release(sequence)
            raise queue_full(self.waiting, sequence.num_prompt_tokens, now_s)
        return sequence

    def _compute(self, plan: Plan, start_s: float) -> None:
        """Run the plan. Requests whose picture or batch failed end with an error; the others go on."""
        failed = self._execution.encode(plan)
        for sequence in [other for other in self.scheduler.running if failed and other.holds(failed)]:
            self._fail(sequence, engine_failed("encoding a picture of"), keep=False)
        chunks = [chunk for chunk in plan.chunks if chunk.sequence.state is State.RUNNING]
        if not chunks:
            return
        if self._overlapped is None:
            sampled = self._execution.run(chunks)
            if sampled is not None:
                self._postprocess(depart(plan, chunks, start_s), sampled)
                return
        else:
            flight = self._execution.launch(self._overlapped, chunks)
            if flight is not None:
                waits = any(chunk.drafts or chunk.sequence.needs_results for chunk in chunks)
                is_usual = (waits or self._flying is not None) and not flight.is_first
                batch = depart(plan, chunks, start_s, is_usual=is_usual)
                self._land()
                self._flying = flight, batch
                return
        for chunk in chunks:
            self._fail(chunk.sequence, engine_failed("computing"), keep=False)

    def _can_run_ahead(self, flying: Batch) -> bool:
        """Whether a batch can be made that will be right whatever the one in flight gives."""
        running, speculator = self.scheduler.running, self.speculator
        return (
            not flying.has_drafts  # how many tokens will come is open
            and self.kv.num_available > len(running)  # nobody will be retracted
            and any(sequence.is_decoding and not sequence.is_ending for sequence in running)
            and not any(sequence.needs_results for sequence in running)
            and not (speculator.may_be_due(running) and self.scheduler.may_draft and speculator.is_due(running))
        )

    def _land(self) -> None:
        """Wait for the batch in flight, if there is one, and take its results."""
        if self._flying is None:
            return
        (flight, batch), self._flying = self._flying, None
        sampled = self._execution.collect(flight, [part.chunk for part in batch.departed])
        if sampled is not None:
            self._postprocess(batch, sampled)
            return
        for part in batch.departed:
            if part.is_awaited:
                self._fail(part.chunk.sequence, engine_failed("computing"), keep=False)

    def _postprocess(self, batch: Batch, sampled: list[list[SampledToken]]) -> None:
        """Take a completed batch's results into its sequences; those that have ended since get none."""
        now_s = self._clock()
        tokens = iter(sampled)
        for part in batch.departed:
            sequence, drafts = part.chunk.sequence, part.chunk.drafts
            standing = next(tokens) if part.chunk.samples else None
            if not part.is_awaited:
                continue
            if part.is_prompt:
                self.scheduler.commit(sequence)
                self.scheduler.drop_passed_pictures(sequence)
            if standing is not None:
                sequence.num_pending -= 1
                sequence.num_drafted += len(drafts)
                if sequence.serial not in self._flagged:
                    self._keep_path(part.chunk, standing)
                    kept = self._append(sequence, standing, now_s)
                    drafting = sequence.drafting
                    if drafting is not None and (drafting.proposed or drafting.watched):
                        self.speculator.verified(sequence, drafts, standing, kept)
                if drafts and sequence.hold is not None:
                    self.kv.shrink(sequence.hold, sequence.num_computed)
        self._end_flagged()
        landed_s = self._clock()
        elapsed_s, self._landed_s = landed_s - max(batch.started_s, self._landed_s), landed_s
        self.budget.stepped(batch.plan.room, elapsed_s, batch.plan.encoding_s, self.speculator.drafting_s)
        if self.speculator.is_on:
            waited_s = self._execution.waited_s
            self.speculator.stepped(batch.plan, elapsed_s, waited_s=waited_s, is_usual=batch.is_usual)

    def _keep_path(self, chunk: Chunk, standing: list[SampledToken]) -> None:
        """Put the slots of those drafts of a tree that stand in the order of the text; the others come behind."""
        if chunk.parents is None:
            return
        nodes = path(chunk.drafts, chunk.parents, [token.token_id for token in standing[:-1]])
        if nodes != list(range(1, len(nodes) + 1)):
            assert chunk.sequence.hold is not None
            self.kv.reorder(chunk.sequence.hold, chunk.start + 1, [node - 1 for node in nodes])

    def _append(self, sequence: Sequence, tokens: list[SampledToken], now_s: float) -> int:
        """The sequence's next outputs, and its end if one of them is the last. What follows that is dropped; says how
        many were kept.

        Each but the last token was a draft, so its keys and values are computed.
        """
        if not sequence.output_ids:
            sequence.clock.first_token_s = now_s
        for index, token in enumerate(tokens):
            grammar = sequence.grammar
            if grammar is not None and not grammar.accept(token.token_id):
                assert grammar.failure is not None
                if index:
                    self._outputs.tokens(sequence, tokens[:index])
                self._fail(sequence, grammar.failure, keep=True)
                return index
            is_stop, by_id = self._ends(sequence, token.token_id)
            if index:
                sequence.num_computed += 1
                sequence.num_accepted += 1
            sequence.output_ids.append(token.token_id)
            self._generated_tokens += 1
            if is_stop or len(sequence.output_ids) >= sequence.max_tokens:
                reason: FinishReason = "stop" if is_stop else "length"
                self._outputs.last_tokens(sequence, tokens[: index + 1], reason, now_s, by_id=by_id)
                self.speculator.ended(sequence)
                self._release(sequence, keep=True)
                return index + 1
        self._outputs.tokens(sequence, tokens)
        return len(tokens)

    def _ends(self, sequence: Sequence, token_id: int) -> tuple[bool, bool]:
        """Whether a token that the sequence's grammar has accepted ends it, and whether it does so as a stop id."""
        params = sequence.request.sampling
        grammar = sequence.grammar
        by_id = token_id in params.stop_token_ids and len(sequence.output_ids) >= params.min_tokens
        if grammar is not None and grammar.is_finished:  # whatever `ignore_eos` and `min_tokens` say
            return True, by_id or token_id in self.grammars.vocabulary.end_ids
        return by_id, by_id

    def _end_flagged(self) -> None:
        """End what was aborted or stopped since."""
        flagged, self._flagged = self._flagged, {}
        for sequence in flagged.values():
            if sequence.is_aborted:
                self._end(sequence, "abort")
                continue
            assert sequence.stop_at is not None
            del sequence.output_ids[sequence.stop_at :]
            sequence.num_pending = 0
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens)
            self.speculator.ended(sequence)
            self._end(sequence, "stop")

    def _end_stuck(self, sequence: Sequence) -> None:
        """End a request that alone needs more memory than there is: what it has said is its answer."""
        if sequence.output_ids:
            self._end(sequence, "length")
        else:
            self._fail(sequence, memory_full(sequence, self.kv.pool.capacity), keep=True)

    def _watch(self, plan: Plan) -> None:
        """Fail the request at the head when steps with work compute nothing."""
        if plan.has_work or plan.stuck is not None or not self._sequences:
            self._num_empty_steps = 0
            return
        self._num_empty_steps += 1
        if self._num_empty_steps >= MAX_EMPTY_STEPS:
            self._num_empty_steps = 0
            head = next(iter(self.scheduler.running), None) or next(iter(self.waiting))
            logger.error("nothing could be scheduled in %d steps; request %s fails", MAX_EMPTY_STEPS, head.request_id)
            self._fail(head, stalled(), keep=False)

    def _fail(self, sequence: Sequence, error: BeholderError, *, keep: bool) -> None:
        self._end(sequence, "error", error=rejected(sequence.request_id, error), keep=keep)

    def _end(
        self, sequence: Sequence, reason: FinishReason, *, error: Rejected | None = None, keep: bool = True
    ) -> None:
        self._outputs.end(sequence, reason, self._clock(), error)
        self._release(sequence, keep=keep)

    def _release(self, sequence: Sequence, *, keep: bool) -> None:
        """Give back everything that a sequence holds."""
        self.scheduler.release(sequence, keep=keep)
        self.intake.release(sequence)
        self._flagged.pop(sequence.serial, None)
        del self._sequences[sequence.request_id]
