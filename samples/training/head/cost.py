"""What a draft costs beside a step of the target, on this machine: whether a head of this size can pay. Run
    python -m samples.training.head.cost HEAD
for an exported folder. Both run as they are served, in native calls where the target's steps are: one thread, one
sequence. A chain of k pays where its tokens a step (`evaluate.py`) are more than (target, k + 1 tokens, + k drafts) by
(target, 1 token), and what Python does around it (a sixth of such a step) leaves something of that.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.batch import Row, RowSampling
from engine.config import EngineConfig
from engine.load import load_runner
from engine.runner import TorchRunner
from engine.speculation.drafter import ChainDrafter, DraftRow
from preprocess.wire import SamplingParams
from samples.training.head.export import MODEL

PLACES = 160  # tokens that stand before: a picture, a question, half an answer
LENGTHS = (1, 2, 3, 5)  # of chains
GREEDY = RowSampling(SamplingParams(max_tokens=1, temperature=0.0), 0)


def median_ms(work: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Median of the processor time of a call, and the distance between its quartiles, in ms."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 10:
        began = time.thread_time()
        work()
        times.append(1000 * (time.thread_time() - began))
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, high - low


def step(runner: TorchRunner, tokens: int) -> Callable[[], Any]:
    """A step of the target that checks tokens less one, and draws."""
    row = Row(0, PLACES, [7] * tokens, GREEDY, drafted=[GREEDY] * (tokens - 1))
    return lambda: runner.step([row])


def chain(runner: TorchRunner, length: int) -> Callable[[], Any]:
    """Drafts one after the other."""
    drafter, row = runner.drafter, DraftRow(0, PLACES, [7])
    assert drafter is not None
    if isinstance(drafter, ChainDrafter):
        chained = drafter
        return lambda: chained.guess([row], [length], [GREEDY])

    def one_by_one() -> None:
        logits = drafter.forward([row], guessed=False)
        for index in range(1, length):
            token_id = int(logits.max(-1).indices)
            logits = drafter.forward([DraftRow(0, PLACES + index, [token_id])], guessed=True)

    return one_by_one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each figure")
    arguments = parser.parse_args()
    sizes: dict[str, Any] = {"threads": 1, "kv_tokens": 512, "max_context": 512, "max_running": 1}
    runner = load_runner(EngineConfig(str(arguments.model), draft_head=str(arguments.head), **sizes))
    assert isinstance(runner, TorchRunner)
    drafter = runner.drafter
    assert drafter is not None
    runner.slot_table[0] = torch.arange(1, 513)
    runner.step([Row(0, 0, [7] * PLACES, GREEDY)])
    late = DraftRow(0, 1, [7] * (PLACES - 1), asks=False)
    print(f"steps and drafts: {runner.kernel}")
    works = {f"target, {tokens} tokens": step(runner, tokens) for tokens in (1, *(length + 1 for length in LENGTHS))}
    works |= {f"head, {length} drafts": chain(runner, length) for length in LENGTHS}
    works[f"head, {PLACES - 1} tokens late"] = lambda: drafter.forward([late], guessed=False)
    one = 0.0
    for name, work in works.items():
        middle, spread = median_ms(work, arguments.seconds)
        one = one or middle
        print(f"{name:22} {middle:7.3f} ms (quartiles {spread:.3f} apart)  {middle / one:5.2f} of the step", flush=True)


if __name__ == "__main__":
    main()
