"""Which sizes of steps are captured as CUDA graphs: numbers of rows that decode, of tokens in chunks of prompts, and of
rows with drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

LITTLE: Final = 256
"""Steps of so many tokens are most of those beside streams; they are captured early, with `EARLY_ROWS`."""
EARLY_ROWS: Final = 48
KINDS: Final = (64, 128, 256, 1040)
"""Tokens of steps with chunks; with others kernels are launched as with one of these, or with most of all tokens."""
LEAST: Final = 16
"""Tokens of chunks that a step is captured for."""
WIDTHS: Final = (2, 4, 8, 16)
"""Tokens of a row with drafts: those of `engine.speculation.chains.LENGTHS`, and the one before them."""
MOST_CHECKED: Final = 512
"""Tokens of a captured step of rows with drafts. Their logits take most of its memory: 300 MiB at a vocabulary of
152,000.
"""


class Size(NamedTuple):
    """Of a captured step: decode rows, tokens of chunks, and whether it is for chunks whose keys are split."""

    decode: int
    prompt: int
    splits: bool = False

    @property
    def tokens(self) -> int:
        """Of the step."""
        return self.decode + self.prompt


def decode_sizes(most: int) -> list[int]:
    """Captured numbers of decode rows: close together where a step is short, at most an eighth too large beyond."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8) if size < most]
    size = 8
    while size < most:
        size += max(4, (size // 8) & ~3)
        sizes.append(min(size, most))
    return sizes if sizes and sizes[-1] == most else [*sizes, most]


def rows_beside(most: int, tokens: int) -> list[int]:
    """Numbers of decode rows among so many tokens: few where the step is long. Multiples of 16, as kernels like it."""
    if tokens <= 640:
        sizes = [16, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    elif tokens <= 1216:
        sizes = [32, 128, 384]
    else:
        sizes = [64, 256]
    return [0, *(size for size in sizes if size <= 3 * most // 4), most]


def token_sizes(most: int) -> list[int]:
    """Captured numbers of tokens of steps with chunks, rows that decode among them: products read all weights for them
    together, in tiles. These take an H200 least for each token; a layer of Qwen3-VL-8B takes 288 µs at 512 tokens and
    351 at 576, 418 at 768 and 545 at 832.
    """
    sizes = [
        64,
        96,
        128,
        144,
        160,
        176,
        208,
        256,
        304,
        384,
        432,
        512,
        592,
        640,
        688,
        768,
        816,
        848,
        944,
        1040,
        1120,
        1216,
    ]
    sizes += [*range(1536, 2049, 256), *range(2560, 4097, 512), *range(5120, 16385, 1024)]
    return [size for size in sizes if size <= most] or [most]


def prompt_sizes(most: int, tokens: int) -> list[Size]:
    """Captured steps with chunks of at most so many tokens, beside at most so many rows. Beside most rows there is one
    for as many tokens as there is without rows.
    """
    totals = token_sizes(tokens)
    sizes = {
        Size(decode, total - decode)
        for total in totals
        for decode in rows_beside(most, total)
        if total - decode >= LEAST
    }
    return sorted(sizes | {Size(0, totals[-1]), Size(most, totals[-1])})


def most_graphs(most: int, tokens: int) -> int:
    """How many steps are captured at most of so many rows and tokens of chunks, each of those with chunks for either
    way to read their keys, with those of drafts that are captured ahead; others of those come as they are needed.
    """
    return 2 * len(prompt_sizes(most, tokens)) + len(decode_sizes(most)) + len(checked_ahead(most))


def coarse(sizes: Sequence[int]) -> list[int]:
    """Of ascending sizes the largest, and others of which each is at most half of the next."""
    chosen = [sizes[-1]]
    for size in reversed(sizes):
        if 0 < 2 * size <= chosen[0]:
            chosen.insert(0, size)
    return chosen


def row_sizes(most: int) -> list[int]:
    """Captured numbers of rows with drafts: few, at most half as many again as wanted."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < most:
        sizes += [3 * sizes[-1] // 2, 2 * sizes[-1]]
    return [*(size for size in sizes if size < most), most]


def most_checked(most: int) -> int:
    """Tokens of the largest captured step with drafts, of at most so many rows."""
    return max(size * width for size in row_sizes(most) for width in WIDTHS if size * width <= MOST_CHECKED)


def checked_ahead(most: int) -> list[tuple[int, int]]:
    """Rows and widths that are captured before they come, fewest tokens first: capturing one takes 20 to 50 ms."""
    sizes = [
        (rows, width)
        for rows in row_sizes(most)
        for width in WIDTHS
        if (rows <= 8 or rows == 16) and (width < WIDTHS[-1] or rows <= 4)
    ]
    return sorted(sizes, key=lambda size: (size[0] * size[1], size))
