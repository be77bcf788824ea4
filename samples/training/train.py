"""Trains the bundled model for a fixed time on one device, with pictures drawn on that device.

Run `python -m samples.training.train --pack PACK --tokenizer TOKENIZER --out OUT --minutes 22 --workers 14`. It
prints loss and samples per second, saves `OUT/checkpoint.pt` every two minutes, and goes on from it with `--resume`.
"""

import argparse
import json
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samples.training.batches import Batch, Sizes, stream
from samples.training.export import write
from samples.training.model import BundledModel
from samples.training.optimiser import Optimiser
from samples.training.pack import Pack
from samples.training.render import Renderer
from samples.training.world import shape_sprites


def answer_loss(model: BundledModel, pixels: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Weighted cross entropy of the answers, every answer weighing about the root of its length."""
    text = model.model.text_model
    seen = model.see(pixels)  # (tiles, 64, width)
    ids = batch["ids"]
    rows, tokens = ids.shape
    x = text.embed_tokens(ids).flatten(0, 1)
    x = torch.cat((x, x.new_zeros(1, x.shape[-1])))  # tiles that are padding go to this last place
    x = x.index_copy(0, batch["image_place"].flatten(), seen.flatten(0, 1).to(x.dtype))[:-1].view(rows, tokens, -1)
    if pixels.is_cuda:
        x = x.to(torch.bfloat16)
    documents = batch["documents"]
    order = torch.arange(tokens, device=ids.device)
    mask = (documents[:, :, None] == documents[:, None, :]) & (order[:, None] >= order[None, :])
    hidden = text(x, batch["positions"], mask[:, None])
    logits = model.logits(hidden.flatten(0, 1)[batch["answer_place"]]).float()
    return (F.cross_entropy(logits, batch["answer_id"], reduction="none") * batch["answer_weight"]).sum()


def pixels_of(batch: Batch, renderer: Renderer, sizes: Sizes) -> Tensor:
    """All tiles of a batch in [-1, 1]: (pictures + 5 * doubles, 3, 256, 256)."""
    pixels = torch.zeros(sizes.pictures + 5 * sizes.doubles, 3, 256, 256, device=renderer.device)
    if batch.singles.count:
        pixels[: batch.singles.count] = renderer.draw(batch.singles, 256, 256)
    if batch.doubles.count:
        large = renderer.draw(batch.doubles, 512, 512)  # (n, 3, 512, 512)
        tiles = large.unfold(2, 256, 256).unfold(3, 256, 256)  # (n, 3, 2, 2, 256, 256)
        tiles = tiles.permute(0, 2, 3, 1, 4, 5).reshape(-1, 4, 3, 256, 256)
        whole = F.avg_pool2d(large, 2)[:, None]
        five = torch.cat((tiles, whole), 1).flatten(0, 1)
        pixels[sizes.pictures : sizes.pictures + len(five)] = five
    return pixels * 2 - 1


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The text side of a batch on the device; indices as int64."""
    names = ("ids", "positions", "documents", "image_place", "answer_place", "answer_id", "answer_weight")
    sent = {name: torch.from_numpy(getattr(batch, name)).to(device, non_blocking=True) for name in names}
    return {name: tensor.long() if tensor.dtype == torch.int16 else tensor for name, tensor in sent.items()}


@dataclass
class Ready:
    """A batch on the device: pixels and text, and the event after which they may be read."""

    batch: Batch
    pixels: Tensor
    text: dict[str, Tensor]
    event: torch.cuda.Event | None = None


def ready(batches: Iterator[Batch], renderer: Renderer, sizes: Sizes) -> Iterator[Ready]:
    """Batches drawn and sent ahead of their use: on CUDA by a thread with its own stream, else in line."""
    if renderer.device.type != "cuda":
        for batch in batches:
            yield Ready(batch, pixels_of(batch, renderer, sizes), to_device(batch, renderer.device))
        return
    waiting: queue.Queue[Ready | BaseException] = queue.Queue(maxsize=2)
    stream = torch.cuda.Stream()

    def draw() -> None:
        try:
            for batch in batches:
                with torch.cuda.stream(stream), torch.no_grad():
                    made = Ready(
                        batch, pixels_of(batch, renderer, sizes), to_device(batch, renderer.device), torch.cuda.Event()
                    )
                    made.event.record(stream)
                waiting.put(made)
        except BaseException as error:  # the trainer raises it
            waiting.put(error)

    threading.Thread(target=draw, daemon=True).start()
    while True:
        made = waiting.get(timeout=300)
        if isinstance(made, BaseException):
            raise made
        current = torch.cuda.current_stream()
        current.wait_event(made.event)
        for tensor in (made.pixels, *made.text.values()):
            tensor.record_stream(current)
        yield made


def rate_share(step: int, done: float, warm: int, last: float = 0.35) -> float:
    """The share of the peak rate: warm-up by steps, constant, then linear to zero over the `last` share of the time."""
    return min((step + 1) / warm, 1.0, max(0.0, (1 - done) / last))


class Trainer:
    """Owns the model, its averaged copy and the optimiser; `run` trains until the time is over."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.sizes = Sizes(arguments.rows, 768, arguments.pictures, arguments.doubles, arguments.answers)
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        self.model = BundledModel().to(self.device)
        self.average = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.optimiser = Optimiser(self.model, arguments.matrix_rate, arguments.rate)
        self.step, self.elapsed, self.samples, self.pictures = 0, 0.0, 0, 0
        self.history: list[dict[str, float]] = []
        if arguments.resume:
            self.load(arguments.out / "checkpoint.pt")
        elif arguments.start:
            self.model.load_state_dict(
                torch.load(arguments.start, map_location=self.device, weights_only=True)["average"]
            )
            self.average = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        pack = Pack.load(arguments.pack, threads=os.cpu_count() or 4)
        self.renderer = Renderer(np.concatenate((pack.sprites, shape_sprites())), self.device)
        self.compiled = bool(arguments.compile)
        if self.compiled:  # block by block: equal blocks share one compilation
            for block in self.blocks:
                block.compile(dynamic=False)

    @property
    def blocks(self) -> list[torch.nn.Module]:
        return [*self.model.model.vision_model.encoder.layers, *self.model.model.text_model.layers]

    def load(self, path: Path) -> None:
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.average = saved["average"]
        self.optimiser.load_state_dict(saved["optimiser"])
        self.step, self.elapsed, self.samples, self.pictures = saved["counters"]
        self.history = saved["history"]

    def save(self) -> None:
        path = self.arguments.out / "checkpoint.pt"
        saved = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
            "counters": (self.step, self.elapsed, self.samples, self.pictures),
            "history": self.history,
        }
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        write(self.average, self.arguments.tokenizer, self.arguments.out / "bf16.new")
        for new in (self.arguments.out / "bf16.new").iterdir():
            (self.arguments.out / "bf16").mkdir(exist_ok=True)
            new.rename(self.arguments.out / "bf16" / new.name)
        (self.arguments.out / "history.json").write_text(json.dumps(self.history))

    def gradients(self, pixels: Tensor, sent: dict[str, Tensor]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = answer_loss(self.model, pixels, sent)
        loss.backward()
        return loss

    def one(self, made: Ready) -> Tensor:
        """One step on one batch; the loss stays on the device."""
        batch, pixels, sent = made.batch, made.pixels, made.text
        try:
            loss = self.gradients(pixels, sent)
        except Exception as error:
            if not self.compiled or self.step > 8:
                raise
            print(f"compiling failed, going on without: {type(error).__name__}: {str(error)[:600]}", flush=True)
            self.compiled = False
            for block in self.blocks:
                block._compiled_call_impl = None
            self.model.zero_grad(set_to_none=True)
            loss = self.gradients(pixels, sent)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step(rate_share(self.step, self.done, self.arguments.warm))
        self.model.zero_grad(set_to_none=True)
        decay = min(0.998, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.model.state_dict().values()), 1 - decay)
        self.step += 1
        self.samples += batch.count
        self.pictures += batch.drawn
        return loss.detach()

    @property
    def done(self) -> float:
        """The share of the run that is over, by time or by steps."""
        if self.arguments.steps:
            return min(1.0, self.step / self.arguments.steps)
        return min(1.0, self.elapsed / (self.arguments.minutes * 60))

    def run(self) -> None:
        arguments = self.arguments
        batches = stream(arguments.pack, arguments.tokenizer, self.sizes, arguments.workers, arguments.seed + self.step)
        prepared = ready(batches, self.renderer, self.sizes)
        last_log = last_save = before = time.monotonic()
        losses: list[Tensor] = []
        samples, pictures, waited = self.samples, self.pictures, 0.0
        while self.done < 1.0:
            asked = time.monotonic()
            made = next(prepared)
            waited += time.monotonic() - asked
            losses.append(self.one(made))
            if len(losses) % 16 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()  # keeps the host from running far ahead of the clock
            now = time.monotonic()
            self.elapsed += now - before
            before = now
            if now - last_log > arguments.log or self.done >= 1.0:
                mean = torch.stack(losses).mean().item()
                seconds = max(time.monotonic() - last_log, 1e-6)
                entry = {
                    "step": self.step, "minutes": round(self.elapsed / 60, 3), "loss": round(mean, 4),
                    "samples_per_s": round((self.samples - samples) / seconds, 1),
                    "pictures_per_s": round((self.pictures - pictures) / seconds, 1),
                    "waiting": round(waited / seconds, 3),
                }  # fmt: skip
                self.history.append(entry)
                print(json.dumps(entry), flush=True)
                if not np.isfinite(mean):
                    raise SystemExit("the loss is not finite")
                losses, samples, pictures, waited, last_log = [], self.samples, self.pictures, 0.0, time.monotonic()
            if now - last_save > arguments.save:
                self.save()
                last_save = time.monotonic()
        self.save()
        print(
            f"done: {self.step} steps, {self.samples} samples, {self.pictures} pictures,"
            f" {self.elapsed / 60:.2f} minutes",
            flush=True,
        )
        for worker in multiprocessing.active_children():
            worker.terminate()
        os._exit(0)  # the drawing thread may still wait for a batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=22.0)
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps instead of by time")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches; 0 makes them in line")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--resume", action="store_true", help="go on from OUT/checkpoint.pt")
    parser.add_argument("--start", type=Path, help="start from the averaged weights of this checkpoint")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate of AdamW")
    parser.add_argument("--matrix-rate", type=float, default=2.5e-3, help="peak learning rate of Muon")
    parser.add_argument("--warm", type=int, default=200, help="steps of warm-up")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--pictures", type=int, default=640)
    parser.add_argument("--doubles", type=int, default=18)
    parser.add_argument("--answers", type=int, default=18_432)
    parser.add_argument("--log", type=float, default=15.0, help="seconds between two lines of log")
    parser.add_argument("--save", type=float, default=120.0, help="seconds between two checkpoints")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    Trainer(arguments).run()


if __name__ == "__main__":
    main()
