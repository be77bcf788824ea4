"""One batch ahead of its results: the same answers, never more than the next batch in flight, and none where results
decide.
"""

from __future__ import annotations

import msgspec
import pytest

from engine.speculation.controller import Controller
from engine.speculation.lengths import Always
from preprocess.wire import EngineRequest
from tests.engine.driving import Driver, request
from tests.engine.fake_runner import LateRunner, reference
from tests.engine.late_results import LateFlight

TEXT = [1, 2, 3, 4, 5, 6]


class Watched(Controller):
    """A controller, and the steps that it was told of."""

    def __init__(self, *, waits: bool = True) -> None:
        super().__init__(waits=waits)
        self.steps: list[tuple[int, int, int, float]] = []

    def stepped(
        self, rows: int, tokens: int, gained: int, elapsed_s: float, drafting_s: float = 0.0, *, has_trees: bool = False
    ) -> None:
        """See `Lengths.stepped`."""
        self.steps.append((rows, tokens, gained, elapsed_s))
        super().stepped(rows, tokens, gained, elapsed_s, drafting_s, has_trees=has_trees)


def test_decode_steps_are_launched_before_the_last_ones_results_are_asked_for() -> None:
    runner = LateRunner()
    driver = Driver(runner)
    wanted = [request(f"r{index}", [*TEXT, index], max_tokens=9) for index in range(3)]
    told = driver.run(*wanted)
    assert runner.late.most_in_flight == 2
    for one in wanted:
        assert (told[one.request_id].ids, told[one.request_id].reason) == reference(one)


def test_an_answer_as_long_as_asked_for_costs_no_step_in_vain() -> None:
    runner = LateRunner()
    Driver(runner).run(request("r", TEXT, max_tokens=5))
    assert [tokens for rows in runner.steps for _, _, tokens in rows] == [6, 1, 1, 1, 1]


def test_what_a_stop_id_ends_computes_one_token_more_that_nobody_sees() -> None:
    plain = request("r", TEXT, max_tokens=20)
    ids, _ = reference(plain)
    stopped = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, stop_token_ids=[ids[7]]))
    wanted, _ = reference(stopped)
    assert len(wanted) < 20
    runner = LateRunner()
    told = Driver(runner).run(stopped)["r"]
    assert (told.ids, told.reason) == (wanted, "stop")
    assert len(runner.steps) == len(wanted) + 1


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_wait_for_every_token(penalty: str) -> None:
    runner = LateRunner()
    plain = request("r", TEXT, max_tokens=9)
    wanted = msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, **{penalty: 1.5}))
    told = Driver(runner).run(wanted)["r"]
    assert told.ids == reference(plain)[0]  # the fake runner knows no penalties
    assert runner.late.most_in_flight == 1


def test_a_first_token_that_was_waited_for_is_told_before_the_next_batch_is_made() -> None:
    runner = LateRunner()
    driver = Driver(runner)
    penalised = request("r", TEXT, max_tokens=4)
    sampling = msgspec.structs.replace(penalised.sampling, presence_penalty=1.5)
    driver.submit(msgspec.structs.replace(penalised, sampling=sampling))
    launches = []
    while not driver.told or not driver.told["r"].ids:
        launches.append(runner.late.num_launches)
        driver.step()
    assert runner.late.num_launches == launches[-1] == 1
    driver.step()
    assert runner.late.num_launches == 2
    assert driver.finish()["r"].ids == reference(penalised)[0]


def test_an_abort_ends_a_request_whose_token_is_in_flight() -> None:
    runner = LateRunner()
    driver = Driver(runner)
    wanted = request("r", TEXT, max_tokens=50), request("other", TEXT[::-1], max_tokens=9)
    driver.submit(*wanted)
    driver.step(4)
    assert runner.late.in_flight
    driver.engine.abort("r")
    driver.step()
    assert driver.told["r"].reason == "abort"
    driver.finish()
    assert driver.told["r"].ids == reference(wanted[0])[0][: len(driver.told["r"].ids)]
    assert driver.told["other"].ids == reference(wanted[1])[0]


def test_a_stop_keeps_the_tokens_before_it() -> None:
    driver = Driver(LateRunner())
    wanted = request("r", TEXT, max_tokens=50)
    driver.submit(wanted)
    driver.step(6)
    driver.engine.stop("r", 2)
    driver.finish()
    told = driver.told["r"]
    assert told.reason == "stop"
    assert told.usage.completion_tokens == 2


def test_a_reset_forgets_what_is_in_flight() -> None:
    runner = LateRunner()
    driver = Driver(runner)
    driver.submit(request("r", TEXT, max_tokens=50))
    driver.step(3)
    driver.engine.reset()
    driver.told.clear()
    wanted = request("next", TEXT, max_tokens=6)
    told = driver.run(wanted)["next"]
    assert told.ids == reference(wanted)[0]


# ---- drafts ---------------------------------------------------------------------------------------------------------


def test_a_batch_with_drafts_waits_for_its_results_and_the_others_do_not() -> None:
    """Of two requests one can be guessed; once that is done, the other's steps run ahead again."""
    runner = LateRunner(max_positions=400)
    driver = Driver(runner)
    guessed, other = request("guessed", TEXT, max_tokens=30), request("other", TEXT[::-1], max_tokens=300)
    driver.draft(1.0, 4).answers = {"guessed": reference(guessed)[0]}
    driver.submit(guessed, other)
    while "guessed" not in driver.told or driver.told["guessed"].finish is None:
        driver.step()
    assert runner.late.num_launches < 15
    assert runner.late.num_ahead <= 2  # it is looked for guesses first when the first tokens are there
    launches, ahead = runner.late.num_launches, runner.late.num_ahead
    driver.finish()
    assert runner.late.num_launches - launches > 250
    assert runner.late.num_ahead - ahead > 0.95 * (runner.late.num_launches - launches)
    for one in (guessed, other):
        assert driver.told[one.request_id].ids == reference(one, max_context=400)[0]


def test_looking_for_guesses_that_never_come_hardly_ever_waits() -> None:
    runner = LateRunner(num_slots=2000, max_positions=600)
    driver = Driver(runner, speculation="grammar")  # no request has one
    wanted = [request(f"r{index}", [*TEXT, index], max_tokens=500) for index in range(3)]
    driver.run(*wanted)
    assert runner.late.num_launches > 500
    assert runner.late.num_ahead > 0.96 * runner.late.num_launches


def test_where_the_runner_does_not_take_both_nothing_is_guessed_while_prompts_are_computed() -> None:
    """Nor is any step waited for: they run ahead as if nobody guessed."""
    runner = LateRunner(num_slots=2000, max_positions=400)
    runner.drafts_beside_prompts = False
    driver = Driver(runner, max_batched_tokens=16)
    first = request("first", TEXT, max_tokens=200)
    driver.draft(1.0, 4).answers = {"first": reference(first, max_context=400)[0]}
    driver.submit(first)
    driver.step()
    driver.submit(request("long", [*TEXT] * 40, max_tokens=2))
    begun = len(runner.steps)
    while "long" not in driver.told or not driver.told["long"].ids:
        driver.step()
    beside = [rows for rows in runner.steps[begun:] if len(rows) == 2]
    assert len(beside) >= 240 // 16
    assert all(min(tokens for _, _, tokens in rows) == 1 for rows in beside)
    assert runner.late.num_ahead >= len(beside) - 1
    assert driver.finish()["first"].usage.accepted_prediction_tokens > 100


def _in_session(name: str, prompt: list[int], max_tokens: int = 60) -> EngineRequest:
    return msgspec.structs.replace(request(name, prompt, max_tokens=max_tokens), session_id="camera")


def test_an_answer_that_repeats_the_last_one_is_guessed_from_its_first_token_on() -> None:
    """Although nobody has found guesses for long, and steps run ahead."""
    runner = LateRunner(num_slots=2000, max_positions=600)
    driver = Driver(runner, speculation="echo")
    driver.engine.speculator.controller = Always(15)
    driver.run(_in_session("first", TEXT), request("long", TEXT[::-1], max_tokens=400))
    launches = runner.late.num_launches
    told = driver.run(_in_session("second", TEXT))["second"]
    assert told.ids == reference(_in_session("first", TEXT), max_context=600)[0]
    assert runner.late.num_launches - launches <= 2 + 60 // 16
    assert told.usage.accepted_prediction_tokens > 50


def test_answers_that_never_repeat_are_hardly_ever_waited_for() -> None:
    """Short ones, of which each begins with a token that might be waited for."""
    runner = LateRunner(num_slots=2000, max_positions=600)
    driver = Driver(runner, speculation="echo")
    for number in range(200):
        driver.run(_in_session(f"r{number}", [*TEXT[:4], *divmod(number, 40)], max_tokens=9))
    decodes = runner.late.num_launches - 200
    assert decodes > 200 * 8 - 20  # few guesses were right
    assert runner.late.num_ahead > 0.97 * decodes


def test_guesses_that_pay_are_noticed_while_steps_run_ahead() -> None:
    """By a clock on which every batch takes as long. The answer becomes known in its middle."""
    runner = LateRunner(num_slots=2000, max_positions=600)
    driver = Driver(runner)
    source = driver.draft(1.0, 15)
    driver.engine.speculator.controller = Controller()
    wanted = request("r", TEXT, max_tokens=500)
    driver.submit(wanted)
    while driver.engine.stats().generated_tokens < 200:
        driver.step()
    ahead = runner.late.num_ahead
    assert ahead > 180
    source.answers = {"r": reference(wanted, max_context=600)[0]}
    told = driver.finish()["r"]
    assert told.ids == source.answers["r"]
    assert runner.late.num_launches < 200 + 64 + 300 / 8
    assert told.usage.accepted_prediction_tokens > 200


def test_a_batch_takes_from_the_results_before_it_to_its_own() -> None:
    """However long it has waited behind others; and right guesses count for the step that checked them."""
    runner = LateRunner(num_slots=2000, max_positions=400)
    driver = Driver(runner)

    def compute() -> None:
        driver.now_s += 0.002

    runner.late.before_result = compute
    wanted = request("r", TEXT, max_tokens=300)
    source = driver.draft(0.7, 15)
    controller = driver.engine.speculator.controller = Watched()
    driver.submit(wanted)
    driver.step(50)
    assert controller.steps[1:]
    assert {(rows, tokens, gained) for rows, tokens, gained, _ in controller.steps} == {(1, 1, 0)}
    assert all(elapsed_s == pytest.approx(0.003) for _, _, _, elapsed_s in controller.steps[1:])
    source.answers = {"r": reference(wanted, max_context=400)[0]}
    told = driver.finish()["r"]
    assert all(gained < tokens for _, tokens, gained, _ in controller.steps)
    assert sum(gained for _, _, gained, _ in controller.steps) == told.usage.accepted_prediction_tokens > 100


def test_what_waiting_for_results_adds_is_not_taken_for_a_plain_steps_time() -> None:
    """While drafts are checked a plain step now and then tells what that takes: one that ran ahead, as all would."""
    runner = LateRunner(num_slots=4000, max_positions=2000)
    driver = Driver(runner)

    def compute() -> None:
        driver.now_s += 0.002 if len(runner.late.in_flight) > 1 else 0.004

    runner.late.before_result = compute
    wanted = request("r", TEXT, max_tokens=1900)
    driver.draft(0.9, 3).answers = {"r": reference(wanted, max_context=2000)[0]}
    controller = driver.engine.speculator.controller = Watched()
    told = driver.run(wanted)["r"]
    assert told.usage.accepted_prediction_tokens > 400
    plain = [elapsed_s for rows, tokens, _, elapsed_s in controller.steps if tokens == rows]
    assert len(plain) > 2
    assert plain == pytest.approx([0.003] * len(plain))


def test_what_making_something_ready_takes_is_not_taken_for_a_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is captured for a step, for one."""
    runner = LateRunner(num_slots=2000, max_positions=400)
    driver = Driver(runner)
    widths: set[int] = set()

    def compute() -> None:
        width = sum(tokens for _, _, tokens in runner.steps[-1])
        driver.now_s += 0.002 if width in {1, *widths} else 0.1
        widths.add(width)

    runner.late.before_result = compute
    monkeypatch.setattr(
        LateFlight, "is_first", property(lambda flight: sum(n for _, _, n in runner.steps[-1]) not in {1, *widths})
    )
    wanted = request("r", TEXT, max_tokens=300)
    driver.draft(0.9, 15).answers = {"r": reference(wanted, max_context=400)[0]}
    controller = driver.engine.speculator.controller = Watched()
    told = driver.run(wanted)["r"]
    assert told.usage.accepted_prediction_tokens > 150
    assert len(widths) > 2
    assert max(elapsed_s for _, _, _, elapsed_s in controller.steps) < 0.01


@pytest.mark.parametrize("way", ["abort", "stop", "retract", "reset"])
def test_what_ends_a_request_while_its_drafts_are_in_flight(way: str) -> None:
    """Aborts, stops, memory pressure and resets come between steps, when nobody knows which drafts were right."""
    runner = LateRunner()
    driver = Driver(runner)
    wanted = request("r", TEXT, max_tokens=50), request("other", TEXT[::-1], max_tokens=40)
    answers = {one.request_id: reference(one)[0] for one in wanted}
    driver.draft(0.8, 6).answers = answers
    driver.submit(*wanted)
    driver.step(5)
    assert runner.late.in_flight
    assert any(tokens > 2 for _, _, tokens in runner.steps[-1])
    engine = driver.engine
    if way == "abort":
        engine.abort("r")
    elif way == "stop":
        engine.stop("r", 2)
    elif way == "retract":
        engine.scheduler.retract(engine.scheduler.running[0])
    else:
        engine.reset()
        driver.told.clear()
        driver.submit(*wanted)
    engine.check()
    told = driver.finish()
    assert told["other"].ids == answers["other"]
    assert told["r"].ids == answers["r"][: len(told["r"].ids)]
    assert told["r"].reason == {"abort": "abort", "stop": "stop"}.get(way, "length")
