"""How far a head foresees held-out answers: by kind, draft by draft, and in tokens a step of the target.

No text is generated: greedy answers are known, and a draft counts only while those before it were right, so reading the
head along the answers gives exactly what serving would accept. Run
    python -m samples.training.head.evaluate HEAD STORIES [--json FILE]
for an exported folder HEAD and a folder of answered talks (`answers.py --testing`, another seed).
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samples.training.head.batches import Batch, by_length, together
from samples.training.head.export import load, target_table
from samples.training.head.model import Head
from samples.training.head.stories import Story, every
from samples.training.head.talks import KINDS

DRAFTS = 5
LENGTHS = (1, 2, 3, 5)  # of chains


def right(head: Head, table: Tensor, batch: Batch, drafts: int = DRAFTS) -> tuple[Tensor, Tensor]:
    """Which drafts of which rounds are what the target says, and which are drafts at all: (talks, rounds, drafts)."""
    hits, reals = [], []
    steps = head.drafts(batch.embeds, batch.states, batch.starts, drafts)
    for step, hidden in enumerate(steps):
        real, likely, _ = batch.targets(step)
        drafted = (head.norm(hidden) @ table.T).argmax(-1)
        hits.append(real & (drafted == likely[..., 0]))
        reals.append(real)
    return torch.stack(hits, -1), torch.stack(reals, -1)


class Tally:
    """Counts of one kind of answers."""

    def __init__(self) -> None:
        self.answers = self.tokens = 0
        self.tried, self.held = [0] * DRAFTS, [0] * DRAFTS
        self.steps = dict.fromkeys(LENGTHS, 0)

    def add(self, hits: Tensor, reals: Tensor) -> None:
        """The rounds of one answer, (rounds, drafts), in order: round r follows token r."""
        run = hits.cumprod(1)  # 1 while all drafts so far are right
        before = torch.cat((torch.ones_like(run[:, :1]), run[:, :-1]), 1) * reals
        for draft in range(DRAFTS):
            self.tried[draft] += int(before[:, draft].sum())
            self.held[draft] += int(run[:, draft].sum())
        self.answers += 1
        self.tokens += len(hits)  # the first token of an answer comes with the prompt, whatever is drafted
        for length in LENGTHS:
            accepted, place = run[:, :length].sum(1).tolist(), 0
            while place < len(hits):
                place += 1 + accepted[place]
                self.steps[length] += 1

    def row(self) -> dict[str, Any]:
        """Acceptance of each draft, given those before it, and tokens a step by length of the chain."""
        shares = [round(h / t, 4) if t else None for h, t in zip(self.held, self.tried, strict=True)]
        steps = {str(n): round(self.tokens / max(count, 1), 3) for n, count in self.steps.items()}
        return {"answers": self.answers, "tokens": self.tokens, "acceptance": shares, "tokens_a_step": steps}


@torch.inference_mode()
def measure(
    head: Head, table: Tensor, stories: Iterable[Story], fused: Sequence[int], tokens: int = 4096
) -> dict[str, dict[str, Any]]:
    """A row for each kind of answers, and for all but shaped JSON; `table` (vocabulary, width) is the target's."""
    tallies: dict[str, Tally] = {}
    for group in by_length(list(stories), tokens):
        batch = together(group, fused)
        hits, reals = right(head, table, batch)
        for n in range(len(group)):
            own = batch.rounds[n]
            ends, kinds = batch.ends[n][own], batch.kinds[n][own]
            for end in ends.unique():
                chosen = ends == end
                kind = KINDS[int(kinds[chosen][0])]
                for name in {kind, "all" if kind != "shape" else kind}:
                    tallies.setdefault(name, Tally()).add(hits[n][own][chosen].long(), reals[n][own][chosen].long())
    return {name: tallies[name].row() for name in (*KINDS, "all") if name in tallies}


def lines(table: dict[str, dict[str, Any]]) -> list[str]:
    """The measurement as text."""
    head = f"acceptance of drafts 1 to {DRAFTS}, %".ljust(34)
    found = [f"{'':8} answers tokens  {head}     tokens a step, chain {LENGTHS}"]
    for name, row in table.items():
        shares = " ".join(f"{100 * share:6.1f}" if share is not None else "     -" for share in row["acceptance"])
        steps = " ".join(f"{value:6.2f}" for value in row["tokens_a_step"].values())
        found.append(f"{name:8} {row['answers']:7} {row['tokens']:6}  {shares}     {steps}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("stories", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    head, fused = load(arguments.head)
    measured = measure(head.bfloat16(), target_table().bfloat16(), every(arguments.stories), fused)
    print("\n".join(lines(measured)))
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
