"""What is learned of a runner's speed: medians by size, straight lines between, each part of a step by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.batch import Row, SampledToken
from engine.gpu.size_table import SizeTable
from engine.gpu.step_sizes import Size, coarse, decode_sizes, prompt_sizes, token_sizes
from engine.step_costs import Curve, Load, StepCosts
from engine.step_measure import measure
from tests.engine.fake_runner import FakeRunner, LateRunner
from tests.engine.timed_device import MS, QWEN3_VL_8B, QWEN3_VL_8B_BESIDE, VISION_TOKENS, Shape, Time, TimedRunner


def test_between_sizes_lie_straight_lines_and_beyond_them_they_go_on() -> None:
    curve = Curve(is_from_zero=True)
    assert curve.at(100) == 0
    curve.add(100, 1.0)
    assert [curve.at(size) for size in (0, 50, 100, 200)] == [0, 0.5, 1.0, 2.0]
    curve.add(200, 4.0)
    assert [curve.at(size) for size in (50, 150, 300)] == [0.5, 2.5, 7.0]
    assert curve.knows(102)
    assert not curve.knows(150)


def test_fewer_rows_than_were_measured_take_as_long() -> None:
    curve = Curve(is_from_zero=False)
    curve.add(8, 1.0)
    assert [curve.at(size) for size in (1, 8, 64)] == [1.0, 1.0, 1.0]


def test_a_slow_measurement_among_others_does_not_count_and_newer_ones_replace_older() -> None:
    curve = Curve(is_from_zero=False)
    for elapsed_s in (1.0, 1.0, 50.0, 1.0):
        curve.add(8, elapsed_s)
    assert curve.at(8) == 1.0
    for _ in range(4):
        curve.add(8, 2.0)
    assert curve.at(8) == 2.0


@pytest.mark.parametrize("times", [(50.0, 1.0), (1.0, 50.0)])
def test_of_the_first_two_measurements_one_that_is_far_off_does_not_count(times: tuple[float, float]) -> None:
    curve = Curve(is_from_zero=True)
    for elapsed_s in times:
        curve.add(8, elapsed_s)
    assert curve.at(8) == 1.0
    near = Curve(is_from_zero=True)
    for elapsed_s in (1.0, 1.4):
        near.add(8, elapsed_s)
    assert near.at(8) == 1.4
    for nothing in (0.0, -1.0):
        noisy = Curve(is_from_zero=True)
        for elapsed_s in (2.0, nothing):
            noisy.add(8, elapsed_s)
        assert noisy.at(8) == 2.0, "no work takes no time"


def test_more_work_is_never_taken_to_be_faster() -> None:
    curve = Curve(is_from_zero=True)
    for size, elapsed_s in ((10, 1.0), (20, 3.0), (40, 2.0)):
        curve.add(size, elapsed_s)
    costs = [curve.at(size) for size in range(60)]
    assert costs == sorted(costs)


def test_what_a_step_took_is_split_into_its_parts() -> None:
    costs = StepCosts()
    costs.stepped(Load(4, 4), 1.0, 0.0)
    assert costs.decode_s(4, 4) == 1.0
    costs.prompt.add(200, 0.5)
    assert costs.prompt_s(100) == pytest.approx(0.25)
    assert costs.decode_s(4, 104) == pytest.approx(1.25), "drafts are tokens, too"
    costs.stepped(Load(4, 4, 0, [(10.0, 2)]), 3.0, 2.0)
    assert costs.decode_s(4, 4) == 1.0
    costs.stepped(Load(4, 4, 100, [(10.0, 2)]), 1.65, None)
    assert costs.slice_s(10.0) == pytest.approx(0.2)
    assert costs.prompt_s(100) == pytest.approx(0.25)


@pytest.mark.parametrize(("decode_s", "token_s", "slice_s"), [(1.3, 0.005, 0.2), (1.0, 0.006, 0.25), (0.9, 0.004, 0.2)])
def test_parts_that_never_come_alone_are_told_apart_by_their_mixtures(
    decode_s: float, token_s: float, slice_s: float
) -> None:
    """As where pictures come all the time while texts grow, or clocks fall."""
    costs = StepCosts()
    costs.decode.add(4, 1.0)
    costs.prompt.add(100, 0.5)
    costs.slice.add(10.0, 0.2)
    for step in range(600):
        tokens, count = ((100, 0), (0, 3), (40, 0), (60, 1), (0, 2))[step % 5]
        load = Load(4, 4, tokens, [(10.0, count)] if count else [])
        costs.stepped(load, decode_s + token_s * tokens + slice_s * count, None)
    assert costs.decode_s(4, 4) == pytest.approx(decode_s, rel=0.03)
    assert costs.prompt_s(100) == pytest.approx(100 * token_s, rel=0.1)
    assert costs.slice_s(10.0) == pytest.approx(slice_s, rel=0.1)


def test_steps_take_what_is_expected_of_them_after_some_of_their_kind_did() -> None:
    costs = StepCosts()
    costs.decode.add(4, 1.0)
    costs.prompt.add(100, 0.5)
    for _ in range(40):
        costs.stepped(Load(4, 4, 100), 2.0, 0.0)
    assert costs.decode_s(4, 4) + costs.prompt_s(100) == pytest.approx(2.0, rel=0.01)
    for _ in range(40):
        costs.stepped(Load(4, 4), 1.0, 0.0)
    assert costs.decode_s(4, 4) == pytest.approx(1.0, rel=0.01), "what comes alone is known"


@pytest.mark.parametrize("step_s", [1.0, 1.25])
def test_what_mixtures_blamed_on_decoding_is_gone_once_it_is_seen_alone(step_s: float) -> None:
    """From what is known of other rows too."""
    costs = StepCosts()
    costs.decode.add(4, 1.0)
    costs.decode.add(16, 2.0)
    costs.prompt.add(100, 0.5)
    for _ in range(40):
        costs.stepped(Load(4, 4, 100), step_s + 1.0, 0.0)
    assert costs.decode_s(4, 4) > 1.05
    for _ in range(4):
        costs.stepped(Load(4, 4), step_s, 0.0)
    assert costs.decode_s(4, 4) == pytest.approx(step_s, rel=0.03)
    for _ in range(60):
        costs.stepped(Load(4, 4), step_s, 0.0)
    assert costs.decode_s(4, 4) == pytest.approx(step_s)
    assert costs.decode_s(16, 16) == pytest.approx(2.0, rel=1e-3)


def test_texts_that_grew_are_known_for_all_rows_while_no_step_decodes_alone() -> None:
    costs = StepCosts()
    costs.decode.add(4, 1.0)
    costs.decode.add(16, 2.0)
    costs.prompt.add(100, 0.5)
    for step in range(100):
        costs.stepped(Load(4, 4, 100 - step % 2 * 60), 1.3 + 0.5 - step % 2 * 0.3, 0.0)
    costs.stepped(Load(4, 4), 1.3, 0.0)
    assert costs.decode_s(16, 16) == pytest.approx(2.6, rel=0.06)


@pytest.mark.parametrize(("tokens", "odd_s"), [(100, 9.0), (100, 0.2), (1, 9.0), (0, 9.0)])
def test_one_odd_step_changes_next_to_nothing(tokens: int, odd_s: float) -> None:
    costs = StepCosts()
    costs.decode.add(4, 1.0)
    costs.prompt.add(100, 0.5)
    for _ in range(20):
        costs.stepped(Load(4, 4), 1.0, 0.0)
        costs.stepped(Load(4, 4, 100), 1.5, 0.0)
    costs.stepped(Load(4, 4, tokens), odd_s, 0.0)
    assert costs.decode_s(4, 4) == pytest.approx(1.0, rel=0.03)
    assert costs.prompt_s(100) == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("first_s", [0.0, 0.01, 5.0])
def test_slices_that_were_measured_wrong_at_first_are_right_soon_and_nothing_else_is_blamed(first_s: float) -> None:
    """Libraries make something ready for the first picture of a size; noise may leave nothing of a difference."""
    costs = StepCosts()
    costs.decode.add(4, 1.0)
    costs.slice.add(10.0, first_s)
    for _ in range(4):
        costs.stepped(Load(4, 4, 0, [(10.0, 2)]), 1.4, None)
    assert costs.slice_s(10.0) == pytest.approx(0.2)
    assert costs.decode_s(4, 4) == pytest.approx(1.0)


def test_an_odd_step_now_and_then_does_not_make_slices_dear() -> None:
    costs = StepCosts()
    costs.decode.add(4, 1.0)
    costs.slice.add(10.0, 0.2)
    for step in range(100):
        costs.stepped(Load(4, 4, 0, [(10.0, 2)]), 3.0 if step % 5 == 0 else 1.4, None)
    assert costs.slice_s(10.0) == pytest.approx(0.2)


@pytest.mark.parametrize("load", [Load(0, 0, 100), Load(4, 9), Load(4, 4, 9, [(1.0, 1), (2.0, 1)])])
def test_steps_that_tell_nothing_of_one_part_teach_nothing(load: Load) -> None:
    costs = StepCosts()
    costs.stepped(load, 1.0, None if load.slices else 0.0)
    assert (costs.decode_s(4, 4), costs.prompt_s(9), costs.slice_s(1.0)) == (0, 0, 0)


@pytest.mark.parametrize("make", [FakeRunner, LateRunner])
@pytest.mark.parametrize("slices", [1, 5])
def test_a_runner_is_measured_at_start(make: type[FakeRunner], slices: int) -> None:
    """By a clock on which each call takes a second and each token one more."""
    now = [0.0]
    runner = timed_runner(make, now)
    runner.slices_of_picture = slices
    costs = measure(runner, 64, clock=lambda: now[0], limit_s=1e9)
    assert [costs.decode_s(rows, rows) for rows in (1, 2, 4, 7, 8)] == [2, 3, 5, 8, 9]
    assert costs.prompt_s(64) == 64
    assert costs.slice_s(1 / slices) > 0


def test_what_chunks_read_is_measured_at_start_and_learnt() -> None:
    time = Time()
    runner = TimedRunner(replace(QWEN3_VL_8B, pair_s=1e-5), time)
    costs = measure(runner, 4096, clock=lambda: time.now_s)
    assert not runner.slot_table.any(), "as it was found"
    assert costs.reading_s(1000) == pytest.approx(0.01)
    for step in range(40):  # it takes twice as long by now
        pairs = (0, 100, 400)[step % 3]
        costs.stepped(Load(4, 4, 64, [], pairs), costs.decode.at(4) + costs.prompt_s(64, 4) + 2e-5 * pairs, None)
    assert costs.reading_s(1000) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("limit_s", [0.0, 1e9])
def test_what_noise_or_haste_hid_at_start_is_learnt_by_and_by(limit_s: float) -> None:
    """Where it could not be measured, or seemed to take nothing, next to nothing is taken for it at first."""
    time = Time()
    costs = measure(TimedRunner(QWEN3_VL_8B, time), 4096, clock=lambda: time.now_s, limit_s=limit_s)
    assert 0 < costs.reading_s(1000) < 0.2 * costs.prompt.at(256) / 256
    for step in range(1500):
        pairs = (0, 200_000, 1_000_000)[step % 3]
        costs.stepped(Load(4, 4, 64, [], pairs), costs.decode.at(4) + costs.prompt.at(64) + 2e-9 * pairs, None)
    assert 0.6 * 2e-9 < costs.reading_s(1) < 1.05 * 2e-9


def test_where_steps_are_filled_up_prompts_cost_what_sizes_add_and_keys_beyond_that() -> None:
    costs = StepCosts(lambda rows, tokens: -(-(rows + tokens) // 64) * 0.5 - 0.5)
    assert [costs.prompt_s(tokens, 4) for tokens in (0, 1, 60, 61, 124)] == [0, 0, 0, 0.5, 0.5]
    costs.prompt.add(16, 0.25)
    costs.decode.add(4, 1.0)
    assert costs.decode_s(4, 20) == 1.25, "drafts are no chunks"
    for beyond_s in (0.5, 0.25, 0.75):
        costs.add_prompt(4, 61, 0.5 + beyond_s)
    assert [costs.prompt_s(tokens, 4) for tokens in (0, 1, 60, 61, 125)] == [0, 0.5, 0.5, 1.0, 1.5]
    assert costs.decode_s(4, 20) == 1.25
    other = copy.deepcopy(costs)
    costs.stepped(Load(4, 4, 65), 3.0, 0.0)
    other.stepped(Load(4, 4, 124), 3.0, 0.0)
    assert costs.prompt_s(64, 4) == other.prompt_s(64, 4) > 1.0, "longer than at start, by its full size"
    noisy = StepCosts(lambda rows, tokens: 0.5)
    noisy.add_prompt(4, 61, 0.25)
    assert noisy.prompt_s(61, 4) == 0.5, "no keys take less than none"


def test_the_quickest_captured_size_serves() -> None:
    """Whatever its size; among those as quick the smallest."""
    table = SizeTable(lambda size, splits: size.splits or not splits)
    seconds = {(8, 0): 1.0, (64, 0): 1.5, (0, 64): 1.0, (8, 56): 1.2, (64, 64): 2.0, (64, 128): 4.0, (64, 192): 3.0}
    for (decode, prompt), elapsed_s in seconds.items():
        table.add(Size(decode, prompt), elapsed_s)
    table.add(Size(8, 100, splits=True), 9.0)
    chosen = {(8, 0): (8, 0), (9, 0): (64, 0), (0, 9): (0, 64), (8, 56): (8, 56), (8, 57): (64, 64), (9, 65): (64, 192)}
    for (decode, prompt), expected in chosen.items():
        assert table.choose(Size(decode, prompt)) == Size(*expected)
    assert table.choose(Size(8, 100, splits=True)) == Size(8, 100, splits=True)
    for nobody in (Size(65, 0), Size(65, 1), Size(0, 193), Size(8, 101, splits=True)):
        with pytest.raises(LookupError, match="is captured"):
            table.choose(nobody)
    added = [table.added_s(8, tokens) for tokens in (0, 1, 56, 57, 65, 192, 384)]
    assert added == pytest.approx([0, 0.2, 0.2, 1.0, 2.0, 2.0, 4.0])
    assert table.added_s(0, 64) == 1.0, "alone"
    table.add(Size(64, 128), 2.5)
    assert table.choose(Size(9, 65)) == Size(64, 128), "captured anew, it is quicker"


def test_sizes_that_are_not_captured_have_no_price() -> None:
    table = SizeTable(lambda size, splits: True)
    with pytest.raises(LookupError, match="are captured"):
        table.added_s(1, 1)
    table.add(Size(8, 0), 1.0)
    assert table.added_s(8, 0) == 0
    for rows in (0, 8):
        with pytest.raises(LookupError, match="are captured"):
            table.added_s(rows, 1)
    table.add(Size(16, 64), 2.0)
    assert table.added_s(8, 1) == 1.0
    assert table.added_s(0, 1) == 2.0
    for rows in (9, 17):
        with pytest.raises(LookupError, match=f"{rows} rows"):
            table.added_s(rows, 1)


@pytest.mark.parametrize("shape", [QWEN3_VL_8B, QWEN3_VL_8B_BESIDE])
def test_steps_become_no_dearer_as_more_sizes_are_captured(shape: Shape) -> None:
    """In the order in which they are."""
    sizes = [*prompt_sizes(64, 4096), *(Size(rows, 0) for rows in decode_sizes(64))]
    sizes.sort(key=lambda size: (size.tokens, size), reverse=True)
    alone, totals = coarse(decode_sizes(64)), coarse(token_sizes(4096))
    first = [size for size in sizes if size.decode in ((0, 64) if size.prompt else alone)]
    first = [size for size in first if not size.prompt or size.tokens in totals or size.prompt == 4096]
    table = SizeTable(lambda size, splits: True)
    asked = [(rows, tokens) for rows in (1, 5, 33, 64) for tokens in (1, 40, 100, 300, 700, 1500, 4000)]
    before: list[float] = []
    for count, size in enumerate([*first, *(size for size in sizes if size not in first)], 1):
        table.add(size, shape.step_s([0], size.prompt, size.decode))
        if count >= len(first):
            now = [alone_s(table, rows, shape) + table.added_s(rows, tokens) for rows, tokens in asked]
            assert all(new <= old + 1e-12 for new, old in zip(now, before or now, strict=True))
            before = now
    assert len(first) < 40 < len(sizes)


def alone_s(table: SizeTable, rows: int, shape: Shape) -> float:
    """Of a step of these rows."""
    return shape.step_s([0], 0, table.choose(Size(rows, 0)).decode)


def test_steps_beside_rows_hold_as_many_tokens_of_prompts_as_those_without() -> None:
    for most, tokens in ((1, 4096), (13, 300), (64, 4096), (64, 20), (512, 4096)):
        sizes = prompt_sizes(most, tokens)
        top = max(size.prompt for size in sizes)
        assert top == token_sizes(tokens)[-1] <= max(tokens, 16)
        assert {Size(0, top), Size(most, top)} <= set(sizes)
        assert all(size.decode <= most and size.prompt > 0 for size in sizes)


def test_where_steps_overlap_one_lasts_from_a_result_to_the_next() -> None:
    """On a device on which a step takes 4 ms, and a host that needs one of them."""
    time = Time()
    runner = TimedRunner(Shape(4 * MS, 0, 0, 0, 0, 6 * MS, 3), time)
    costs = measure(runner, 4096, clock=lambda: time.now_s)
    assert costs.decode_s(8, 8) == pytest.approx(4 * MS)
    assert costs.slice_s(VISION_TOKENS / 3) == pytest.approx(2 * MS, rel=0.3)
    assert time.now_s < 0.4


def test_rows_that_are_filled_up_beside_prompts_are_part_of_what_these_take() -> None:
    """33 rows as 48: no step with a prompt is longer than is known."""
    time = Time()
    runner = TimedRunner(QWEN3_VL_8B, time)
    costs = measure(runner, 4096, clock=lambda: time.now_s)
    for tokens in (32, 64, 112, 128, 192, 256, 384, 512):
        size = runner.sizes.choose(Size(33, tokens))
        assert size.decode >= 48
        assert costs.decode_s(33, 33) + costs.prompt_s(tokens, 33) == pytest.approx(
            QWEN3_VL_8B.step_s([65] * 33, size.prompt, size.decode), rel=0.02
        )


def test_a_slow_runner_is_measured_no_longer_than_allowed() -> None:
    now = [0.0]
    runner = timed_runner(FakeRunner, now)
    costs = measure(runner, 64, clock=lambda: now[0], limit_s=1.0)
    assert now[0] == 2 + 1 + 1 + 8 + 24, "one row, a picture twice, seven of eight rows, sixteen tokens beside them"
    assert costs.decode_s(1, 1) == 2
    assert costs.decode_s(7, 7) == 8
    assert costs.prompt_s(16) == 16


def test_what_is_measured_are_tokens_that_differ() -> None:
    """Else all would choose the same experts of a model that has some."""
    now = [0.0]
    runner = timed_runner(FakeRunner, now)
    ids: list[list[int]] = []
    step = runner._step

    def noting(rows: Sequence[Row]) -> list[SampledToken]:
        ids.append([token for row in rows for token in row.token_ids])
        return step(rows)

    runner._step = noting  # type: ignore[method-assign]
    measure(runner, 64, clock=lambda: now[0], limit_s=1e9)
    assert max(map(len, ids)) > runner.vocab_size
    assert all(own == [token % runner.vocab_size for token in range(len(own))] for own in ids)


def timed_runner(make: type[FakeRunner], now: list[float]) -> FakeRunner:
    """A fake runner whose rows point at the dummy slot, as those of a fresh table do, and whose work takes time."""

    class Slow(make):  # type: ignore[misc,valid-type]
        def _step(self, rows: object) -> list[object]:
            now[0] += 1 + sum(len(row.token_ids) for row in rows)  # type: ignore[attr-defined]
            return [SampledToken(0) for row in rows if row.sampling is not None]  # type: ignore[attr-defined]

    runner: FakeRunner = Slow()

    def encode() -> None:
        now[0] += 1

    runner.before_encode = encode
    return runner
