"""Guesses of a model that guesses, as CUDA graphs: all of a step's sequences together, one guess after the other.

    first    what each text has more since (at most `WIDTHS[-1]` tokens, filled up in front) ─▶ logits
    draw     logits ─▶ a guess of each row
    next     the guess, as the next token ─▶ logits

    guess(3)  =  first, draw, next, draw, next, draw          and then the host reads what was drawn

A row that has as many guesses as it wants goes on at the dummies. Draws are the target's own, from its noise, so that
two models agree as often as they can; filters look at the likeliest `CANDIDATES` ids alone, and where they leave more a
guess is drawn without them: that is what they would leave with the probability of all that they leave. What a grammar
forbids the first guess is left out between `first` and `draw`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from engine.attention.flashinfer_backend import StepPlan
from engine.batch import RowSampling
from engine.gpu.decode_attention import DecodePart, DecodeRows, drafts_attention
from engine.gpu.graph import Graph, GraphMemory
from engine.gpu.guess_layout import MOST_GUESSES, GuessLayout, Texts
from engine.gpu.ops import GuessInputs, decode_inputs, guess_inputs
from engine.gpu.sampling import draw, temperature_of
from engine.gpu.skinny import of_each_kind
from engine.gpu.staging import Staging
from engine.gpu.step_sizes import WIDTHS, coarse, row_sizes
from engine.sampling import CANDIDATES, COLDEST, draw_among, finite, forbid, is_filtered
from engine.speculation.drafter import DraftRow

MOST_ROWS: Final = 64
"""Sequences of a call; more of them are several calls."""
MOST_TOKENS: Final = 512
"""Of a call's first graph."""

logger = logging.getLogger("beholder.engine")


@dataclass(frozen=True, slots=True)
class GuessStep:
    """Tokens of one graph, on the device.

    Attributes:
        token_ids: int64 (tokens,).
        rotary: int32 (tokens,), or (3, tokens).
        plan: Attention over the model's own entries.
        before: int32 (tokens,): slots of the tokens before these, for a model that lags; None: all are guesses, each
            of the row that it is in.
        ends: int64 (rows,): the last token of each row; None: every token is one.
    """

    token_ids: torch.Tensor
    rotary: torch.Tensor
    plan: StepPlan
    before: torch.Tensor | None
    ends: torch.Tensor | None


class Guesser(Protocol):
    """A model that guesses, run through the GPU's kernels.

    Attributes:
        num_heads: Query heads of its attention.
        known_ids: Ids at or above are taken for id 0: they are padding, and never said.
        targets: int64 (its ids,): the target's ids that its logits are of; None: the first ones.
        has_axes: Whether it rotates by three positions.
    """

    num_heads: int
    known_ids: int
    targets: torch.Tensor | None
    has_axes: bool

    def logits(self, step: GuessStep) -> torch.Tensor:
        """float32 (rows, its ids): what follows each row."""
        ...

    def thin(self) -> Guesser:
        """One that launches the same kernels, with as few layers as do."""
        ...


class GuessGraphs:
    """Captured at start, replayed for each call.

    Args:
        guesser: The model.
        pool: (layers, slots, 2, kv_heads, head_dim): its entries.
        table: int32 (rows + 1, positions): the slot table and one row more, of dummies.
        vocab_size: The target's.
        lag: See `engine.speculation.drafter.Drafter`.
        memory: That of the target's graphs.

    Attributes:
        is_captured: Whether it can be called: there was memory for all.
    """

    def __init__(
        self,
        guesser: Guesser,
        pool: torch.Tensor,
        table: torch.Tensor,
        *,
        vocab_size: int,
        lag: int,
        memory: GraphMemory,
    ) -> None:
        device, kv_heads = table.device, pool.shape[3]
        self.is_captured = False
        self._guesser = guesser
        self._pool = pool
        self._table = table
        self._lag = lag
        self._memory = memory
        self._dummy = table.shape[0] - 1
        self._most = most = min(MOST_ROWS, self._dummy)
        self._row_sizes = coarse(row_sizes(most))  # more of a step's rows cost hardly more, and a graph costs a start
        self._texts = Texts(lag, self._dummy, guesser.known_ids, vocab_size, kv_heads, has_axes=guesser.has_axes)
        tokens = max(rows * width for rows, width in self.sizes())
        length = GuessLayout(most, 1, 1).length + 8 * tokens
        self._staging = Staging(torch.zeros(length, dtype=torch.int32, device=device))
        self._token_ids, self._unread = torch.zeros((2, tokens), dtype=torch.int64, device=device)
        self._slots, self._before = torch.zeros((2, tokens), dtype=torch.int32, device=device)
        self._future = torch.zeros(table.shape[0], dtype=torch.int64, device=device)  # no id is ever asked of it
        self._last = torch.zeros(most, dtype=torch.int64, device=device)
        self._guesses = torch.zeros(MOST_GUESSES * most, dtype=torch.int64, device=device)
        self._logits = torch.full((most, vocab_size), -torch.inf, device=device)
        rows = torch.zeros((5, most), dtype=torch.int32, device=device)
        keys = torch.zeros(most, dtype=torch.int64, device=device)
        self._next = GuessInputs(rows[0], rows[1], rows[2], rows[3], keys, rows[4])
        self._attention = drafts_attention(pool, table[:, lag:], guesser.num_heads, tokens)
        self._firsts: dict[tuple[int, int], Graph[tuple[()]]] = {}
        self._nexts: dict[int, Graph[tuple[()]]] = {}
        self._draws: dict[tuple[int, bool], Graph[tuple[()]]] = {}

    def sizes(self) -> list[tuple[int, int]]:
        """Rows and widths of first graphs, largest first."""
        sizes = [(rows, width) for rows in self._row_sizes for width in WIDTHS if rows * width <= MOST_TOKENS]
        return sorted(sizes, key=lambda size: size[0] * size[1], reverse=True)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes. What memory does not do for is never asked for again: then nothing is captured."""
        if self.is_captured:
            return
        try:
            for rows, width in self.sizes():
                layout = self._layout(rows, width)
                self._send([], [], [], layout)
                self._firsts[rows, width] = self._graph(lambda layout=layout: self._first(layout))
            for rows in reversed(self._row_sizes):
                layout = self._layout(rows, WIDTHS[0])
                self._send([], [], [], layout)
                self._nexts[rows] = self._graph(lambda layout=layout: self._following(layout))
                for filters in (False, True):
                    draws = self._graph(lambda layout=layout, filters=filters: self._draw(layout, filters=filters))
                    self._draws[rows, filters] = draws
        except Exception:  # a capture that breaks off may raise something else than what broke it off
            logger.warning("guesses are made without graphs", exc_info=True)
            self._firsts, self._nexts, self._draws = {}, {}, {}
            return
        self.is_captured = True

    def _graph(self, run: Any) -> Graph[tuple[()]]:
        run()  # kernels compile and libraries set up outside of the capture
        return Graph(run, self._memory)

    @torch.inference_mode()
    def send_all(self) -> None:
        """Launch the work of all sizes that differ in more than numbers, outside of graphs: see `compile_launched`."""
        whole = self._guesser
        self._guesser = whole.thin()
        rows_of_one = [(1, width) for width in WIDTHS]
        for rows, width in [
            *rows_of_one,
            *((rows, WIDTHS[0]) for rows in self._row_sizes),
            *of_each_kind(self.sizes()),
        ]:
            layout = self._layout(rows, width)
            self._send([], [], [], layout)
            self._first(layout)
            self._following(layout)
            self._draw(layout, filters=False)
        self._guesser = whole

    @torch.inference_mode()
    def guess(
        self, rows: Sequence[DraftRow], lengths: Sequence[int], sampling: Sequence[RowSampling]
    ) -> list[list[int]]:
        """Guesses of each row, as many as `lengths` says, drawn as `sampling` asks for the first one. All rows ask, and
        are no longer than `most_tokens` of so many.
        """
        if len(rows) > self._most:
            parts = slice(self._most), slice(self._most, None)
            return [own for part in parts for own in self.guess(rows[part], lengths[part], sampling[part])]
        longest = max(len(row.token_ids) for row in rows)
        layout = self._layout(self._size(len(rows)), next(width for width in WIDTHS if width >= longest))
        self._send(rows, lengths, sampling, layout)
        filters = any(is_filtered(how.params) and temperature_of(how.params) for how in sampling)
        draws = self._draws[layout.rows, filters]
        self._firsts[layout.rows, layout.width].replay()
        masked = [index for index, how in enumerate(sampling) if how.allowed is not None]
        if masked:
            forbid(self._logits[: len(rows)], sampling, masked)
        draws.replay()
        for _ in range(max(lengths) - 1):
            self._nexts[layout.rows].replay()
            draws.replay()
        drawn = self._guesses.view(MOST_GUESSES, self._most)[: max(lengths), : len(rows)].T.tolist()
        return [own[:length] for own, length in zip(drawn, lengths, strict=True)]

    def most_tokens(self, num_rows: int) -> int:
        """Of one row among so many of a call."""
        size = self._size(min(num_rows, self._most))
        return max(width for width in WIDTHS if size * width <= MOST_TOKENS)

    def _size(self, num_rows: int) -> int:
        return next(size for size in self._row_sizes if size >= num_rows)

    def _layout(self, rows: int, width: int) -> GuessLayout:
        return GuessLayout(rows, width, min(width, self._attention.most_queries))

    def _send(
        self,
        rows: Sequence[DraftRow],
        lengths: Sequence[int],
        sampling: Sequence[RowSampling],
        layout: GuessLayout,
    ) -> None:
        """Inputs to the device."""
        layout.write(self._staging.zeros(layout), rows, lengths, sampling, self._texts)
        self._staging.send(layout)

    def _prepare(self, parts: dict[str, torch.Tensor], rows: int) -> GuessInputs:
        """Inputs of the next guess."""
        into = self._next
        own = GuessInputs(*(getattr(into, field.name)[:rows] for field in dataclasses.fields(into)))
        guess_inputs(
            parts["turn"],
            parts["limits"],
            parts["table_rows"],
            parts["last"],
            parts["offsets"],
            parts["keys"].view(torch.int64),
            self._table,
            own,
            most_rows=self._most,
            lag=self._lag,
        )
        return own

    def _first(self, layout: GuessLayout) -> tuple[()]:
        """What is new of each text, as it is captured."""
        parts: dict[str, torch.Tensor] = layout.cut(self._staging.into)
        tokens, lag = layout.tokens, self._lag
        token_ids, slots = self._token_ids[:tokens], self._slots[:tokens]
        ids, places, positions = parts["ids"], parts["places"], parts["positions"]
        decode_inputs(ids, places, positions, self._future, self._table, token_ids, slots)
        own_positions, before = positions, None
        if lag:
            own_positions, before = positions - lag, self._before[:tokens]
            decode_inputs(ids, places, own_positions, self._future, self._table, self._unread[:tokens], before)
        rows = DecodeRows(places, own_positions, parts["cuts"], parts["seen"], layout.queries)
        plan = StepPlan(self._pool, slots, [DecodePart(0, tokens, self._attention, rows)])
        rotary = parts["rotary"].view(3, tokens) if self._guesser.has_axes else parts["rotary"][:tokens]
        ends = torch.arange(layout.width - 1, tokens, layout.width, device=slots.device)
        self._keep(self._guesser.logits(GuessStep(token_ids, rotary, plan, before, ends)))
        self._prepare(parts, layout.rows)
        return ()

    def _following(self, layout: GuessLayout) -> tuple[()]:
        """The last guesses as tokens, as it is captured."""
        parts: dict[str, torch.Tensor] = layout.cut(self._staging.into)
        count = layout.rows
        own = self._prepare(parts, count)
        rows = DecodeRows(own.table_rows, own.positions, parts["next_cuts"])
        plan = StepPlan(self._pool, own.slots, [DecodePart(0, count, self._attention, rows)])
        self._keep(self._guesser.logits(GuessStep(self._last[:count], own.rotary, plan, None, None)))
        return ()

    def _keep(self, logits: torch.Tensor) -> None:
        """As the target's ids have them: others stay as unlikely as can be."""
        kept, targets = self._logits[: len(logits)], self._guesser.targets
        if targets is not None:
            kept.index_copy_(1, targets, logits)
        else:
            known = min(logits.shape[1], kept.shape[1])  # a model may have been padded to more
            kept[:, :known].copy_(logits[:, :known])

    def _draw(self, layout: GuessLayout, *, filters: bool) -> tuple[()]:
        """A guess of each row, as it is captured."""
        parts: dict[str, torch.Tensor] = layout.cut(self._staging.into)
        count = layout.rows
        logits, last, spots = self._logits[:count], self._last[:count], self._next.spots[:count]
        keys, temperatures = self._next.keys[:count], parts["temperatures"].view(torch.float32)
        draw(logits, temperatures, keys, last, self._guesses, spots)
        if filters:
            temperature, top_p, min_p = (
                parts[name].view(torch.float32).unsqueeze(1) for name in ("temperatures", "top_p", "min_p")
            )
            top_k, filtered = parts["top_k"].long().clamp(min=1).unsqueeze(1), parts["top_k"] > 0
            scaled = finite(logits) / temperature.clamp(min=COLDEST)
            drawn, is_unsure = draw_among(scaled, keys, top_k, top_p, min_p, CANDIDATES)
            last.copy_(torch.where(filtered & ~is_unsure, drawn, last))
            self._guesses.index_copy_(0, spots.long(), last)
        return ()
