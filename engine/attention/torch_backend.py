"""Attention in plain torch: the backend of CPUs, and the reference everywhere.

The pool is one tensor (layers, slots, 2, kv_heads, head_dim), keys and values of a slot side by side: a step writes
both with one `index_copy_` and gathers both with one `index_select`, each row of which is one contiguous copy.

Keys that several query heads share are never copied: in decode those heads stand as further queries of one head, in
prefill the keys are expanded as a view. Rows that verify a few drafts are decode rows with several queries each; where
drafts are trees, the bias hides from each what does not lead to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from engine.attention.backend import Segment
from engine.speculation.tree import hidden

MAX_DECODE_TOKENS: Final = 16
"""Segments of at most so many tokens are computed as decode rows, all of one length at once."""
LONG: Final = 4096
"""Keys, above which a CPU's float32 rows add up their values in parts: a matrix product of few rows (how few depends on
the processor) sums as many terms as there are keys one after the other, and rounding adds up with them.
"""
PART: Final = 1024
"""Keys whose values a matrix product adds up at once in rows of more than `LONG`."""


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of `tokens` tokens each, of similar length, as one batch: tokens [first, first + rows * tokens) of the
    step.
    """

    first: int
    rows: int
    tokens: int
    slots: torch.Tensor  # (rows * length,)
    bias: torch.Tensor | None  # (rows, 1, tokens, length): -inf beyond what a token may see
    gathered: torch.Tensor  # (rows * length, 2, kv_heads, dim): each layer's keys and values in turn
    keys: torch.Tensor  # (rows, kv_heads, length, dim), a view of `gathered`
    values: torch.Tensor  # the same for values


@dataclass(frozen=True, slots=True)
class _Prefill:
    """A chunk of one sequence: tokens [first, first + length) of the step."""

    first: int
    length: int
    slots: torch.Tensor  # (start + length,)
    bias: torch.Tensor | None  # (length, start + length); None: the chunk is the whole sequence, plain causal


class TorchPlan:
    """See `AttentionPlan`."""

    def __init__(
        self, pool: torch.Tensor, write_slots: torch.Tensor, decodes: list[_Decode], prefills: list[_Prefill]
    ) -> None:
        self._layers = pool.unbind(0)
        self.write_slots = write_slots  # (tokens,), where the step's keys and values go
        self._kv_heads = pool.shape[3]
        self._decodes = decodes
        self._prefills = prefills
        self._biases: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        pool = self._layers[layer]  # (slots, 2, kv_heads, head_dim)
        pool.index_copy_(0, self.write_slots, key_value)
        parts = [self._decode(pool, query, part) for part in self._decodes]
        parts += [self._prefill(pool, query, part) for part in self._prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, pool: torch.Tensor, query: torch.Tensor, part: _Decode) -> torch.Tensor:
        rows, tokens, dim = part.rows, part.tokens, query.shape[2]
        heads = query[part.first : part.first + rows * tokens]
        if tokens == 1:
            queries = heads.view(rows, self._kv_heads, -1, dim)  # (rows, kv_heads, group, dim)
        else:
            heads = heads.view(rows, tokens, self._kv_heads, -1, dim).transpose(1, 2)
            queries = heads.reshape(rows, self._kv_heads, -1, dim)  # (rows, kv_heads, tokens * group, dim)
        torch.index_select(pool, 0, part.slots, out=part.gathered)
        bias = self._bias(part, queries.shape[2] // tokens)
        if part.keys.shape[2] > LONG and pool.dtype == torch.float32 and pool.device.type == "cpu":
            attended = _attend_in_parts(queries, part.keys, part.values, bias)
        else:
            attended = F.scaled_dot_product_attention(queries, part.keys, part.values, attn_mask=bias)
        if tokens == 1:
            return attended.flatten(1)  # of (rows, kv_heads, group, dim)
        attended = attended.view(rows, self._kv_heads, tokens, -1, dim).transpose(1, 2)
        return attended.reshape(rows * tokens, -1)

    def _bias(self, part: _Decode, group: int) -> torch.Tensor | None:
        """The part's bias for the query heads that share a key as further queries; all layers use the same."""
        if part.bias is None or part.tokens == 1:
            return part.bias
        bias = self._biases.get(part.first)
        if bias is None:
            bias = self._biases[part.first] = part.bias.repeat_interleave(group, dim=2)
        return bias

    def _prefill(self, pool: torch.Tensor, query: torch.Tensor, part: _Prefill) -> torch.Tensor:
        heads = query[part.first : part.first + part.length]
        queries = heads.view(part.length, self._kv_heads, -1, heads.shape[2]).permute(1, 2, 0, 3)
        gathered = pool.index_select(0, part.slots)  # (length so far, 2, kv_heads, dim)
        keys, values = gathered.permute(1, 2, 0, 3).unsqueeze(2).expand(-1, -1, queries.shape[1], -1, -1)
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=part.bias, is_causal=part.bias is None
        )  # (kv_heads, group, length, dim)
        return attended.permute(2, 0, 1, 3).flatten(1)


class TorchAttention:
    """See `AttentionBackend`.

    Args:
        pool: (layers, slots, 2, kv_heads, head_dim). Slot 0 must stay finite: what is masked out reads it.
        slot_table: (rows, positions) int32.
    """

    def __init__(self, pool: torch.Tensor, slot_table: torch.Tensor) -> None:
        self.pool = pool
        self.slot_table = slot_table

    def plan(self, segments: Sequence[Segment], positions: torch.Tensor) -> TorchPlan:
        """See `AttentionBackend.plan`."""
        device = self.slot_table.device
        table_rows = torch.tensor([segment.table_row for segment in segments], device=device)
        num_decodes = next((i for i, part in enumerate(segments) if part.length > MAX_DECODE_TOKENS), len(segments))
        token_rows = table_rows
        if segments[-1].length > 1:
            token_rows = table_rows.repeat_interleave(
                torch.tensor([segment.length for segment in segments], device=device), output_size=len(positions)
            )
        write_slots = self.slot_table[token_rows, positions].long()  # (tokens,)

        decodes = []
        token = first = 0
        while first < num_decodes:
            # Padding at most doubles a group's keys: a row joins while it is at least half as long as the longest.
            tokens = segments[first].length
            longest = segments[first].start + tokens
            last = first + 1
            while (
                last < num_decodes
                and segments[last].length == tokens
                and 2 * (segments[last].start + tokens) >= longest
            ):
                last += 1
            seen = positions[token : token + (last - first) * tokens].view(-1, tokens) + 1
            even = segments[last - 1].start + tokens == longest
            trees = {row: part for row, part in enumerate(segments[first:last]) if part.parents is not None}
            decodes.append(self._plan_decode(token, table_rows[first:last], seen, longest, even, trees))
            token += (last - first) * tokens
            first = last

        prefills = []
        for segment in segments[num_decodes:]:
            prefills.append(self._plan_prefill(token, segment))
            token += segment.length
        return TorchPlan(self.pool, write_slots, decodes, prefills)

    def _plan_decode(
        self,
        first: int,
        table_rows: torch.Tensor,
        seen: torch.Tensor,
        longest: int,
        even: bool,
        trees: Mapping[int, Segment],
    ) -> _Decode:
        """`seen`: how many places each token of each row looks at, (rows, tokens), but for the trees among the rows.
        `even`: all rows are as long.
        """
        rows, tokens = seen.shape
        slots = self.slot_table[:, :longest].index_select(0, table_rows)  # (rows, longest)
        bias = None
        if not even or tokens > 1:
            beyond = torch.arange(longest, device=slots.device) >= seen.unsqueeze(2)  # (rows, tokens, longest)
            slots.masked_fill_(beyond[:, -1], 0)  # whatever stands there could be somebody's infinities
            for row, part in trees.items():
                beyond[row, :, part.start : part.start + tokens] = _hidden(part, beyond.device)
            bias = torch.zeros(beyond.shape, dtype=self.pool.dtype, device=slots.device)
            bias = bias.masked_fill_(beyond, -torch.inf).unsqueeze(1)
        gathered = self.pool.new_empty((rows * longest, *self.pool.shape[2:]))
        keys, values = gathered.view(rows, longest, *self.pool.shape[2:]).permute(2, 0, 3, 1, 4)
        return _Decode(first, rows, tokens, slots.flatten(), bias, gathered, keys, values)

    def _plan_prefill(self, first: int, segment: Segment) -> _Prefill:
        end = segment.start + segment.length
        slots = self.slot_table[segment.table_row, :end]
        if segment.start == 0 and segment.parents is None:
            return _Prefill(first, segment.length, slots, None)
        bias = torch.full((segment.length, end), -torch.inf, dtype=self.pool.dtype, device=slots.device)
        bias.triu_(segment.start + 1)
        if segment.parents is not None:
            bias[:, segment.start :].masked_fill_(_hidden(segment, slots.device), -torch.inf)
        return _Prefill(first, segment.length, slots, bias)


def _attend_in_parts(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`scaled_dot_product_attention` whose rounding does not add up over many keys: (rows, kv_heads, queries, dim).

    Row by row, since products of several rows would copy keys and values to have them side by side.
    """
    attended = torch.empty_like(queries)
    for row, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        weights = torch.matmul(query, key.transpose(1, 2)).mul_(query.shape[-1] ** -0.5)  # (kv_heads, queries, length)
        if bias is not None:
            weights += bias[row]
        parts, seen = torch.split(weights.softmax(-1), PART, 2), torch.split(value, PART, 1)
        attended[row] = sum(map(torch.matmul, parts, seen), start=torch.zeros_like(query))
    return attended


def _hidden(tree: Segment, device: torch.device) -> torch.Tensor:
    """bool (length, length): which of a tree's own tokens each must not see."""
    assert tree.parents is not None
    return torch.from_numpy(hidden(tree.parents, tree.length)).to(device)
