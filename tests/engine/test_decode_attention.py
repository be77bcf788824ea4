"""Attention of decode rows by parts of their keys is plain softmax attention, whatever the lengths and the cuts, and
whatever trees of drafts their last tokens are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.speculation.tree import hidden
from tests.engine.gpu import INTERPRETED, KERNEL_DEVICE, needs_gpu, needs_triton
from tests.engine.speculation.random_trees import shapes

pytestmark = needs_triton

TYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]  # device's float32: tf32
ERRORS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Sequences:
    """Rows of these lengths in a pool whose slots are in no order, and one row of dummies behind them."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(sum(lengths))
        self.lengths = lengths
        width = max(lengths) + 5
        slots = 1 + torch.randperm(sum(lengths), generator=random).int()
        table = torch.zeros((len(lengths) + 1, width), dtype=torch.int32)
        for row, part in enumerate(slots.split(lengths)):
            table[row, : len(part)] = part
        self.table = table.to(KERNEL_DEVICE)
        pool = torch.randn((2, 1 + sum(lengths), 2, kv_heads, dim), generator=random)
        pool[:, 0] = torch.nan  # what nobody may read
        self.pool = pool.to(KERNEL_DEVICE, dtype)

    def exact(self, row: int, seen: Sequence[int], query: torch.Tensor) -> torch.Tensor:
        """Of one token that sees these positions of a row, (heads, dim), in float64."""
        cells = self.pool[1, self.table[row, list(seen)].long()].double()  # (keys, 2, kv_heads, dim)
        group = query.shape[0] // cells.shape[2]
        keys, values = cells.repeat_interleave(group, 2).unbind(1)
        scores = torch.einsum("hd,khd->hk", query.double(), keys) / query.shape[1] ** 0.5
        return torch.einsum("hk,khd->hd", scores.softmax(1), values)


def _check(
    sequences: Sequences,
    heads: int,
    dtype: torch.dtype,
    *,
    cut: NDArray[np.int32] | None = None,
    queries: int = 1,
    width: int | None = None,
    trees: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> None:
    """Twice with the same counters, as graphs replay. Rows that have fewer tokens than `width` are filled up in front,
    as padding is: at position 0 of the row of dummies. `trees`: parents of the last tokens of some rows.
    """
    from engine.gpu.decode_attention import DecodeAttention, DecodeRows, part_keys
    from engine.gpu.filled_rows import FilledSize

    lengths = sequences.lengths
    kv_heads, dim = sequences.pool.shape[3:]
    size = FilledSize(len(lengths), width or queries, queries)
    tokens = size.tokens
    attention = DecodeAttention(sequences.pool, sequences.table, heads, most_rows=size.parts, most_queries=queries)
    places, positions = np.full(tokens, len(lengths), np.int32), np.zeros(tokens, np.int32)
    shapes: list[tuple[int, Sequence[int], int]] = []
    seen: list[tuple[int, int, list[int]]] = []  # token, row, the positions that it sees
    for index, row in enumerate(reversed(range(len(lengths)))):
        count = 1 + len(trees[row]) if row in trees else min(size.width, lengths[row])
        first, start = (index + 1) * size.width - count, lengths[row] - count
        places[first : first + count], positions[first : first + count] = row, np.arange(start, lengths[row])
        if row in trees:
            shapes.append((first, trees[row], count))
        unseen = hidden(trees.get(row, range(count - 1)), count)
        seen += [
            (first + at, row, [*range(start), *(start + np.flatnonzero(~unseen[at])).tolist()]) for at in range(count)
        ]
    bits = np.zeros(tokens, np.int32)
    size.let_see(bits, shapes)
    if cut is None:
        cut = part_keys(size.lengths(positions), kv_heads)
    given = [torch.from_numpy(values).to(KERNEL_DEVICE) for values in (places, positions, cut, bits)]
    rows = DecodeRows(*given[:3], given[3] if size.width > 1 else None, queries)
    random = torch.Generator().manual_seed(7)
    # as the queries lie among keys and values
    qkv = 2 * torch.randn((tokens, heads + 2 * kv_heads, dim), generator=random).to(KERNEL_DEVICE, dtype)
    query = qkv[:, :heads]
    exact = torch.stack([sequences.exact(row, known, query[token]) for token, row, known in seen])
    own = torch.tensor([token for token, _, _ in seen])
    for _ in range(2):
        out = torch.full((tokens, heads, dim), torch.nan, dtype=dtype, device=KERNEL_DEVICE)
        attention.read(1, rows, query, out)
        error = (out[own].double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
        assert error.max() < ERRORS[dtype]
        assert not attention._finished.any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [
        (16, 8, 128),
        (16, 2, 128),
        (32, 8, 128),
        (9, 3, 64),
        (15, 5, 64),
        (4, 4, 64),
        (5, 1, 64),
        (16, 1, 64),
        (4, 2, 256),
    ],
)
def test_all_shapes_of_heads(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    _check(Sequences([1, 200, 63], kv_heads, dim, dtype), heads, dtype)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 2500])
def test_all_lengths(length: int) -> None:
    _check(Sequences([length], 2, 64, TYPES[0]), 4, TYPES[0])


@pytest.mark.parametrize("rows", [2, 3, 8, 9, 24, 64, 100])
def test_all_numbers_of_rows(rows: int) -> None:
    """Lengths of all kinds beside each other, one of them far longer."""
    lengths = [1 + (37 * row) % 90 for row in range(rows - 1)]
    _check(Sequences([*lengths, 700], 1, 64, TYPES[0]), 2, TYPES[0])


@pytest.mark.parametrize("keys", [16, 32, 48, 64, 96, 1000])
def test_no_key_is_left_out_however_rows_are_cut(keys: int) -> None:
    """Neither with parts that are no whole blocks, nor where there are fewer parts than the cuts would need."""
    _check(Sequences([1, 64, 95, 96, 97, 700], 1, 64, TYPES[0]), 3, TYPES[0], cut=np.full(6, keys, np.int32))


@pytest.mark.parametrize(("heads", "kv_heads", "queries"), [(4, 2, 2), (4, 2, 4), (3, 1, 5), (2, 1, 8), (8, 1, 4)])
def test_each_token_of_a_row_sees_those_before_it(heads: int, kv_heads: int, queries: int) -> None:
    lengths = [1, queries, 64 + queries - 1, 130, 300]
    _check(Sequences(lengths, kv_heads, 64, TYPES[0]), heads, TYPES[0], queries=queries)
    _check(Sequences(lengths, kv_heads, 64, TYPES[0]), heads, TYPES[0], queries=queries, cut=np.full(5, 32, np.int32))


@settings(max_examples=20, deadline=None)
@given(
    trees=st.lists(shapes(), min_size=1, max_size=3),
    queries=st.sampled_from([1, 2, 4, 8, 16]),
    keys=st.sampled_from([None, 16, 32, 64]),
    data=st.data(),
)
def test_each_token_of_a_tree_sees_what_leads_to_it(
    trees: list[tuple[int, ...]], queries: int, keys: int | None, data: st.DataObject
) -> None:
    """Beside chains, wherever the row begins and is cut, and where attention reads a row as several."""
    own = {row: parents for row, parents in enumerate(trees) if data.draw(st.booleans())}
    lengths = [1 + len(parents) + data.draw(st.integers(0, 90)) for parents in trees]
    cut = None if keys is None else np.full(len(trees) * 16 // queries, keys, np.int32)
    sequences = Sequences(lengths, 1, 64, TYPES[0])
    _check(sequences, 2, TYPES[0], queries=queries, width=16, trees=own, cut=cut)


def test_large_scores_are_no_danger() -> None:
    """Where one part holds all of the weight, and where scores of parts are hundreds apart."""
    sequences = Sequences([600], 1, 64, TYPES[0])
    sequences.pool[1, sequences.table[0, 333].long(), 0] *= 100
    sequences.pool[1, sequences.table[0, 5].long(), 0] *= 50
    _check(sequences, 2, TYPES[0])


def test_programs_have_about_the_same_to_do() -> None:
    from engine.gpu.decode_attention import BLOCK_KEYS, MOST_PARTS, PROGRAMS, num_parts, part_keys

    def parts(lengths: list[int], kv_heads: int) -> NDArray[np.int32]:
        wanted = np.array(lengths, np.int32)
        keys = part_keys(wanted, kv_heads)
        assert (keys % BLOCK_KEYS == 0).all()
        count = -(-wanted // keys)
        assert (count <= num_parts(len(lengths), kv_heads)).all()
        return count

    assert parts([1], 8).tolist() == [1]
    assert 100 <= 8 * parts([1000], 8)[0] <= 8 * MOST_PARTS
    assert parts([100_000], 8).tolist() == [MOST_PARTS]
    for rows, kv_heads in ((8, 8), (16, 8), (32, 8), (64, 8), (64, 2), (64, 4)):
        programs = kv_heads * parts([1000 + row for row in range(rows)], kv_heads).sum()
        assert 0.7 < programs / max(PROGRAMS, rows * kv_heads) < 1.4, (rows, kv_heads)
    assert parts([*[500] * 63, 20_000], 8).tolist() == [*[1] * 63, num_parts(64, 8)]


def test_what_parts_leave_takes_little_memory_however_many_rows_there_are() -> None:
    """Of 512 rows, or of as many tokens in rows with drafts: 32 heads, 4 of keys, are the most of common models."""
    from engine.gpu.decode_attention import DecodeAttention, most_queries

    assert most_queries(32, 4, 128) == most_queries(28, 4, 128) == 16
    assert most_queries(64, 4, 128) == 8
    pool = torch.empty((1, 1, 2, 4, 128), dtype=torch.bfloat16, device="meta")
    table = torch.empty((513, 8), dtype=torch.int32, device="meta")
    plain = DecodeAttention(pool, table, 32, most_rows=512)
    drafted = DecodeAttention(pool, table, 32, most_rows=256, most_queries=16, most_tokens=512)
    for attention in (plain, drafted):
        assert attention._part_outs.nbytes + attention._part_sums.nbytes < 64 << 20


@pytest.mark.parametrize("queries", [4, 8, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 1, 128), (8, 1, 128), (7, 1, 128), (4, 1, 256), (16, 1, 64)]
)
def test_rows_of_many_queries(heads: int, kv_heads: int, dim: int, queries: int) -> None:
    """Up to the largest tile."""
    from engine.gpu.decode_attention import most_queries

    queries = min(queries, most_queries(heads, kv_heads, dim))
    _check(Sequences([3, 70, 200], kv_heads, dim, TYPES[0]), heads, TYPES[0], queries=queries)


@needs_gpu[1]
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("rows", [1, 5, 24, 80])
def test_replays_give_the_same_bits(rows: int, queries: int) -> None:
    """Races would show as others: between parts and whoever puts them together, and between a row's newest keys and who
    reads them.
    """
    from engine.gpu.decode_attention import DecodeAttention, DecodeRows, part_keys
    from engine.gpu.filled_rows import FilledSize
    from engine.gpu.graph import Graph, GraphMemory

    heads, kv_heads, dim = 16, 8, 128
    sequences = Sequences([700 - 31 * row % 600 for row in range(rows)], kv_heads, dim, torch.bfloat16)
    lengths = np.array(sequences.lengths, np.int32)
    attention = DecodeAttention(sequences.pool, sequences.table, heads, most_rows=rows, most_queries=queries)
    places = torch.arange(rows, dtype=torch.int32).repeat_interleave(queries)
    positions = torch.from_numpy(lengths).repeat_interleave(queries) - queries + torch.arange(queries).repeat(rows)
    cut = torch.from_numpy(part_keys(lengths, kv_heads))
    seen = np.zeros(rows * queries, np.int32)
    FilledSize(rows, queries, queries).let_see(seen)
    on_device = [values.int().to(KERNEL_DEVICE) for values in (places, positions, cut, torch.from_numpy(seen))]
    asked = DecodeRows(*on_device, queries)
    query = torch.randn((rows * queries, heads, dim), device=KERNEL_DEVICE).bfloat16()
    slots = sequences.table[on_device[0].long(), on_device[1].long()].long()
    newest = sequences.pool[1, slots].clone()
    out = torch.empty_like(query)

    def chain() -> torch.Tensor:
        """Each reads what the one before has found."""
        found = query
        for _ in range(6):
            sequences.pool[1].index_copy_(0, slots, newest)
            attention.read(1, asked, found, out)
            sequences.pool[1].index_fill_(0, slots, 0)
            found = out + query
        return found

    with torch.inference_mode():
        wanted = chain()
        graph = Graph(chain, GraphMemory())
        for _ in range(200):
            out.fill_(torch.nan)
            attention._part_outs.fill_(torch.nan)
            graph.replay()
            assert torch.equal(graph.result, wanted)
    assert wanted.isfinite().all()
