"""Answered talks as a head learns from them: token ids, the target's hidden states, and what it thought came next.

A story is one talk; a file holds many, flat. `answers.py` writes them, `train.py` and `evaluate.py` read them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TOP = 8  # tokens of the target's distribution that are kept at every place of an answer


@dataclass(frozen=True)
class Answer:
    """Tokens [start, end) of a story are an answer of a kind; its end token is among them if it came to one."""

    start: int
    end: int
    kind: int


@dataclass
class Story:
    """One talk of n tokens.

    `states` is (n, layers, width): what enters each layer of the target at every token (the first: embeddings, those of
    vision tokens included); the last token's are zero, as nothing follows it. `likely` and `chance` (n, TOP) are the
    target's likeliest tokens at each place of an answer and their probabilities, zero elsewhere.
    """

    ids: Tensor
    states: Tensor
    likely: Tensor
    chance: Tensor
    answers: list[Answer]

    def __len__(self) -> int:
        return len(self.ids)


def save(stories: list[Story], path: Path) -> None:
    """Write a file of stories."""
    from safetensors.torch import save_file

    answers = [(n, a.start, a.end, a.kind) for n, story in enumerate(stories) for a in story.answers]
    flat = {
        "lengths": torch.tensor([len(story) for story in stories], dtype=torch.int32),
        "answers": torch.tensor(answers, dtype=torch.int32).reshape(-1, 4),
        "ids": torch.cat([story.ids for story in stories]).to(torch.int16),
        "states": torch.cat([story.states for story in stories]).to(torch.bfloat16),
        "likely": torch.cat([story.likely for story in stories]).to(torch.int16),
        "chance": torch.cat([story.chance for story in stories]).to(torch.float16),
    }
    save_file(flat, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def load(path: Path) -> list[Story]:
    """Read a file of stories."""
    from safetensors.torch import load_file

    flat = load_file(path)
    lengths = flat["lengths"].tolist()
    parts = [flat[name].split(lengths) for name in ("ids", "states", "likely", "chance")]
    answers: list[list[Answer]] = [[] for _ in lengths]
    for story, start, end, kind in flat["answers"].tolist():
        answers[story].append(Answer(start, end, kind))
    return [
        Story(ids.long(), states, likely.long(), chance, own)
        for ids, states, likely, chance, own in zip(*parts, answers, strict=True)
    ]


def shards(folder: Path) -> list[Path]:
    """The files of a folder in order."""
    return sorted(folder.glob("*.safetensors"))


def tokens_of(stories: list[Story]) -> int:
    """Answer tokens of all stories."""
    return sum(answer.end - answer.start for story in stories for answer in story.answers)


def every(folder: Path) -> Iterator[Story]:
    """All stories of a folder, file by file."""
    for path in shards(folder):
        yield from load(path)
