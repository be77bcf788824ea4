"""Steps budgeted by time: what rides beside decoding, what does not, and that nothing is lost by it.

Costs come from a table, so that every batch follows from the requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import step_budget
from engine.speculation.drafter import DraftRow
from engine.speculation.drafting import Kind
from engine.step_budget import LEAST_CHUNK, Queue, Room, StepBudget
from engine.step_costs import Load
from preprocess.wire import EngineRequest, Pixels
from tests.engine.cost_table import MS, Table
from tests.engine.driving import Driver, picture, request
from tests.engine.fake_runner import FakeRunner, LateRunner, load, reference

PROMPT = list(range(10, 40))


@pytest.fixture(autouse=True)
def sharp_eyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads these streams sees the shortest gap."""
    monkeypatch.setattr(step_budget, "UNSEEN_S", 0.0)


def timed(
    costs: Table | None = None,
    *,
    runner: FakeRunner | None = None,
    slices: int = 12,
    itl_target_ms: float = 0,
    ttft_target_ms: float = 300,
    max_batched_tokens: int = 64,
    vision_cache_tokens: int = 1000,
    optimistic: bool = False,
) -> Driver:
    """An engine whose steps are bounded by a table of costs."""
    runner = runner or FakeRunner()
    runner.slices_of_picture = slices
    return Driver(
        runner,
        max_batched_tokens=max_batched_tokens,
        vision_cache_tokens=vision_cache_tokens,
        optimistic=optimistic,
        costs=costs or Table(),
        itl_target_ms=itl_target_ms,
        ttft_target_ms=ttft_target_ms,
    )


def streaming(driver: Driver, *, max_tokens: int = 60) -> EngineRequest:
    """Has a text stream run."""
    stream = request("stream", PROMPT[:4], max_tokens=max_tokens)
    driver.submit(stream)
    driver.step(2)
    assert driver.told["stream"].ids
    return stream


def seeing(name: str, content: int = 1, *, max_tokens: int = 4, num_tokens: int = 6) -> EngineRequest:
    """A request whose prompt begins with a picture."""
    tail = [*PROMPT[: num_tokens + 2], content % 50]
    return request(name, tail, [picture(content, (0, num_tokens))], max_tokens=max_tokens)


def lengths(driver: Driver) -> list[list[int]]:
    """Tokens of every row of every step so far."""
    return [[count for _, _, count in rows] for rows in driver.runner.steps]


# ---- what fits ----


def test_a_picture_is_encoded_in_slices_beside_running_streams_and_they_miss_no_step() -> None:
    driver = timed()
    stream = streaming(driver)
    wanted = seeing("seen")
    driver.submit(wanted)
    before = len(driver.told["stream"].ids)
    driver.step(4)
    assert driver.runner.sliced == [3, 3, 3, 3], "of a millisecond each, in the 3 that 1.3 × 10 ms leave"
    assert len(driver.told["stream"].ids) == before + 4
    assert driver.runner.encoded == []
    told = driver.finish()
    assert told["seen"].ids == reference(wanted)[0]
    assert told["stream"].ids == reference(stream)[0]


def test_chunks_of_prompts_are_as_long_as_fits_beside_running_streams() -> None:
    driver = timed(Table(token_s=0.14 * MS))
    streaming(driver)
    driver.submit(request("text", [1, 2, 3, *PROMPT, *PROMPT[:20]], max_tokens=2))
    driver.step(4)
    assert lengths(driver)[2:] == [[1, 21], [1, 21], [1, 11], [1, 1]]


def test_chunks_get_shorter_the_more_they_read_and_never_end() -> None:
    driver = timed(Table(token_s=0.1 * MS, pair_s=0.01 * MS))
    streaming(driver)
    driver.submit(request("text", [1, 2, 3, *PROMPT, *PROMPT[:20]], max_tokens=2))
    driver.step(4)
    assert lengths(driver)[2:] == [[1, 30], [1, 16], [1, 7], [1, 1]], (
        "behind 0, 30 and 46: 0.1, 0.4 and 0.56 ms a token"
    )
    rooms = [Room(Table(token_s=0.1 * MS, pair_s=0.01 * MS), Load(4, 4), left_s=3 * MS) for _ in range(2)]
    assert [room.tokens(100, behind) for room, behind in zip(rooms, (5, 10_000), strict=True)] == [20, LEAST_CHUNK]
    rooms[0].take_tokens(20, behind=5)
    assert rooms[0].left_s == pytest.approx(0.0)
    assert rooms[0].load.pairs == 100


def test_nobody_is_let_in_whose_first_token_would_read_for_too_long() -> None:
    """Where the rest of what is filled up costs nothing more, but for what it reads of a text that is cached."""
    costs = Padded(token_s=0.1 * MS, pair_s=0.005 * MS)
    runner = FakeRunner(num_slots=4000, max_positions=400)
    driver = timed(costs, runner=runner, max_batched_tokens=512, ttft_target_ms=3000)
    document = [7 * index % 50 for index in range(200)]
    driver.run(request("document", document, max_tokens=2))
    streaming(driver)
    for number in range(12):
        driver.submit(request(f"q{number}", [*document, *[(number + index) % 50 for index in range(25)]], max_tokens=3))
    for _ in range(4):
        driver.step()
        begun = [
            each.num_computed > (each.num_cached or 0) or each.output_ids for each in driver.engine.scheduler.running
        ]
        assert all(begun), "who holds a row goes on"
    assert driver.engine.waiting
    driver.finish()


def test_slices_and_tokens_share_the_time_of_a_step() -> None:
    driver = timed(slices=4)
    streaming(driver)
    driver.submit(seeing("seen", num_tokens=6))
    driver.step(2)
    assert driver.runner.sliced == [3, 1]
    assert lengths(driver)[2:] == [[1], [1, 8]], "2 of 3 ms are left after the last slice"


class Padded(Table):
    """Tokens are paid for by the sixteen."""

    def prompt_s(self, tokens: int, rows: int = 0) -> float:
        """See `Costs`."""
        return self.token_s * (-(-tokens // 16) * 16)


def test_a_few_tokens_before_a_picture_come_with_those_behind_it_where_they_are_as_dear_as_many() -> None:
    """In their place more slices run; a long text does not wait for the picture behind it."""
    driver = timed(Padded(token_s=0.1 * MS), slices=4)
    streaming(driver)
    few = request("few", [*PROMPT[20:23], *PROMPT[:9]], [picture(1, (3, 6))], max_tokens=2)
    driver.submit(few)
    driver.step(3)
    assert driver.runner.sliced == [3, 1]
    assert lengths(driver)[2:] == [[1], [1, 12], [1, 1]]
    many = request("many", [*PROMPT[3:19], *PROMPT[:9]], [picture(2, (16, 6))], max_tokens=2)
    driver.submit(many)
    driver.step(2)
    assert lengths(driver)[5:] == [[1, 16], [1]]
    told = driver.finish()
    assert [told[name].ids for name in ("few", "many")] == [reference(few)[0], reference(many)[0]]


def test_steps_may_take_as_long_as_nobody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_budget, "UNSEEN_S", 17 * MS)
    driver = timed()
    streaming(driver)
    driver.submit(seeing("seen"))
    driver.step(2)
    assert driver.runner.sliced == [7, 5], "17 - 10 ms, not 1.3 × 10 ms"
    assert driver.engine.budget.pace(1) == (10 * MS, 17 * MS)


def test_a_target_of_its_own_says_how_much_fits() -> None:
    driver = timed(itl_target_ms=15.5)
    streaming(driver)
    driver.submit(seeing("seen"))
    driver.step(3)
    assert driver.runner.sliced == [5, 5, 2]


def test_alone_everything_is_taken_at_once() -> None:
    driver = timed()
    driver.submit(*(seeing(f"r{index}", index) for index in range(4)))
    driver.step()
    assert driver.runner.encoded == [4]
    assert lengths(driver) == [[9, 9, 9, 9]]
    assert driver.runner.sliced == []


def test_a_picture_under_way_is_finished_at_once_when_nobody_decodes_any_more() -> None:
    driver = timed(slices=40)
    streaming(driver, max_tokens=5)
    driver.submit(seeing("seen"))
    driver.finish()
    assert driver.runner.sliced == [3, 3, 3, 31]


@pytest.mark.parametrize("itl_target_ms", [0, 1])
def test_where_nothing_fits_the_least_piece_of_work_goes_on(itl_target_ms: float) -> None:
    driver = timed(Table(token_s=50 * MS, slice_s=50 * MS), slices=3, itl_target_ms=itl_target_ms)
    streaming(driver)
    driver.submit(seeing("seen", num_tokens=20))
    driver.step(5)
    assert driver.runner.sliced == [1, 1, 1]
    assert lengths(driver)[2:] == [[1], [1], [1], [1, LEAST_CHUNK], [1, 7]]


def test_pictures_of_a_new_size_are_measured_by_one_slice_first() -> None:
    costs = Table()
    driver = timed(costs)
    streaming(driver)
    costs.unknown = {6 / 12}
    driver.submit(seeing("seen"))
    driver.step(3)
    assert driver.runner.sliced == [1, 3, 3]


def test_a_picture_that_cannot_be_cut_comes_as_a_whole_and_its_prompt_after_it() -> None:
    driver = timed(Table(slice_s=20 * MS), slices=1)
    streaming(driver)
    driver.submit(seeing("seen"))
    driver.step(2)
    assert driver.runner.encoded == [1]
    assert lengths(driver)[2:] == [[1], [1, 9]]


@pytest.mark.parametrize("slices", [1, 2])
def test_a_step_beside_streams_begins_one_picture_however_many_wait(slices: int) -> None:
    driver = timed(Table(token_s=0.01 * MS), slices=slices)
    stream = streaming(driver)
    driver.submit(*(seeing(f"p{index}", index) for index in range(5)))
    before = len(driver.told["stream"].ids)
    driver.step(5)
    assert driver.runner.encoded == [1] * 5
    assert len(driver.told["stream"].ids) == before + 5
    assert driver.finish()["stream"].ids == reference(stream)[0]


def test_without_a_target_everything_comes_as_soon_as_it_can() -> None:
    driver = timed(ttft_target_ms=0)
    streaming(driver)
    driver.submit(seeing("seen"))
    driver.step()
    assert driver.runner.encoded == [1]
    assert lengths(driver)[2:] == [[1, 9]]


# ---- waiting ----


def waiting(*waited_s: float, work_s: float = 0.0, now_s: float = 10.0) -> Queue:
    """Who has waited for so long, and all of whose pictures take so long."""
    return Queue([now_s - one_s for one_s in waited_s], 0, work_s)


def rooms_of(queues: Sequence[Queue], *, overlaps: bool = False) -> list[float]:
    """Milliseconds beside 10 ms of decoding."""
    budget = StepBudget(Table(), 0.0, 0.3, overlaps=overlaps)
    budget.now_s = 10.0
    return [round(budget.open(4, 4, queue).left_s / MS, 3) for queue in queues]


def test_from_the_ttft_target_on_room_grows_with_the_waiting() -> None:
    assert rooms_of([waiting(age_s) for age_s in (0.0, 0.29, 0.3, 0.375, 0.6, 3.0)]) == [3, 3, 3, 9, 27, 219]
    assert rooms_of([Queue()]) == [3]
    assert StepBudget(Table(), 0.0, 0.3).open(0, 0, waiting(0.0)).left_s == math.inf


def test_steps_give_a_queue_the_part_of_the_time_that_has_it_served_soon() -> None:
    """Two within 120 ms, four within 60 ms."""
    two = [waiting(0.05, 0.05, work_s=work_s) for work_s in (0.0, 0.024, 0.03, 0.04, 0.06, 0.09, 0.5)]
    assert rooms_of(two) == [3, 3, 3.333, 5, 10, 30, 90]
    four = [waiting(*[0.05] * 4, work_s=work_s) for work_s in (0.0, 0.015, 0.02, 0.03, 0.045, 0.25)]
    assert rooms_of(four) == [3, 3.333, 5, 10, 30, 90]


@pytest.mark.parametrize("overlaps", [False, True])
def test_room_grows_smoothly_as_a_queue_grows_and_ages(overlaps: bool) -> None:
    """No step is much longer than the last one, whatever little has come since."""
    work = [waiting(0.05, 0.02, work_s=step * MS / 10) for step in range(600)]
    ages = [waiting(0.1, step * MS / 10, work_s=0.04) for step in range(1000)]
    for queues in (work, ages):
        rooms = rooms_of(queues, overlaps=overlaps)
        assert all(0 <= later - room < 0.2 for room, later in itertools.pairwise(rooms))
        assert rooms[-1] > 1.2 * rooms[0]


def test_what_prompts_read_of_their_earlier_chunks_is_work_that_waits() -> None:
    budget = StepBudget(Table(token_s=0.01 * MS, pair_s=0.001 * MS), 0.0, 0.3)
    budget.now_s = 0.1
    queues = [Queue([0.0, 0.0], 1000, pairs=pairs) for pairs in (0, 500_000, 560_000, 580_000)]
    rooms = [budget.open(4, 4, queue).left_s for queue in queues]
    assert rooms[0] == rooms[1] < rooms[2] < rooms[3], "a thousand in one chunk read half a million of their own"


def test_tokens_of_prompts_count_for_what_they_take_in_chunks_that_fit() -> None:
    class Dear(Table):
        def prompt_s(self, tokens: int, rows: int = 0) -> float:
            return super().prompt_s(tokens) + 1 * MS * max(tokens - 20, 0)

    budget = StepBudget(Dear(token_s=0.05 * MS), 0.0, 0.3)
    few, many = (budget.open(4, 4, Queue([0.0, 0.0], tokens)).left_s / MS for tokens in (100, 600))
    assert few == pytest.approx(3), "100 tokens take 85 ms at once, and 10 in chunks of 21"
    assert many == pytest.approx(90)


def test_who_comes_while_another_is_nearly_served_makes_no_crowd() -> None:
    queues = [waiting(0.1, age_s, work_s=0.06) for age_s in (0.0, 0.0125, 0.025, 0.1)]
    assert rooms_of(queues) == [3, 4.5, 10, 10]


def test_where_steps_overlap_only_shorter_ones_are_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_budget, "UNSEEN_S", 20 * MS)
    assert step_budget.STEADY <= step_budget.STEADY_AHEAD < 1.5
    assert StepBudget(Table()).pace(1) == (10 * MS, 20 * MS)
    assert StepBudget(Table(), overlaps=True).pace(1) == (10 * MS, pytest.approx(step_budget.STEADY_AHEAD * 10 * MS))
    monkeypatch.setattr(step_budget, "UNSEEN_AHEAD_S", 15 * MS)
    assert StepBudget(Table(), overlaps=True).pace(1) == (10 * MS, 15 * MS)
    assert timed(runner=LateRunner()).engine.budget.pace(1) == (10 * MS, 15 * MS)


def test_where_steps_overlap_prompts_are_spread_over_the_steps_that_answers_take() -> None:
    """However long a queue: at the rate at which rows end, and at least for `HARDLY` times as long as decoding."""
    table = Table(token_s=0.07 * MS)
    long = Queue([0.0] * 30, 6000, 0.0, rows=20)
    budget = StepBudget(table, overlaps=True)
    budget.now_s = 10.0
    at_least = int(step_budget.HARDLY * 10 / 0.07)
    assert budget.open(4, 4, long).tokens(6000) == at_least
    for _ in range(step_budget.NEWEST_ANSWERS):
        budget.answered(1000, 10)
    assert budget.open(4, 4, long).tokens(6000) == 20 * 100
    for _ in range(step_budget.NEWEST_ANSWERS):
        budget.answered(1000, 1000)
    room = budget.open(4, 4, long)
    assert room.tokens(6000) == at_least
    room.take_tokens(at_least)
    assert room.tokens(1) == 0
    assert room.is_spent
    assert budget.open(0, 0, long).tokens(6000) == 6000, "nobody decodes"

    each_at_once = StepBudget(table)
    each_at_once.now_s = 10.0
    assert each_at_once.open(4, 4, long).tokens(6000) > at_least


@pytest.mark.parametrize(("each", "tokens"), [(100, 1024), (101, 1024), (105, 1024), (106, 1088), (108, 1088)])
def test_what_is_spread_fills_the_sizes_that_steps_are_filled_up_to(each: int, tokens: int) -> None:
    """What is filled up is paid for, so a little less than what comes while rows end will do; and else more."""

    class Sized(Table):
        def prompt_s(self, tokens: int, rows: int = 0) -> float:
            return self.token_s * (-(-tokens // 64) * 64)

    budget = StepBudget(Sized(token_s=0.001 * MS), overlaps=True)
    budget.now_s = 10.0
    budget.answered(10 * each, 100)
    assert budget.open(4, 4, Queue([0.0] * 30, 6000, 0.0, rows=100)).most_tokens == 6000, "hardly longer: all of them"
    dear = StepBudget(Sized(token_s=0.1 * MS), overlaps=True)
    dear.now_s = 10.0
    dear.answered(10 * each, 100)
    assert dear.open(4, 4, Queue([0.0] * 30, 6000, 0.0, rows=100)).most_tokens == tokens
    assert dear.open(4, 4, Queue([0.0] * 30, 900, 0.0, rows=100)).most_tokens >= 900


def test_where_two_wait_steps_take_at_least_as_much_as_came_of_late() -> None:
    """Then a queue that comes at a steady rate neither grows nor goes, and no step is much longer than others."""
    budget = StepBudget(Table(), overlaps=True)
    for _ in range(10 * step_budget.USUAL_STEPS):
        budget.planned(Load(4, 4, 0, [(1.0, 12)]))
    steady_s = budget.open(4, 4, Queue()).left_s

    def left_s(*waited_s: float) -> float:
        return budget.open(4, 4, Queue([budget.now_s - one_s for one_s in waited_s], 10)).left_s

    assert left_s(0.1) == steady_s, "one alone waits as long as it must"
    assert left_s(0.1, 0.1) == left_s(0.1, 0.1, 0.1) == pytest.approx(12 * MS, rel=0.01)
    assert steady_s < left_s(0.1, 0.01) < 12 * MS
    for _ in range(10 * step_budget.USUAL_STEPS):
        budget.planned(Load(4, 4))
    assert left_s(0.1, 0.1) == pytest.approx(steady_s)


@given(
    token_s=st.floats(0.0, 1.0),
    chunk_s=st.floats(0.0, 1.0),
    decode_s=st.floats(0.0, 1.0),
    waited_s=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=40),
    tokens=st.integers(1, 100_000),
    encoding_s=st.floats(0.0, 10.0),
    answers=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 1000)), max_size=3),
    overlaps=st.booleans(),
    itl_target_s=st.sampled_from([0.0, 0.001, 0.1]),
)
def test_whatever_devices_charge_something_of_a_prompt_fits_beside_streams(
    token_s: float,
    chunk_s: float,
    decode_s: float,
    waited_s: list[float],
    tokens: int,
    encoding_s: float,
    answers: list[tuple[int, int]],
    overlaps: bool,
    itl_target_s: float,
) -> None:
    """Where having a chunk at all takes far longer than decoding, too; no room is endless, targets are the user's."""

    class Charging(Table):
        def decode_s(self, rows: int, tokens: int) -> float:
            return decode_s

        def prompt_s(self, tokens: int, rows: int = 0) -> float:
            return tokens * token_s + chunk_s * (tokens > 0)

    budget = StepBudget(Charging(), itl_target_s, overlaps=overlaps)
    budget.now_s = 20.0
    for asked in answers:
        budget.answered(*asked)
    queue = Queue([20.0 - one_s for one_s in waited_s], tokens, encoding_s, rows=4 + len(waited_s))
    room = budget.open(4, 4, queue)
    assert room.tokens(tokens) >= min(LEAST_CHUNK, tokens)
    assert not room.is_spent
    assert 0.0 <= room.left_s < math.inf
    assert not itl_target_s or room.target_s == itl_target_s


def test_a_step_that_decodes_for_longer_than_its_target_is_told_of() -> None:
    """The target is the user's, whether it can be kept or not."""
    budget = StepBudget(Table(), 0.001)
    budget.stepped(budget.open(4, 4, Queue()), 5 * MS, None)
    budget.stepped(budget.open(4, 4, Queue([0.0], 10)), 5 * MS, None)
    assert budget.steps_over_target == 2


def test_what_the_cache_had_of_prompts_is_not_spread() -> None:
    driver = timed(max_batched_tokens=64)
    asked = []
    driver.engine.budget.answered = lambda *tokens: asked.append(tokens)  # type: ignore[method-assign]
    for name in ("first", "second"):
        driver.submit(request(name, PROMPT, max_tokens=5))
        driver.run()
    assert asked == [(30, 5), (1, 5)]


def test_a_tight_target_gives_way_to_whoever_waits_too_long() -> None:
    budget = StepBudget(Table(), 0.001, 0.3)
    budget.now_s = 10.0
    assert budget.open(4, 4, waiting(0.1)).left_s == 0
    assert budget.open(4, 4, waiting(1.0)).left_s > 3 * MS


def test_who_waits_longer_than_the_target_gets_more_of_each_step() -> None:
    driver = timed(slices=1000, ttft_target_ms=100)
    streaming(driver)
    driver.submit(seeing("seen"))
    driver.step(9)
    assert set(driver.runner.sliced) == {3}, "as long as it is younger than the target"
    driver.finish()
    assert max(driver.runner.sliced) > 30
    assert len(driver.runner.sliced) < 25, "and not 334 steps"


def test_a_stream_that_lost_its_memory_waits_from_then_on_and_not_since_it_came() -> None:
    driver = timed()
    streaming(driver)
    driver.step(40)
    budget, scheduler = driver.engine.budget, driver.engine.scheduler
    (stream,) = scheduler.running
    scheduler.retract(stream)
    assert budget.now_s > 0.3
    room = budget.open(4, 4, Queue([other.arrived_s for other in scheduler.waiting]))
    assert room.left_s == pytest.approx(3 * MS)


def saturated(costs: Table, ttft_target_ms: float) -> tuple[int, float]:
    """Steps, and seconds by the table, for twelve requests a row that all wait from the start."""
    driver = timed(costs, ttft_target_ms=ttft_target_ms, runner=FakeRunner(num_slots=2000), slices=12)
    wanted = [seeing(f"r{index}", index, max_tokens=40) for index in range(96)]
    driver.submit(*wanted)
    driver.finish()
    return len(driver.runner.steps), driver.engine.budget.now_s


def test_a_queue_that_never_ends_is_served_in_as_many_steps_as_without_a_target() -> None:
    for costs in (Table(), Table(token_s=0.05 * MS, slice_s=0.3 * MS), Table(slice_s=4 * MS)):
        steps, elapsed_s = saturated(costs, 300)
        least_steps, least_s = saturated(costs, 1e-6)  # everybody has waited too long
        print(steps, least_steps, elapsed_s, least_s)
        assert steps <= 1.04 * least_steps
        assert elapsed_s <= 1.04 * least_s


def test_the_same_requests_in_the_same_order_give_the_same_batches_whatever_the_clock_says() -> None:
    def batches(pause_s: float) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
        runner = FakeRunner(num_slots=80, max_rows=4)
        driver = timed(runner=runner, optimistic=True, vision_cache_tokens=12, ttft_target_ms=60)
        for index in range(12):
            media = [picture(index % 3, (3, 6))] if index % 2 else []
            driver.submit(request(f"r{index}", PROMPT[: 12 + index], media, max_tokens=12, priority=index % 2))
            driver.now_s += pause_s
            driver.step(index % 3)
        driver.finish()
        assert driver.engine.stats().num_retracted, "the pool was meant to run out"
        return runner.steps, runner.sliced

    assert batches(0.0) == batches(3.0)


# ---- one encoding, many users; and its end ----


@pytest.mark.parametrize("make", [FakeRunner, LateRunner])
def test_requests_that_wait_for_one_picture_share_its_encoding(make: Callable[[], FakeRunner]) -> None:
    driver = timed(runner=make(), slices=60)
    streaming(driver)
    wanted = [request(name, [index, *PROMPT], [picture(1, (1, 6))]) for index, name in enumerate(("a", "b"))]
    driver.submit(*wanted)
    driver.finish()
    assert sum(driver.runner.sliced) == 60
    for one in wanted:
        assert driver.told[one.request_id].ids == reference(one)[0]


@pytest.mark.parametrize("way", ["abort", "stop", "retract"])
def test_who_shares_a_picture_goes_on_with_it_when_the_other_ends(way: str) -> None:
    driver = timed(slices=200)
    streaming(driver)
    wanted = [request(name, [index, *PROMPT], [picture(1, (1, 6))]) for index, name in enumerate(("a", "b"))]
    driver.submit(*wanted)
    driver.step(4)
    owners = {sequence.request_id: sequence for sequence in driver.engine.scheduler.running}
    assert owners["a"].pictures[0].held
    assert owners["b"].pictures[0].held
    assert driver.engine.stats().encoding_bytes == 100
    if way == "abort":
        driver.engine.abort("a")
    elif way == "stop":
        driver.engine.stop("a", 0)
    else:
        driver.engine.scheduler.retract(owners["a"])
    driver.step()
    assert driver.engine.stats().encoding_bytes == 100
    driver.finish()
    assert sum(driver.runner.sliced) == 200
    assert driver.told["b"].ids == reference(wanted[1])[0]


@pytest.mark.parametrize("way", ["abort", "retract", "reset", "stop"])
def test_what_ends_the_only_user_of_a_picture_frees_what_its_encoding_keeps(way: str) -> None:
    driver = timed(slices=30)
    streaming(driver)
    driver.submit(seeing("seen"))
    driver.step(2)
    assert driver.engine.stats().encoding_bytes == 100
    engine = driver.engine
    if way == "abort":
        engine.abort("seen")
        driver.step()
    elif way == "stop":
        engine.stop("seen", 0)
        driver.step()
    elif way == "reset":
        engine.reset()
    else:
        engine.scheduler.retract(engine.scheduler.running[-1])
    assert engine.stats().encoding_bytes == 0
    engine.check()
    if way != "reset":
        driver.finish()
    assert sum(driver.runner.sliced) == (6 + 30 if way == "retract" else 6)


@pytest.mark.parametrize("fault", ["in mid-encoding", "too few tokens", "pixels are gone"])
def test_a_picture_that_breaks_in_mid_encoding_fails_all_who_wait_for_it_and_nobody_else(fault: str) -> None:
    driver = timed(slices=60)
    stream = streaming(driver)
    wanted = [request(name, [index, *PROMPT], [picture(1, (1, 6))]) for index, name in enumerate(("a", "b"))]
    if fault == "pixels are gone":

        def gone(_: Pixels) -> torch.Tensor:
            raise OSError("the arena is gone")

        for one in wanted:
            driver.engine.submit(one, gone)
    else:
        driver.submit(*wanted)
    if fault == "too few tokens":
        original = driver.runner.begin

        def shortened(pixels: torch.Tensor) -> object:
            return original(pixels[1:])

        driver.runner.begin = shortened  # type: ignore[method-assign,assignment]
    if fault == "in mid-encoding":
        driver.step(2)

        def break_once() -> None:
            driver.runner.before_encode = lambda: None
            raise RuntimeError("the encoder broke")

        driver.runner.before_encode = break_once
    driver.step(12)
    for name in ("a", "b"):
        finish = driver.told[name].finish
        assert finish is not None
        assert finish.error is not None
        assert finish.error.code == "engine_error"
    assert driver.engine.stats().encoding_bytes == 0
    assert driver.finish()["stream"].ids == reference(stream)[0]


def test_only_one_picture_is_under_way_at_a_time() -> None:
    driver = timed(slices=400)
    streaming(driver)
    driver.submit(*(seeing(f"p{index}", index) for index in range(4)))
    most = 0
    while driver.engine.has_work:
        driver.step()
        most = max(most, driver.engine.stats().encoding_bytes)
    assert most == 100
    assert sum(driver.runner.sliced) + 400 * sum(driver.runner.encoded) == 1600
    driver.finish()


def test_figures_tell_what_ran_beside_decoding() -> None:
    driver = timed(Table(slice_s=4 * MS))
    streaming(driver)
    driver.submit(seeing("seen"))
    driver.finish()
    assert driver.engine.stats().encoder_slices == 12
    assert driver.engine.stats().steps_over_target == 0, "by a clock on which steps take no time"


def test_steps_that_took_too_long_are_counted() -> None:
    driver = timed()
    streaming(driver)

    def slow() -> None:
        driver.now_s += 20 * MS

    driver.runner.before_step = slow
    driver.step(3)
    driver.runner.before_step = lambda: None
    driver.step(3)
    assert driver.engine.stats().steps_over_target == 3


def test_what_a_model_takes_to_guess_is_not_learnt_as_the_price_of_prompts() -> None:
    class Noting(Table):
        def stepped(self, load: Load, elapsed_s: float, encoding_s: float | None) -> None:
            took_s.append(elapsed_s)

    took_s: list[float] = []
    driver = timed(Noting())
    drafter = driver.draft_with(Kind.DRAFT_MODEL, 0.0, 3)
    guess = drafter.forward

    def slow(rows: Sequence[DraftRow], *, guessed: bool) -> torch.Tensor:
        driver.now_s += 7 * MS
        return guess(rows, guessed=guessed)

    drafter.forward = slow  # type: ignore[method-assign]
    streaming(driver, max_tokens=20)
    driver.finish()
    assert drafter.num_forwards
    assert took_s == pytest.approx([0.0] * len(took_s))


def test_requests_answer_the_same_with_and_without_a_target() -> None:
    def answers(costs: Table | None, slices: int) -> dict[str, list[int]]:
        driver = timed(costs, slices=slices, runner=LateRunner(num_slots=60, max_rows=4), optimistic=True)
        wanted: Sequence[EngineRequest] = [
            request(f"r{index}", PROMPT[index : index + 12], [picture(index % 5, (2, 7))], max_tokens=9)
            for index in range(14)
        ]
        for one in wanted:
            assert driver.engine.submit(one, load)
            driver.step()
        return {name: told.ids for name, told in driver.finish().items()}

    assert answers(Table(), 12) == answers(Table(slice_s=30 * MS), 1) == answers(Table(token_s=9 * MS), 5)
