"""Random lives of an engine: requests, aborts, stops, failures and retractions in any order, in small pools and caches,
with good drafts, bad ones and none, in chains and in trees, by scripts and by models that keep entries of their own, by
tokens alone or by time with pictures in slices.

After every step `check()` holds; in the end everybody was told exactly one end, with the tokens of the reference, and
nothing is held.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine import scheduler, step_budget
from engine.sequence import Sequence
from engine.speculation.drafting import Kind
from preprocess.wire import Admitted, EngineRequest, MediaItem, Rejected
from tests.engine.cost_table import Table
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner, LateRunner, load, reference

CONTEXT = 40
TEXT = list(range(30))
Template = tuple[list[int], list[MediaItem]]
Wish = tuple[Template, int, list[int], int, Iterable[int], int, int]
TEMPLATES: list[Template] = [
    (TEXT, []),
    (TEXT, [picture(1, (3, 5))]),
    (TEXT, [picture(2, (3, 5)), picture(1, (9, 8))]),
    (TEXT, [picture(1, (3, 2), (6, 3)), picture(1, (9, 5))]),
]


class EngineMachine(RuleBasedStateMachine):
    """Prompts share prefixes (a few texts, a few pictures), so that matching, splitting and duplicates happen all the
    time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.stopped: dict[str, int] = {}
        self.filled: set[str] = set()
        """Requests that ended because they alone filled the memory."""
        self.num_sent = 0
        self.breaks = 0

    @initialize(
        num_slots=st.integers(12, 90),
        budget=st.sampled_from([1, 3, 8, 32]),
        rows=st.integers(1, 5),
        vision_tokens=st.integers(9, 40),
        shares_prefixes=st.booleans(),
        optimistic=st.booleans(),
        min_shared=st.sampled_from([2, 1000]),
        three_axes=st.booleans(),
        make=st.sampled_from([FakeRunner, LateRunner]),
        drafts=st.sampled_from([0, 1, 4, 15]),
        accuracy=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
        shape=st.sampled_from(["chain", "branches", "any tree"]),
        costs=st.sampled_from([None, (0.1, 1.0), (1.0, 4.0), (20.0, 20.0)]),
        slices=st.sampled_from([1, 2, 5]),
        ttft_target_ms=st.sampled_from([1.0, 100.0]),
        kind=st.sampled_from([Kind.REPLAY, Kind.DRAFT_MODEL, Kind.HEAD]),
        most_late=st.sampled_from([1, 5, 1000]),
        share=st.sampled_from([0.3, 1.0]),
    )
    def build(
        self,
        num_slots: int,
        budget: int,
        rows: int,
        vision_tokens: int,
        shares_prefixes: bool,
        optimistic: bool,
        min_shared: int,
        three_axes: bool,
        make: type[FakeRunner],
        drafts: int,
        accuracy: float,
        shape: str,
        costs: tuple[float, float] | None,
        slices: int,
        ttft_target_ms: float,
        kind: Kind,
        most_late: int,
        share: float,
    ) -> None:
        """An engine of some size, whose results come at once or a step late."""
        self.three_axes = three_axes
        self.patch.setattr(scheduler, "MIN_SHARED", min_shared)
        self.runner = make(num_slots=num_slots, max_rows=rows)
        self.runner.slices_of_picture = slices
        self.runner.max_first_drafts = 63  # of those too whose results come late
        self.driver = Driver(
            self.runner,
            max_batched_tokens=budget,
            max_context=CONTEXT,
            max_waiting=6,
            vision_cache_tokens=vision_tokens,
            prefix_cache=shares_prefixes,
            optimistic=optimistic,
            costs=costs and Table(token_s=costs[0] / 1e3, slice_s=costs[1] / 1e3),
            ttft_target_ms=ttft_target_ms,
        )
        self.patch.setattr(step_budget, "UNSEEN_S", 0.0)
        self.answers: dict[str, list[int]] = {}
        self.followed: dict[int, int] = {}
        if kind is not Kind.REPLAY:
            drafter = self.driver.draft_with(kind, accuracy, drafts, share=share)
            drafter.answers, drafter.most_late = self.followed, most_late
        elif shape == "any tree":
            self.driver.draft_trees(accuracy, drafts).answers = self.answers
        else:
            self.driver.draft(accuracy, drafts, branches=3 * (shape == "branches")).answers = self.answers
        self.patch.setattr(logging.getLogger("beholder.engine"), "disabled", True)  # it breaks on purpose here
        self.runner.before_step = self.runner.before_encode = self.maybe_break
        end_stuck = self.driver.engine._end_stuck

        def note(sequence: Sequence) -> None:
            """Alone, and nothing is free: what it computed again after a retraction lies there twice at most."""
            kv = self.driver.engine.kv
            assert self.driver.engine.scheduler.running == [sequence]
            assert not kv.num_available
            assert 2 * sequence.num_tokens > kv.pool.capacity
            self.filled.add(sequence.request_id)
            end_stuck(sequence)

        self.driver.engine._end_stuck = note  # type: ignore[method-assign]

    def maybe_break(self) -> None:
        """Called inside the runner."""
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("the device broke")

    @rule(
        wishes=st.lists(
            st.tuples(
                st.sampled_from(TEMPLATES),
                st.integers(1, 30),  # where it is cut
                st.lists(st.integers(0, 1), max_size=1),  # a tail of its own
                st.integers(1, 14),  # max_tokens
                st.sampled_from([(), (), range(0, 50, 3)]),  # stop ids
                st.integers(0, 2),  # min_tokens
                st.integers(0, 1),  # priority
            ),
            min_size=1,
            max_size=4,
        )
    )
    def submit(self, wishes: list[Wish]) -> None:
        """Some requests more; each may be refused for the queue's or the pool's sake, and then holds nothing."""
        for (text, pictures), cut, tail, max_tokens, stops, min_tokens, priority in wishes:
            media = [item for item in pictures if item.spans[-1][0] + item.spans[-1][1] <= cut]
            wanted = request(
                f"r{self.num_sent}",
                [*text[:cut], *tail],
                media,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=list(stops),
                priority=priority,
                three_axes=self.three_axes,
            )
            self.num_sent += 1
            answer = self.driver.engine.submit(wanted, load)
            self.driver.engine.check()
            if isinstance(answer, Admitted):
                self.requests[wanted.request_id] = wanted
                self.answers[wanted.request_id] = reference(wanted, max_context=CONTEXT, answers=self.followed)[0]
            else:
                assert isinstance(answer, Rejected)
                assert answer.status in (400, 429)
                assert (answer.retry_after_s is not None) == (answer.status == 429)

    @rule(count=st.integers(1, 10))
    def step(self, count: int) -> None:
        """Some steps."""
        self.driver.step(count)

    @rule(count=st.integers(1, 10))
    def step_on(self, count: int) -> None:
        """Some steps more: computing is what happens most."""
        self.driver.step(count)

    @precondition(lambda self: self.driver.told)
    @rule(data=st.data(), back=st.integers(0, 3), aborts=st.booleans())
    def abort_or_stop(self, data: st.DataObject, back: int, aborts: bool) -> None:
        """Abort, or say that a stop string ended some tokens ago; of any request, finished ones too."""
        request_id = data.draw(st.sampled_from(sorted(self.driver.told)))
        told = self.driver.told[request_id]
        if aborts:
            self.driver.engine.abort(request_id)
            self.aborted.add(request_id)
            return
        count = max(len(told.ids) - back, 0)
        if told.finish is None:
            self.stopped.setdefault(request_id, count)
        self.driver.engine.stop(request_id, count)

    @precondition(lambda self: self.driver.engine.scheduler.running)
    @rule(data=st.data(), breaks=st.integers(0, 4))
    def retract_or_break(self, data: st.DataObject, breaks: int) -> None:
        """Memory pressure on anybody, or a step or encoding that raises."""
        if not breaks:
            self.breaks = 1
            self.driver.step()
            return
        running = self.driver.engine.scheduler.running
        self.driver.engine.scheduler.retract(data.draw(st.sampled_from(running)))
        self.driver.engine.check()

    def teardown(self) -> None:
        """Everybody ends once, as the reference does, and nothing is left."""
        self.patch.undo()
        if not hasattr(self, "driver"):
            return
        told_all = self.driver.finish()
        assert set(told_all) == set(self.requests)
        for request_id, told in told_all.items():
            ids, reason = reference(self.requests[request_id], max_context=CONTEXT)
            fills_memory = told.reason == "length" and request_id in self.filled
            assert told.ids == ids[: len(told.ids)]
            assert told.finish is not None
            if told.reason in ("length", "stop") and request_id not in self.stopped and not fills_memory:
                assert (told.ids, told.reason) == (ids, reason)
            if told.reason == "abort":
                assert request_id in self.aborted
            if told.reason == "error":
                assert told.finish.error is not None
                assert told.finish.error.code in ("engine_error", "kv_exhausted")
            kept = self.stopped.get(request_id, len(told.ids))
            if told.reason == "stop" and told.usage.completion_tokens != len(told.ids):
                assert told.usage.completion_tokens == kept < len(told.ids)


EngineMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngine = EngineMachine.TestCase
