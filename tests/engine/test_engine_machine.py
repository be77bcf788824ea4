"""Random lives of an engine: requests, aborts, stops, failures and retractions in any order, in small pools and caches.

After every step `check()` holds; in the end everybody was told exactly one end, with the tokens of the reference, and
nothing is held.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from preprocess.wire import Admitted, EngineRequest, MediaItem, Rejected
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner, load, reference

CONTEXT = 40
LONG = [1, 2, 3, 4] * 8


class EngineMachine(RuleBasedStateMachine):
    """Prompts share prefixes (a few texts, a few pictures), so that matching, splitting and duplicates happen all the
    time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.stopped: dict[str, int] = {}
        self.breaks = 0

    @initialize(
        num_slots=st.integers(12, 90),
        budget=st.sampled_from([1, 3, 8, 32]),
        rows=st.integers(1, 5),
        vision_tokens=st.integers(9, 40),
        share=st.booleans(),
        optimistic=st.booleans(),
    )
    def build(self, num_slots: int, budget: int, rows: int, vision_tokens: int, share: bool, optimistic: bool) -> None:
        """An engine of some size."""
        self.runner = FakeRunner(num_slots=num_slots, max_rows=rows)
        self.driver = Driver(
            self.runner,
            max_batched_tokens=budget,
            max_context=CONTEXT,
            max_waiting=6,
            vision_cache_tokens=vision_tokens,
            prefix_cache=share,
            optimistic=optimistic,
        )
        self.runner.before_step = self.runner.before_encode = self.maybe_break

    def maybe_break(self) -> None:
        """Called inside the runner."""
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("the device broke")

    @rule(
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 2), max_size=2),
        pictures=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 9)), max_size=3),
        max_tokens=st.integers(1, 14),
        min_tokens=st.integers(0, 3),
        stops=st.lists(st.integers(0, 49), max_size=12),
        seed=st.integers(0, 1),
        priority=st.integers(0, 1),
    )
    def submit(
        self,
        length: int,
        tail: list[int],
        pictures: list[tuple[int, int, int]],
        max_tokens: int,
        min_tokens: int,
        stops: list[int],
        seed: int,
        priority: int,
    ) -> None:
        """One request more; it may be refused for the queue's or the pool's sake, and then holds nothing."""
        media: list[MediaItem] = []
        position = 0
        for content, gap, size in pictures:
            media.append(picture(content, (position + gap, size)))
            position += gap + size
        prompt = [*(LONG * 2)[: max(length, position)], *tail]
        wanted = request(
            f"r{len(self.requests)}",
            prompt,
            media,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            seed=seed,
            priority=priority,
        )
        answer = self.driver.engine.submit(wanted, load)
        self.driver.engine.check()
        if isinstance(answer, Admitted):
            self.requests[wanted.request_id] = wanted
        else:
            assert isinstance(answer, Rejected)
            assert answer.status in (400, 429)
            assert (answer.retry_after_s is not None) == (answer.status == 429)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        """Some steps."""
        self.driver.step(count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort any request, finished ones too."""
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.driver.engine.abort(request_id)
        self.aborted.add(request_id)

    @precondition(lambda self: self.driver.told)
    @rule(data=st.data(), back=st.integers(0, 2))
    def stop(self, data: st.DataObject, back: int) -> None:
        """The detokenizer found a stop string some tokens ago, perhaps in a request that has ended meanwhile."""
        request_id = data.draw(st.sampled_from(sorted(self.driver.told)))
        told = self.driver.told[request_id]
        count = max(len(told.ids) - back, 0)
        if told.finish is None:
            self.stopped.setdefault(request_id, count)
        self.driver.engine.stop(request_id, count)

    @precondition(lambda self: self.driver.engine.scheduler.running)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """Memory pressure on anybody."""
        scheduler = self.driver.engine.scheduler
        scheduler.retract(data.draw(st.sampled_from(scheduler.running)))
        self.driver.engine.check()

    @rule()
    def break_next(self) -> None:
        """The next step or encoding raises."""
        self.breaks = 1

    def teardown(self) -> None:
        """Everybody ends once, as the reference does, and nothing is left."""
        if not hasattr(self, "driver"):
            return
        told_all = self.driver.finish()
        assert set(told_all) == set(self.requests)
        for request_id, told in told_all.items():
            ids, reason = reference(self.requests[request_id], max_context=CONTEXT)
            assert told.ids == ids[: len(told.ids)]
            assert told.finish is not None
            if told.reason in ("length", "stop") and request_id not in self.stopped:
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
