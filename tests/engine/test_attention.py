"""The torch attention backend over scattered slots equals plain attention over contiguous sequences."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import Segment
from engine.attention.torch_backend import TorchAttention

HEAD_DIM = 8
LAYERS = 2
POSITIONS = 64
SLOTS = 400


@dataclass(frozen=True)
class Sequences:
    """Random whole sequences, and a pool that holds them at scattered slots up to where a step begins."""

    key_values: list[torch.Tensor]  # each (layers, length, 2, kv_heads, dim)
    queries: list[torch.Tensor]  # each (layers, length, heads, dim)
    attention: TorchAttention


def _sequences(ends: list[int], starts: list[int], heads: int, kv_heads: int, seed: int = 0) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    pool = torch.zeros(LAYERS, SLOTS, 2, kv_heads, HEAD_DIM)
    table = torch.zeros(len(ends), POSITIONS, dtype=torch.int32)
    order = torch.randperm(SLOTS - 1, generator=generator).int() + 1
    key_values, queries = [], []
    for row, (end, start) in enumerate(zip(ends, starts, strict=True)):
        table[row, :end], order = order[:end], order[end:]
        key_values.append(torch.randn(LAYERS, end, 2, kv_heads, HEAD_DIM, generator=generator))
        queries.append(torch.randn(LAYERS, end, heads, HEAD_DIM, generator=generator))
        pool[:, table[row, :start].long()] = key_values[row][:, :start]
    return Sequences(key_values, queries, TorchAttention(pool, table))


def test_rounding_does_not_add_up_over_many_keys() -> None:
    """As far from float64 for a lone query of a head as where several share its key."""
    length = 30_000
    generator = torch.Generator().manual_seed(0)
    key_value = torch.randn(1, length, 2, 1, HEAD_DIM, generator=generator) + 1
    queries = torch.randn(1, 4, HEAD_DIM, generator=generator)
    errors = []
    for heads in (1, 4):
        pool = torch.cat([torch.zeros(1, 1, 2, 1, HEAD_DIM), key_value], dim=1)
        attention = TorchAttention(pool, torch.arange(1, length + 1, dtype=torch.int32)[None])
        plan = attention.plan([Segment(0, length - 1, 1)], torch.tensor([length - 1]))
        query = queries[:, :heads]
        got = plan.attend(0, query, key_value[0, -1:])
        expected = _plain(query.double(), key_value[0].double(), length - 1)
        errors.append(float((got - expected).abs().max()))
    assert max(errors) < 1e-6


def _plain(query: torch.Tensor, key_value: torch.Tensor, start: int) -> torch.Tensor:
    """(positions, heads, dim) and (length, 2, kv_heads, dim) → (positions, heads * dim), head by head."""
    heads, kv_heads = query.shape[1], key_value.shape[2]
    out = torch.empty_like(query)
    for index in range(len(query)):
        seen = key_value[: start + index + 1]
        for head in range(heads):
            keys, values = seen[:, 0, head * kv_heads // heads], seen[:, 1, head * kv_heads // heads]
            out[index, head] = (keys @ query[index, head] / HEAD_DIM**0.5).softmax(0) @ values
    return out.flatten(1)


def _run(sequences: Sequences, segments: list[Segment]) -> list[torch.Tensor]:
    """Attention (tokens, heads * dim) of every layer for segments in order."""
    positions = torch.cat([torch.arange(part.start, part.start + part.length) for part in segments])
    plan = sequences.attention.plan(segments, positions)
    outputs = []
    for layer in range(LAYERS):
        parts = [
            (sequences.queries[part.table_row][layer], sequences.key_values[part.table_row][layer]) for part in segments
        ]
        spans = [slice(part.start, part.start + part.length) for part in segments]
        query = torch.cat([query[span] for (query, _), span in zip(parts, spans, strict=True)])
        key_value = torch.cat([kv[span] for (_, kv), span in zip(parts, spans, strict=True)])
        outputs.append(plan.attend(layer, query, key_value))
    return outputs


def _check(segments: list[Segment], heads: int, kv_heads: int) -> None:
    by_row = sorted(segments, key=lambda part: part.table_row)
    sequences = _sequences(
        [part.start + part.length for part in by_row], [part.start for part in by_row], heads, kv_heads
    )
    for layer, got in enumerate(_run(sequences, segments)):
        expected = torch.cat(
            [
                _plain(
                    sequences.queries[part.table_row][layer, part.start :],
                    sequences.key_values[part.table_row][layer],
                    part.start,
                )
                for part in segments
            ]
        )
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([(4, 4), (6, 2), (3, 1)]))
def test_mixed_steps_equal_plain_attention(lengths: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    segments = [Segment(row, start, length) for row, (start, length) in enumerate(lengths)]
    _check(sorted(segments, key=lambda part: (part.length, -part.start)), *heads)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), min_size=1, max_size=6), st.data())
def test_trees_equal_attention_under_a_dense_mask(rows: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    """Trees, chains and chunks in one step; a tree may begin behind some tokens of its own step, and be a prompt's."""
    segments = []
    for row, (start, length, is_tree) in enumerate(rows):
        parents = None
        if is_tree:
            num_given = data.draw(st.integers(1, length))
            parents = [data.draw(st.integers(num_given - 1, index - 1)) for index in range(num_given, length)]
        segments.append(Segment(row, start, length, parents))
    sequences = _sequences([part.start + part.length for part in segments], [part.start for part in segments], 6, 2)
    segments.sort(key=lambda part: (part.length, -part.start))
    for layer, got in enumerate(_run(sequences, segments)):
        expected = []
        for part in segments:
            query = sequences.queries[part.table_row][layer, part.start :].transpose(0, 1)  # (heads, tokens, dim)
            keys, values = sequences.key_values[part.table_row][layer].permute(1, 2, 0, 3)
            mask = torch.zeros(part.length, part.start + part.length, dtype=torch.bool)
            num_given = part.length - len(part.parents or ())
            for index in range(part.length):
                mask[index, : part.start + 1] = True
                token = index
                while token:
                    mask[index, part.start + token] = True
                    is_given = part.parents is None or token < num_given
                    token = token - 1 if is_given else part.parents[token - num_given]  # type: ignore[index]
            attended = F.scaled_dot_product_attention(
                query, keys.repeat_interleave(3, 0), values.repeat_interleave(3, 0), attn_mask=mask
            )
            expected.append(attended.transpose(0, 1).flatten(1))
        torch.testing.assert_close(got, torch.cat(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("starts", [[0], [7, 7, 7], [40, 39, 21, 20, 5, 1, 0], [30, 29, 2]])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17])
def test_decode_rows_of_any_length(starts: list[int], tokens: int) -> None:
    _check([Segment(row, start, tokens) for row, start in enumerate(starts)], 6, 2)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_sequence_of_infinities_harms_nobody_else(tokens: int) -> None:
    """A shorter row's table may still name slots of another sequence beyond its end; what is there must not be read."""
    sequences = _sequences([30, 20], [30 - tokens, 20 - tokens], 4, 2)
    segments = [Segment(0, 30 - tokens, tokens), Segment(1, 20 - tokens, tokens)]
    expected = _run(sequences, segments)[0][tokens:]
    sequences.attention.slot_table[1, 20:30] = sequences.attention.slot_table[0, :10]
    sequences.attention.pool[:, sequences.attention.slot_table[0, :10].long()] = torch.nan
    poisoned, healthy = _run(sequences, segments)[0].split(tokens)
    assert poisoned.isnan().all()
    assert torch.equal(healthy, expected)


def test_a_step_writes_only_its_own_slots() -> None:
    sequences = _sequences([12, 5], [8, 4], 4, 2)
    before = sequences.attention.pool.clone()
    _run(sequences, [Segment(1, 4, 1), Segment(0, 8, 4)])
    table = sequences.attention.slot_table.long()
    written = {*table[0, 8:12].tolist(), int(table[1, 4])}
    changed = (sequences.attention.pool != before).flatten(2).any(-1).any(0)
    assert set(torch.nonzero(changed).flatten().tolist()) == written
