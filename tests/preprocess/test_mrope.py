"""Positions of three axes: as `get_rope_index` of transformers has them, and beyond what it has right."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.families.mrope import positions
from preprocess.families.qwen2_vl import token_grid
from preprocess.media import Item
from preprocess.wire import Pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

Shown = tuple[int, int, int, int]
"""Tokens of text before it, items, rows, columns."""

SHOWN = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))


def laid_out(shown: list[Shown], interval: int = 1) -> tuple[list[Item], list[list[tuple[int, int]]]]:
    """Items and where they stand in a prompt; an item of a clip is `interval` behind the one before."""
    items, spans = [], []
    end = 0
    for text, count, rows, columns in shown:
        end += text
        layout = token_grid((28 * columns, 28 * rows), 28)
        for index in range(count):
            items.append(Item(layout, b"", Pixels(layout.shape), index, index * interval))
            spans.append([(end, rows * columns)])
            end += rows * columns
    return items, spans


@settings(max_examples=150, deadline=None)
@given(st.lists(SHOWN, min_size=1, max_size=5))
def test_positions_equal_the_reference(shown: list[Shown]) -> None:
    """Where a clip has no more items than its frames have rows or columns."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    shown = [(text, min(count, max(rows, columns)), rows, columns) for text, count, rows, columns in shown]
    bare = object.__new__(Qwen2VLModel)
    bare.__dict__["config"] = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    kinds: list[int] = []
    for text, count, rows, columns in shown:
        kinds += [0] * text + [2 if count > 1 else 1] * (count * rows * columns)
    grids = [[count, 2 * rows, 2 * columns] for _, count, rows, columns in shown]
    pictures, clips = ([grid for grid in grids if (grid[0] > 1) == several] for several in (False, True))
    expected, _ = bare.get_rope_index(
        torch.zeros((1, len(kinds)), dtype=torch.long),
        torch.tensor([kinds]),
        torch.tensor(pictures) if pictures else None,
        torch.tensor(clips) if clips else None,
    )
    assert np.array_equal(positions(*laid_out(shown)), expected[:, 0].numpy())


@settings(max_examples=150, deadline=None)
@given(st.lists(SHOWN, min_size=1, max_size=5), st.integers(0, 40))
def test_what_follows_goes_on_from_the_largest(shown: list[Shown], interval: int) -> None:
    """The paper's rule, whatever a clip's times are: later tokens have larger numbers, and text leaves none out."""
    items, spans = laid_out(shown, interval)
    got = positions(items, spans)
    assert got.dtype == np.int32
    start = largest = 0
    for text, count, rows, columns in shown:
        assert got[:, start : start + text].tolist() == [list(range(largest, largest + text))] * 3
        base = largest + text
        tokens = got[:, start + text : start + text + count * rows * columns].reshape(3, count, rows, columns)
        time, row, column = np.mgrid[:count, :rows, :columns]
        assert np.array_equal(tokens, base + np.stack((time * interval, row, column)))
        start += text + count * rows * columns
        largest = int(got[:, :start].max()) + 1
    assert got.shape == (3, start)


@settings(max_examples=150, deadline=None)
@given(st.lists(SHOWN, min_size=1, max_size=4), st.integers(0, 9), st.data())
def test_runs_say_where_items_stand_and_nothing_else(shown: list[Shown], interval: int, data: st.DataObject) -> None:
    """An item of a clip may be cut into runs anywhere, as by its times in words. What stands between counts as text,
    and behind it a clip's rows and columns go on: as if positions were written token by token.
    """
    items, whole = laid_out(shown, interval)
    spans: list[list[tuple[int, int]]] = []
    shift = 0
    for ((start, length),) in whole:
        cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=3))) if length > 1 else []
        runs = []
        for first, last in itertools.pairwise([0, *cuts, length]):
            shift += data.draw(st.integers(0, 2)) if first else 0
            runs.append((start + shift + first, last - first))
        spans.append(runs)
    assert np.array_equal(positions(items, spans), by_tokens(items, spans))


def by_tokens(items: list[Item], spans: list[list[tuple[int, int]]]) -> NDArray[np.int32]:
    """The same rule one token after the other."""
    columns: list[tuple[int, int, int]] = []
    following = base = 0
    for item, runs in zip(items, spans, strict=True):
        number = 0
        for start, length in runs:
            is_apart = start > len(columns)
            while len(columns) < start:
                columns.append((following, following, following))
                following += 1
            if is_apart or not item.index:
                base = following
            for _ in range(length):
                row, column = divmod(number, item.layout.token_columns)
                columns.append((base + item.time, base + row, base + column))
                number += 1
            following = max(following, *(max(token) + 1 for token in columns[start:]))
    return np.array(columns, np.int32).reshape(-1, 3).T


def test_two_pictures_side_by_side_are_no_clip() -> None:
    layout = token_grid((56, 28), 28)
    items = [Item(layout, b"", Pixels(layout.shape)) for _ in range(2)]
    assert positions(items, [[(0, 2)], [(2, 2)]]).tolist() == [[0, 0, 2, 2], [0, 0, 2, 2], [0, 1, 2, 3]]


def test_nothing_shown_has_no_positions() -> None:
    assert positions([], []).shape == (3, 0)
