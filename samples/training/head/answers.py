"""The target answers talks greedily, with its hidden states noted down: what a head learns from.

It is run by the engine that serves it, in the types that it is served in, many talks at once. Run
    python -m samples.training.head.answers PACK OUT --minutes 20
for as many files of answered talks in OUT as fit the time; a second run with another `--seed` adds to them.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Row, VisionRows
from engine.grammar import Grammars, GrammarState, Wanted
from engine.load import FAMILIES, resolve_dtype
from engine.runner import TorchRunner
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.grammar import GrammarCompiler
from preprocess.wire import Grammar
from samples.training.batches import Maker
from samples.training.dialogue import END, ENDS, UTTERANCE, Writer, load_tokenizer, message
from samples.training.dialogue import IMAGE as IMAGE_ID
from samples.training.head.stories import TOP, Answer, Story, save, tokens_of
from samples.training.head.talks import KINDS, MIX, Asker, Talk, draw
from samples.training.model import IMAGE_TOKENS
from samples.training.pack import Pack
from samples.training.render import Renderer, plan
from samples.training.world import shape_sprites

MODEL = Path(__file__).parents[2] / "model"
MOST = 112  # tokens of an answer
LONGEST = 896  # tokens of a talk


class Tap:
    """A layer of the target that keeps what entered it last, (tokens, width)."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.entered = torch.empty(0)

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        self.entered = x
        entered: Tensor = self.layer(x, *rest)
        return entered


@dataclass
class _Going:
    """A talk while it is answered: `pending` tokens are not computed yet."""

    talk: Talk
    row: int
    vision: list[Tensor]
    ids: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    thoughts: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    turn: int = 0
    began: int = 0
    shape: GrammarState | None = None

    @property
    def computed(self) -> int:
        return len(self.ids) - len(self.pending)


class Target:
    """The model that is to be foreseen, with `rows` talks at once."""

    def __init__(self, folder: Path, rows: int = 48, dtype: str = "auto") -> None:
        device = torch.device("cpu")
        checkpoint = Checkpoint(folder, dtype=resolve_dtype(dtype, device), device=device)
        family = FAMILIES[checkpoint.config.choice("model_type", tuple(FAMILIES))]
        runner = TorchRunner(  # the one that runs layer by layer, so that each can be tapped
            family.language(checkpoint),
            family.encoder(checkpoint),
            num_slots=1 + rows * LONGEST,
            max_positions=LONGEST,
            max_rows=rows,
            dtype=checkpoint.dtype,
            device=device,
        )
        self.runner, self.rows = runner, rows
        runner.slot_table[:] = torch.arange(1, 1 + rows * LONGEST).view(rows, LONGEST)
        layers: list[Any] = runner.model.layers
        self.taps = [Tap(layer) for layer in layers]
        layers[:] = self.taps
        self.writer = Writer(load_tokenizer(folder))
        self.grammars = Grammars(str(folder), runner.vocab_size)
        self.compiler = GrammarCompiler(after_text=True)

    def answer(self, talks: list[Talk], pixels: Tensor) -> list[Story]:
        """Stories of talks; `pixels` uint8 (pictures, 256, 256, 3) are all their pictures, in order."""
        seen = [tokens for part in pixels.split(16) for tokens in self.runner.encode([tile[None] for tile in part])]
        going: list[_Going] = []
        for row, talk in enumerate(talks):
            going.append(_Going(talk, row, seen[: len(talk.pictures)]))
            del seen[: len(talk.pictures)]
        asked = [talk for talk in going if self._ask(talk)]
        while asked:
            self._advance(asked)
            asked = [talk for talk in asked if self._goes_on(talk)]
        return [self._story(talk) for talk in going if talk.answers]

    def _ask(self, going: _Going) -> bool:
        """Put the next question; False when there is none, or no room for it."""
        if going.turn == len(going.talk.turns):
            return False
        parts, question = going.talk.turns[going.turn]
        system = message("System", [going.talk.system]) if going.talk.system else ""
        start = "\n" if going.turn else "<|im_start|>" + system
        ids = list(self.writer._encode(start + message("User", parts) + "Assistant:"))
        if len(going.ids) + len(ids) + MOST > LONGEST:
            return False
        going.ids += ids
        going.pending += ids
        going.began = len(going.ids)
        going.turn += 1
        going.shape = None
        if question.schema:
            compiled = self.compiler.compile(Grammar("json_schema", question.schema, "response_format"))
            going.shape = self.grammars.begin(compiled.text)
        return True

    def _advance(self, asked: list[_Going]) -> None:
        """One step: compute what is pending of every talk, and draw its next token."""
        order = sorted(asked, key=lambda going: (len(going.pending), -going.computed))  # the runner's own order
        logits = self.runner.logits([self._row(going) for going in order])  # (talks, vocabulary)
        states = torch.stack([tap.entered for tap in self.taps], 1)  # (tokens, layers, width)
        lengths = [len(going.pending) for going in order]
        self._keep_to_shapes(order, logits)
        chance, likely = logits.log_softmax(-1).exp().topk(TOP)
        for going, part, own_chance, own_likely in zip(order, states.split(lengths), chance, likely, strict=True):
            going.parts.append(part.clone() if len(part) == 1 else part)
            going.thoughts.append((len(going.ids), own_likely, own_chance))
            token = int(own_likely[0])
            going.ids.append(token)
            going.pending = [token]
            if going.shape is not None:
                going.shape.accept(token)

    def _row(self, going: _Going) -> Row:
        vision = []
        places = [n for n, token in enumerate(going.pending) if token == IMAGE_ID][::IMAGE_TOKENS]
        for place in places:
            vision.append(VisionRows(place, 0, IMAGE_TOKENS, going.vision.pop(0)))
        return Row(going.row, going.computed, list(going.pending), _WANTED, vision)

    def _keep_to_shapes(self, order: list[_Going], logits: Tensor) -> None:
        shaped = [(n, going.shape) for n, going in enumerate(order) if going.shape is not None]
        if not shaped:
            return
        wanted = [Wanted(shape, (END, UTTERANCE), 0) for _, shape in shaped]
        for (n, _), masks in zip(shaped, self.grammars.masks(wanted), strict=True):
            bits = np.unpackbits(masks[0].words().view(np.uint8), bitorder="little")[: logits.shape[1]]
            logits[n][torch.from_numpy(bits == 0)] = -1e9

    def _goes_on(self, going: _Going) -> bool:
        """Note an answer that has ended, and ask on."""
        last = going.ids[-1]
        if last not in ENDS and len(going.ids) - going.began < MOST:
            return True
        kind = KINDS.index(going.talk.turns[going.turn - 1][1].kind)
        going.answers.append(Answer(going.began, len(going.ids), kind))
        return last == UTTERANCE and self._ask(going)

    def _story(self, going: _Going) -> Story:
        length = going.answers[-1].end
        states = torch.cat(going.parts)[: length - 1]
        states = torch.cat((states, torch.zeros_like(states[:1])))
        likely = torch.zeros(length, TOP, dtype=torch.long)
        chance = torch.zeros(length, TOP)
        for place, own_likely, own_chance in going.thoughts:
            likely[place], chance[place] = own_likely, own_chance
        return Story(torch.tensor(going.ids[:length]), states, likely, chance, going.answers)


class _Sampled:
    """Stands for a wish to sample: the runner then computes logits; drawing is done here."""


_WANTED: Any = _Sampled()


def pixels_of(renderer: Renderer, talks: list[Talk]) -> Tensor:
    """All pictures of the talks, uint8 (pictures, 256, 256, 3)."""
    pictures = [picture for talk in talks for picture in talk.pictures]
    if not pictures:
        return torch.zeros(0, 256, 256, 3, dtype=torch.uint8)
    drawn = [renderer.draw(plan(pictures[n : n + 32]), 256, 256) for n in range(0, len(pictures), 32)]
    return (torch.cat(drawn) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--files", type=int, default=100_000, help="stop after this many files, if that is sooner")
    parser.add_argument("--rows", type=int, default=48, help="talks at once, and in a file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--testing", action="store_true", help="held-out wordings only")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    pack = Pack.load(arguments.pack)
    target = Target(arguments.model, arguments.rows)
    next_talk = draw(Asker(Maker(pack, None, arguments.seed), arguments.testing), MIX)
    renderer = Renderer(np.concatenate((pack.sprites, shape_sprites())))
    torch.manual_seed(arguments.seed)
    began = time.monotonic()
    made = tokens = 0
    while made < arguments.files and time.monotonic() - began < arguments.minutes * 60:
        talks = [next_talk() for _ in range(arguments.rows)]
        stories = target.answer(talks, pixels_of(renderer, talks))
        save(stories, arguments.out / f"{arguments.seed:03d}-{made:05d}.safetensors")
        made += 1
        tokens += tokens_of(stories)
        seconds = time.monotonic() - began
        print(f"{made} files, {tokens} answer tokens, {tokens / seconds:.0f} a second", flush=True)


if __name__ == "__main__":
    main()
