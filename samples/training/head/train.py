"""Trains a head on answered talks: each draft of a round on the head's own states of the drafts before it.

Run  python -m samples.training.head.train STORIES OUT --minutes 30  after `answers.py`. Every round of an answer is
unrolled for `--drafts` drafts (EAGLE-3's training-time test), under the attention that serving has; the loss is cross
entropy to the target's own distribution, later drafts weighing less, as fewer of them are ever used.
OUT/head.pt holds the running average of the weights; `export.py` makes the folder of it.
"""

import argparse
import json
import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, distributed, multiprocessing

from samples.training.head.batches import Batch, stream
from samples.training.head.evaluate import lines, measure
from samples.training.head.export import target_state
from samples.training.head.model import Head, HeadShape
from samples.training.head.stories import every
from samples.training.model import SHAPE
from samples.training.optimiser import Muon

FUSED = (2, 4, 6)  # low, middle, high: hidden states before these of the target's eight layers run
FADE = 0.8  # weight of a draft's loss, against that of the draft before it
USED = 4  # of the target's likeliest tokens


def candidates(likely: Tensor, vocabulary: int, others: int) -> tuple[Tensor, Tensor]:
    """Tokens that a loss looks at, in order, and what is added to their logits.

    All that the target finds likely anywhere in `likely`, and `others` drawn from the rest, who stand for all of it:
    so the sum over the vocabulary is right on average, at a fraction of its cost.
    """
    wanted = torch.zeros(vocabulary, dtype=torch.bool)
    wanted[likely.flatten()] = True
    rest = (~wanted).nonzero().flatten()
    drawn = rest[torch.randperm(len(rest))[:others]]
    lift = torch.zeros(vocabulary)
    if len(drawn):
        wanted[drawn] = True
        lift[drawn] = math.log(len(rest) / len(drawn))
    chosen = wanted.nonzero().flatten()
    return chosen, lift[chosen]


def round_loss(head: Head, table: Tensor, batch: Batch, drafts: int, others: int) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the share of right first drafts; `table` (vocabulary, width) in bf16."""
    chosen, lift = candidates(batch.likely[..., :USED], len(table), others)
    place = torch.zeros(len(table), dtype=torch.long)
    place[chosen] = torch.arange(len(chosen))
    small = table[chosen]  # (candidates, width)
    total, weight, hits = torch.zeros(()), 0.0, torch.zeros(())
    for step, hidden in enumerate(head.drafts(batch.embeds, batch.states, batch.starts, drafts)):
        real, likely, chance = batch.targets(step)
        likely, chance = place[likely[real][:, :USED]], chance[real][:, :USED]  # (rounds, USED)
        logits = head.norm(hidden[real]).to(table.dtype) @ small.T + lift.to(table.dtype)  # (rounds, candidates)
        chance = chance / chance.sum(1, keepdim=True)
        loss = logits.float().logsumexp(1) - (chance * logits.gather(1, likely).float()).sum(1)
        total = total + FADE**step * loss.mean()
        weight += FADE**step
        if step == 0:
            hits = (logits.detach().argmax(1) == likely[:, 0]).float().mean()
    return total / weight, hits


class Trainer:
    """A head, its optimisers and its running average."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        torch.manual_seed(arguments.seed)
        self.head = Head(HeadShape.beside(SHAPE, arguments.hidden, len(arguments.fused)))
        target = target_state()
        self.head.begin(target, max(arguments.fused))
        self.table = target["model.text_model.embed_tokens.weight"].bfloat16()
        if arguments.start:
            self.head.load_state_dict(torch.load(arguments.start, weights_only=True)["average"])
        self.average = {name: tensor.clone() for name, tensor in self.head.state_dict().items()}
        self.muon = Muon([p for p in self.head.parameters() if p.ndim == 2], decay=0.02)
        self.adam = torch.optim.AdamW(
            [p for p in self.head.parameters() if p.ndim < 2], arguments.rate, (0.9, 0.98), weight_decay=0.0
        )
        self.step = 0

    def one(self, batch: Batch, share: float) -> tuple[float, float]:
        """One step at `share` of the peak rates: loss, and share of right first drafts."""
        with torch.autocast("cpu", torch.bfloat16):
            loss, hits = round_loss(self.head, self.table, batch, self.arguments.drafts, self.arguments.others)
        loss.backward()
        if self.arguments.workers > 1:
            shared(self.head, self.arguments.workers)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.adam.param_groups[0]["lr"] = self.arguments.rate * share
        self.muon.step(self.arguments.matrix_rate * share)
        self.adam.step()
        self.head.zero_grad(set_to_none=True)
        self.step += 1
        decay = min(self.arguments.average, self.step / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.head.state_dict().values()), 1 - decay)
        return float(loss.detach()), float(hits)

    def averaged(self) -> Head:
        """A head with the running average of the weights, in bf16."""
        head = Head(self.head.shape)
        head.load_state_dict(self.average)
        return head.bfloat16()

    def save(self) -> None:
        path = self.arguments.out / "head.pt"
        saved = {"average": self.average, "shape": asdict(self.head.shape), "fused": list(self.arguments.fused)}
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)


def rate_share(step: int, done: float, warm: int) -> float:
    """Share of the peak rate: a short rise, then a straight fall to nothing."""
    return min(1.0, (step + 1) / warm) * max(0.02, 1.0 - done)


def shared(head: Head, workers: int) -> None:
    """Give every worker the mean of all workers' gradients."""
    gradients = [p.grad for p in head.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    for gradient, part in zip(gradients, (flat / workers).split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def done(arguments: argparse.Namespace, step: int, began: float) -> float:
    """The share of the run that is over, by steps or by time; every worker hears the first one's clock."""
    if arguments.steps:
        return step / arguments.steps
    over = torch.tensor((time.monotonic() - began) / (60 * arguments.minutes))
    if arguments.workers > 1:
        distributed.broadcast(over, 0)
    return float(over)


def work(worker: int, arguments: argparse.Namespace) -> None:
    """Train as one of the workers, each on batches of its own; the first one logs and saves."""
    torch.set_num_threads(arguments.threads)
    if arguments.workers > 1:
        meet = f"file://{arguments.out.resolve() / 'workers'}"
        distributed.init_process_group("gloo", init_method=meet, rank=worker, world_size=arguments.workers)
    trainer = Trainer(arguments)
    began = logged = time.monotonic()
    losses: list[tuple[float, float]] = []
    for batch in stream(arguments.stories, arguments.fused, arguments.seed + worker, arguments.tokens):
        over = done(arguments, trainer.step, began)
        if over >= 1.0:
            break
        losses.append(trainer.one(batch, rate_share(trainer.step, over, arguments.warm)))
        if worker == 0 and time.monotonic() - logged > arguments.log:
            loss, hits = torch.tensor(losses).mean(0).tolist()
            entry = {"step": trainer.step, "minutes": round((time.monotonic() - began) / 60, 2),
                     "loss": round(loss, 4), "right": round(hits, 4)}  # fmt: skip
            print(json.dumps(entry), flush=True)
            losses, logged = [], time.monotonic()
            trainer.save()
    if worker == 0:
        trainer.save()
        if arguments.test:
            held_out = every(arguments.test)
            measured = measure(trainer.averaged(), trainer.table, held_out, arguments.fused)
            print("\n".join(lines(measured)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--hidden", type=int, default=512, help="inner width of the MLP")
    parser.add_argument(
        "--fused", type=int, nargs="+", default=FUSED, help="layers of the target whose inputs are fused"
    )
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps instead of by time")
    parser.add_argument("--others", type=int, default=512, help="tokens that stand for the rest of the vocabulary")
    parser.add_argument("--drafts", type=int, default=3, help="drafts that a round is unrolled for")
    parser.add_argument("--tokens", type=int, default=2048, help="places in a batch of one worker")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of AdamW (norms)")
    parser.add_argument("--matrix-rate", type=float, default=4e-3, help="peak learning rate of Muon (matrices)")
    parser.add_argument("--warm", type=int, default=12, help="steps of warm-up")
    parser.add_argument("--average", type=float, default=0.99, help="decay of the running average of the weights")
    parser.add_argument("--start", type=Path, help="go on from this head.pt")
    parser.add_argument("--test", type=Path, help="held-out stories to measure on at the end")
    parser.add_argument("--log", type=float, default=20.0, help="seconds between two lines of log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that share every step")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "workers").unlink(missing_ok=True)  # where the workers of an earlier run met
    if arguments.workers > 1:
        multiprocessing.spawn(work, (arguments,), arguments.workers)
    else:
        work(0, arguments)


if __name__ == "__main__":
    main()
