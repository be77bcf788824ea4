"""Trees on made-up machines: checked where a second guess pays, and never at a cost, against plain steps or chains."""

from __future__ import annotations

import random
from functools import cache

import pytest

from engine.gpu.step_sizes import WIDTHS
from engine.speculation.acceptance import Acceptance, Rates
from engine.speculation.chains import LENGTHS
from engine.speculation.controller import Controller
from engine.speculation.drafting import Kind, Proposal
from engine.speculation.lengths import Candidate
from engine.speculation.merge import Branch, DraftTree
from engine.speculation.step_times import StepTimes
from engine.speculation.tree import Drafts, path
from tests.engine.speculation.test_controller import Machine, dear, dispatch, free

TRUNK = Proposal(Kind.REPLAY, range(15))
SECOND = Proposal(Kind.REPLAY_SECOND, range(100, 115))
ELSE = 999


def replayed(rows: int, tokens: int) -> float:
    """About as an H200's graphs: a step has the next captured width, and one with drafts waits for its results."""
    width = next(width for width in (1, *WIDTHS) if width * rows >= tokens)
    return 1.6e-3 + 0.055e-3 * rows + (0.0 if width == 1 else 0.25e-3 + 0.005e-3 * rows * width)


class Run:
    """Steps of `rows` sequences. Each has two guesses that part at once: one right with some rate, and where it is
    wrong, the other with a rate of its own; those behind a right one are as good as the first.

    Args:
        machine: What steps take.
        rows: Of each step.
        trees: Whether trees may be checked.
        surcharge: How many times as long a step takes where there are trees.
        making: What it takes to make them, in plain steps, whether they are checked or not.
    """

    def __init__(
        self,
        machine: Machine,
        rows: int,
        *,
        trees: bool,
        surcharge: float = 1.0,
        making: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.machine, self.rows, self.trees, self.surcharge = machine, rows, trees, surcharge
        self.making_s = making * machine(rows, rows)
        self.made_s = 0.0
        self.random = random.Random(seed)
        self.controller = Controller(waits=machine is replayed)
        self.trunk, self.second = Acceptance(256), Acceptance(256)
        self.branched: list[bool] = []

    def steps(self, count: int, rate: float, second: float) -> float:
        """Speed over plain decoding: tokens by what plain steps would have taken for them."""
        spent = tokens_out = 0.0
        for _ in range(count):
            made = self.choose()
            gained = 0
            for drafts in made:
                said = self.say(rate, second)
                right = len(path(*drafts, said))
                gained += right
                checked = len(path(*drafts, TRUNK.token_ids))
                is_first = said[0] == 0
                self.trunk.add(right if is_first else 0, max(checked, 1)) if checked else self.trunk.add(is_first, 1)
                if not is_first:
                    checked = len(path(*drafts, SECOND.token_ids))
                    self.second.add(right if checked else int(said[0] == 100), max(checked, 1))
            tokens = self.rows + sum(len(drafts.token_ids) for drafts in made)
            has_trees = any(drafts.parents is not None for drafts in made)
            elapsed = self.machine(self.rows, tokens) * (1 + 0.1 * abs(self.random.gauss(0, 1)))
            elapsed *= self.surcharge if has_trees else 1.0
            self.controller.stepped(self.rows, tokens, gained, elapsed, has_trees=has_trees)
            self.branched.append(has_trees)
            spent += elapsed / 1.08 + self.made_s
            self.made_s = 0.0
            tokens_out += self.rows + gained
        return tokens_out * self.machine(self.rows, self.rows) / self.rows / spent

    def choose(self) -> list[Drafts]:
        """The drafts of each row."""
        rows = self.rows
        if not self.controller.may_draft(rows, is_expected=False):
            return [Drafts()] * rows
        rates = self.trunk.rates(Rates(0.5, 0.5), 3.0)
        candidates = [Candidate(15, rates)] * rows
        lengths = self.controller.choose(rows, candidates, 1000)
        if self.trees and any(lengths) and self.controller.may_branch(rows):
            self.made_s = self.making_s
            self.controller.made_trees(rows, self.making_s)
            self.controller.spent(rows, self.making_s)  # as any look is
            tree = DraftTree([Branch(TRUNK, rates), Branch(SECOND, self.second.rates(Rates(0.2, 0.5), 3.0))])
            gains = [tree.gains[:15] if length else None for length in lengths]
            widths = self.controller.branch(candidates, lengths, gains, 1000)
            if widths is not None:
                drafts = {width: tree.best(width) for width in set(widths)}
                return [drafts[width] for width in widths]
        return [Drafts(tuple(TRUNK.token_ids[:length])) for length in lengths]

    def say(self, rate: float, second: float) -> list[int]:
        """A text that leaves both guesses somewhere."""
        text = list(TRUNK.token_ids)
        if self.random.random() >= rate:
            text = list(SECOND.token_ids) if self.random.random() < second else []
        num_right = min(next(n for n in range(1, 99) if n > 15 or self.random.random() >= rate), len(text))
        return [*text[:num_right], ELSE]


@cache
def chain_speed(machine: Machine, rows: int, count: int, rate: float, second: float, seed: int) -> float:
    """Where no tree is checked, so that what trees would cost is all the same."""
    return Run(machine, rows, trees=False, seed=seed).steps(count, rate, second)


def _cost_little(runs: list[Run], rate: float, second: float, *, least: float) -> None:
    """Runs of seeds from 0 on lose no 3 % to plain steps, and are at least so fast by those with chains alone."""
    speeds = [run.steps(1200, rate, second) for run in runs]
    assert min(speeds) > 0.97
    chains = (chain_speed(run.machine, run.rows, 1200, rate, second, seed) for seed, run in enumerate(runs))
    assert sum(speeds) > least * sum(chains)


@pytest.mark.parametrize("surcharge", [1.0, 1.3, 5.0])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("machine", [free, dispatch, dear], ids=lambda machine: machine.__name__)
@pytest.mark.parametrize(("rate", "second"), [(0.1, 0.5), (0.5, 0.2), (0.6, 0.9)])
def test_they_cost_neither_plain_steps_nor_chains_three_percent(
    machine: Machine, rows: int, rate: float, second: float, surcharge: float
) -> None:
    runs = [Run(machine, rows, trees=True, surcharge=surcharge, seed=seed) for seed in range(2)]
    _cost_little(runs, rate, second, least=0.97)


@pytest.mark.parametrize("making", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("machine", [free, dispatch, replayed], ids=lambda machine: machine.__name__)
@pytest.mark.parametrize(("rate", "second"), [(0.5, 0.5), (0.6, 0.9), (0.8, 0.5)])
def test_what_making_them_takes_is_counted(
    machine: Machine, rows: int, rate: float, second: float, making: float
) -> None:
    """Steps with trees may be as short as those with chains: what makes the trees is the host, before they begin."""
    runs = [Run(machine, rows, trees=True, making=making, seed=seed) for seed in range(2)]
    _cost_little(runs, rate, second, least=0.95)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("rate", "second"), [(0.1, 0.5), (0.5, 0.2), (0.6, 0.9)])
def test_where_one_graph_checks_both_they_cost_nothing(rows: int, rate: float, second: float) -> None:
    speeds = [
        sum(Run(replayed, rows, trees=trees, seed=seed).steps(1200, rate, second) for seed in range(2))
        for trees in (False, True)
    ]
    assert speeds[1] > 0.97 * speeds[0]


@pytest.mark.parametrize(
    ("machine", "rows", "rate", "second", "least"),
    [
        (free, 1, 0.5, 0.9, 1.15),
        (free, 8, 0.5, 0.9, 1.15),
        (free, 1, 0.6, 0.5, 1.04),
        (replayed, 1, 0.5, 0.9, 1.15),
        (replayed, 8, 0.5, 0.9, 1.15),
    ],
)
def test_they_pay_where_the_second_guess_is_good(
    machine: Machine, rows: int, rate: float, second: float, least: float
) -> None:
    speeds = [
        sum(Run(machine, rows, trees=trees, seed=seed).steps(1500, rate, second) for seed in range(3))
        for trees in (False, True)
    ]
    assert speeds[1] > least * speeds[0]


@pytest.mark.parametrize(
    ("second", "surcharge", "most"), [(0.0, 1.0, 30), (0.2, 5.0, 30), (0.9, 5.0, 30)], ids=["wrong", "poor", "dear"]
)
def test_chains_are_the_rule(second: float, surcharge: float, most: int) -> None:
    run = Run(free, 4, trees=True, surcharge=surcharge)
    run.steps(200, 0.6, second)
    run.branched.clear()
    run.steps(1500, 0.6, second)
    assert sum(run.branched) < most


def test_a_second_guess_that_becomes_good_is_noticed_and_one_that_becomes_bad_too() -> None:
    run = Run(free, 4, trees=True)
    run.steps(600, 0.5, 0.0)
    assert sum(run.branched[-300:]) < 30
    run.steps(600, 0.5, 0.95)
    assert sum(run.branched[-300:]) > 250
    run.steps(600, 0.5, 0.0)
    assert sum(run.branched[-300:]) < 30


def test_chains_are_measured_again_while_trees_pay() -> None:
    run = Run(free, 1, trees=True)
    run.steps(1000, 0.5, 0.95)
    assert 0.9 < sum(run.branched[-500:]) / 500 < 0.99


def test_room_and_shapes_are_kept_to() -> None:
    controller = Controller()
    for _ in range(3):
        controller.stepped(4, 4, 0, 1e-3)
    candidates = [Candidate(3, Rates(0.5, 0.5)), None, Candidate(3, Rates(0.5, 0.5)), Candidate(15, Rates(0.5, 0.9))]
    lengths = controller.choose(4, candidates, 1000)
    gains = [[0.5, 0.49, 0.48, 0.47, 0.46], None, [0.5, 0.49, 0.48], None]
    widths = controller.branch(candidates, lengths, gains, 1000)
    assert widths is not None
    assert widths[1] == 0
    assert widths[3] == lengths[3]
    assert widths[0] <= 5
    assert set(widths) <= {0, *LENGTHS}
    assert controller.branch(candidates, lengths, gains, 0) is None


def test_trees_are_as_dear_as_they_were_seen_to_be() -> None:
    times = StepTimes()
    assert times.tree_s(4, 16) is None
    times.add_tree(4, 16, 1.0)  # before anything is known of plain steps: nobody can say how dear that is
    for _ in range(3):
        times.add(4, 4, 4e-3)
        times.add(4, 16, 8e-3)
    assert times.tree_s(4, 16) == times.step_s(4, 16) == pytest.approx(8e-3)
    times.add_tree(4, 16, 16e-3)
    times.add_tree(4, 16, 16e-3)
    assert times.tree_s(4, 16) == pytest.approx(16e-3)
    assert times.step_s(4, 16) == pytest.approx(8e-3)
    for _ in range(3000):  # long ago
        times.add(4, 16, 8e-3)
        times.add(4, 4, 4e-3)
    assert times.tree_s(4, 16) == pytest.approx(8e-3)
