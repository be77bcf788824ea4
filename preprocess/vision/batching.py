"""Items of one size go through an encoder together, as many as its memory allows; each result stands alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def encode_by_shape(
    pictures: Sequence[torch.Tensor], encode: Callable[[torch.Tensor], torch.Tensor], max_pixels: int
) -> list[torch.Tensor]:
    """The results of `encode` for each picture.

    Args:
        pictures: uint8 (frames, height, width, 3) each.
        encode: (items, frames, height, width, 3) → (items, …).
        max_pixels: Height times width of all items that go through together, unless one item has more.
    """
    results: list[torch.Tensor | None] = [None] * len(pictures)
    by_shape: dict[torch.Size, list[int]] = {}
    for index, picture in enumerate(pictures):
        by_shape.setdefault(picture.shape, []).append(index)
    for shape, indices in by_shape.items():
        together = max(max_pixels // (shape[1] * shape[2]), 1)
        for first in range(0, len(indices), together):
            batch = indices[first : first + together]
            encoded = encode(torch.stack([pictures[index] for index in batch]))
            for index, own in zip(batch, encoded, strict=True):
                # A copy, since a cache frees each picture by itself: a view would keep the whole batch.
                results[index] = own if len(batch) == 1 else own.clone()
    return [result for result in results if result is not None]
