"""Stories side by side in one batch, with the places at which a round of drafts can begin."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from samples.training.head.stories import Story, load, shards


@dataclass
class Batch:
    """Stories of about one length. Entry s of a story holds token s + 1 and what the target knew at token s.

    `rounds` are the real ones of (talks, rounds) in `starts`; `likely` and `chance` (talks, n + 2, TOP) are by token,
    as in `Story`; `ends` (talks, rounds) is the first token behind the round's answer, `kinds` the answer's kind.
    """

    embeds: Tensor  # (talks, n, width)
    states: Tensor  # (talks, n, fused, width)
    starts: Tensor
    rounds: Tensor
    ends: Tensor
    kinds: Tensor
    likely: Tensor
    chance: Tensor

    def targets(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """What draft `step` (0 first) of every round should foresee: whether there is such a token (talks, rounds),
        and the target's (…, TOP) likeliest tokens and their probabilities there.
        """
        place = self.starts + 2 + step
        real = self.rounds & (place < self.ends)
        place = place.clamp(max=self.likely.shape[1] - 1)[..., None].expand(-1, -1, self.likely.shape[2])
        return real, self.likely.gather(1, place), self.chance.gather(1, place)


def together(stories: list[Story], fused: Sequence[int]) -> Batch:
    """One batch of stories; what the target knew are its states before the layers `fused` run."""
    longest = max(map(len, stories))
    kept = [0, *fused]
    states = torch.zeros(len(stories), longest, len(kept), stories[0].states.shape[2], dtype=torch.bfloat16)
    likely = torch.zeros(len(stories), longest + 1, stories[0].likely.shape[1], dtype=torch.long)
    chance = torch.zeros(likely.shape)
    begun: list[list[tuple[int, int, int]]] = []
    for n, story in enumerate(stories):
        states[n, : len(story)] = story.states[:, kept]
        likely[n, : len(story)], chance[n, : len(story)] = story.likely, story.chance
        # A round begins once the target has said a token of the answer, and while another is to come.
        begun.append([(p - 1, a.end, a.kind) for a in story.answers for p in range(a.start, a.end - 1)])
    most = max(1, *map(len, begun))
    starts, ends, kinds = (torch.zeros(len(stories), most, dtype=torch.long) for _ in range(3))
    rounds = torch.zeros(len(stories), most, dtype=torch.bool)
    for n, own in enumerate(begun):
        if own:
            starts[n, : len(own)], ends[n, : len(own)], kinds[n, : len(own)] = torch.tensor(own).T
            rounds[n, : len(own)] = True
    # The last token's own state is never known before it counts; its embedding is only looked at where nothing counts.
    return Batch(states[:, 1:, 0], states[:, :-1, 1:], starts, rounds, ends, kinds, likely, chance)


def stream(folder: Path, fused: Sequence[int], seed: int, tokens: int = 3072, pool: int = 6) -> Iterator[Batch]:
    """Batches of at most `tokens` places, for ever: all files of the folder again and again, those that came meanwhile
    too, each time in another order; `pool` files are mixed at a time.
    """
    rng = random.Random(seed)
    while True:
        paths = shards(folder)
        order = rng.sample(paths, len(paths))
        for first in range(0, len(order), pool):
            stories = [story for path in order[first : first + pool] for story in load(path)]
            groups = by_length(stories, tokens)
            rng.shuffle(groups)
            for group in groups:
                yield together(group, fused)


def by_length(stories: list[Story], tokens: int) -> list[list[Story]]:
    """Groups of stories of similar length, each of at most `tokens` places once all are as long as the longest."""
    groups: list[list[Story]] = []
    for story in sorted(stories, key=len):
        if groups and (len(groups[-1]) + 1) * len(story) <= tokens:
            groups[-1].append(story)
        else:
            groups.append([story])
    return groups
