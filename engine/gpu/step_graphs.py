"""Whole steps as CUDA graphs: one replay for inputs, layers, logits and draws, decode rows and chunks of prompts alike.

    tokens    │ decode rows, one token each │ padding │ chunk │ chunk │ … │ padding │
              └────────── decode size ──────────────┘└──────── prompt size ────────┘

A step's tokens fill up the captured pair of sizes that is the quickest. Attention runs once over the decode rows and
once over the chunks, each with a kernel or tiles of its own. Steps of few prompt tokens are captured twice where the
Hopper kernel is there, which cannot split keys: for it, and for many keys, which are split. Padding belongs to nobody:
its place in the slot table is a row behind the last, so that it reads and writes the dummy slot alone, and nobody looks
at what it draws.

Before the first user only a few sizes are captured, each twice the one before; the others, and those for which a faster
kernel has been compiled since, while there is nothing to do. Until then a larger size serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.flashinfer_backend import FlashInferAttention, Part, PartPlan, Reader, StepPlan, Workspace
from engine.batch import Row
from engine.gpu.decode_attention import DecodePart, DecodeRows
from engine.gpu.forward import FusedDecoder, Shown
from engine.gpu.graph import Graph, GraphMemory
from engine.gpu.ops import decode_inputs, gather_slots
from engine.gpu.sampling import draw
from engine.gpu.size_table import SizeTable
from engine.gpu.staging import Staging
from engine.gpu.step_layout import MOST_CHUNKS, Layout, StepRows
from engine.gpu.step_sizes import EARLY_ROWS, KINDS, LITTLE, Size, coarse, decode_sizes, prompt_sizes


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step left on the device, until the next one: logits (samples, vocab) and tokens (samples,), and which of
    the samples each row with `sampling` is. `is_first`: it was captured for this step.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    picks: list[int]
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph[tuple[torch.Tensor, torch.Tensor]]
    chunk_plan: list[int]
    reader: Reader


class StepGraphs:
    """Captures a few sizes at start and the others later, replays one at each step.

    Args:
        decoder: The model.
        attention: Its attention.
        table: int32 (rows + 1, positions): the slot table and one row more, of dummies.
        future: int64 (rows + 1,): what was drawn last, by place in the table.
        num_taps: DeepStack features behind a vision token's own.
        most_tokens: Largest number of tokens of chunks that is captured.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        attention: FlashInferAttention,
        table: torch.Tensor,
        future: torch.Tensor,
        *,
        num_taps: int,
        most_tokens: int,
    ) -> None:
        device = table.device
        config = decoder.model.config
        self.most = table.shape[0] - 1
        self._decoder = decoder
        self._attention = attention
        self._table = table
        self._future = future
        self._num_taps = num_taps
        self._has_axes = config.rope.sections is not None
        self._decode_sizes = decode_sizes(self.most)
        self._prompt_sizes = prompt_sizes(self.most, most_tokens)
        self._most_tokens = max(size.prompt for size in self._prompt_sizes)
        longest = Layout(self.most, self._most_tokens, MOST_CHUNKS)
        self._staging = Staging(torch.zeros(longest.length, dtype=torch.int32, device=device))
        self._chunk_slots = torch.zeros(MOST_CHUNKS * table.shape[1], dtype=torch.int32, device=device)
        self._token_ids = torch.zeros(longest.tokens, dtype=torch.int64, device=device)
        self._slots = torch.zeros(longest.tokens, dtype=torch.int32, device=device)
        width = config.hidden_size * (1 + num_taps)
        self._vision = torch.zeros((longest.prompt, width), dtype=attention.pool.dtype, device=device)
        self._logits = torch.zeros((longest.samples, config.vocab_size), dtype=torch.float32, device=device)
        self._workspace = Workspace(device)
        self._captured: dict[Size, _Captured] = {}
        self.size_table = SizeTable(self._serves)
        self.memory = GraphMemory()

    def sizes(self) -> list[Size]:
        """Of all graphs, largest first, so that the smaller ones share its memory."""
        sizes = [*self._prompt_sizes, *(Size(size, 0) for size in self._decode_sizes)]
        sizes += [Size(decode, prompt, splits=True) for decode, prompt, _ in sizes if self._reads_twice(prompt)]
        return sorted(sizes, key=lambda size: (size.tokens, size), reverse=True)

    def first_sizes(self) -> list[Size]:
        """Those that serve every step, if not as fast as all together. In the order of `sizes`."""
        totals = {*coarse(sorted({size.tokens for size in self._prompt_sizes})), self._most_tokens}
        alone = set(coarse(self._decode_sizes))
        return [size for size in self.sizes() if self._is_first(size, totals, alone)]

    def _is_first(self, size: Size, totals: set[int], alone: set[int]) -> bool:
        if not size.prompt:
            return size.decode in alone
        if size.decode == EARLY_ROWS and size.tokens <= LITTLE and not size.splits:
            return True
        return size.tokens in totals and (size.decode == self.most or not (size.decode or size.splits))

    def _reads_twice(self, prompt: int) -> bool:
        reader = self._attention.reader
        return prompt > 0 and reader(prompt, splits=True) == "split" != reader(prompt, splits=False)

    def capture(self) -> None:
        """Capture what the first steps need."""
        for size in self.first_sizes():
            self._take(size)

    def capture_next(self) -> bool:
        """Capture one size that is missing, or that a faster kernel serves by now. False: there is none."""
        for size in self.sizes():
            known = self._captured.get(size)
            if known is None or (size.prompt and known.reader != self._reader(size)):
                self._take(size)
                return True
        return False

    @torch.inference_mode()
    def send_all(self) -> None:
        """Launch the work of all sizes that differ in more than numbers, of one layer of each kind, outside of graphs:
        see `compile_launched`.
        """
        whole = self._decoder
        self._decoder = whole.thin()
        for size in [size for size in self.sizes() if not size.splits and self._is_of_its_kind(size)]:
            layout = Layout(size.decode, size.prompt, MOST_CHUNKS if size.prompt else 0)
            self._forward(layout, self._send(StepRows([], [], []), layout, "split"), "split")
        self._decoder = whole

    def _is_of_its_kind(self, size: Size) -> bool:
        return not size.prompt or size.tokens in KINDS or size.prompt == self._most_tokens

    def _take(self, size: Size) -> None:
        captured = self._captured[size] = self._capture(size)
        self.size_table.add(size, captured.graph.seconds())

    def _serves(self, size: Size, splits: bool) -> bool:
        """Whether a captured size is for chunks whose keys are split, or are not."""
        if splits:
            return self._captured[size].reader != "hopper" or self._attention.is_whole(size.prompt)
        return not size.splits

    def added_s(self, rows: int, tokens: int) -> float | None:
        """See `Runner.added_s`."""
        return self.size_table.added_s(rows, tokens) if self._captured else None

    def fits(self, rows: StepRows) -> bool:
        """Whether a captured size is large enough."""
        return (
            bool(self._captured)
            and len(rows.decodes) <= self.most
            and len(rows.chunks) <= MOST_CHUNKS
            and rows.num_prompt_tokens <= self._most_tokens
        )

    @torch.inference_mode()
    def run(self, rows: StepRows) -> StepResult:
        """Launches a step that `fits`."""
        tokens = rows.num_prompt_tokens
        splits = tokens > 0 and self._attention.splits(rows.chunk_lengths, tokens)
        size = self.size_table.choose(Size(len(rows.decodes), tokens, splits))
        decode, prompt, _ = size
        captured = self._captured[size]
        plan = self._send(rows, Layout(decode, prompt, MOST_CHUNKS if prompt else 0), captured.reader)
        if list(plan) != captured.chunk_plan:
            raise RuntimeError(f"a step of {decode} + {prompt} tokens was captured for another plan of attention")
        if prompt:
            self._show(rows.chunks)
        captured.graph.replay()
        picks = [index if is_decode else decode + index for is_decode, index in rows.order]
        return StepResult(*captured.graph.result, picks)

    def _show(self, chunks: Sequence[Row]) -> None:
        """Vision embeddings to where their tokens are."""
        at = 0
        for row in chunks:
            for part in row.vision:
                first = at + part.start
                source = part.embeddings[part.first : part.first + part.count]
                self._vision[first : first + part.count] = source.view(part.count, -1)
            at += len(row.token_ids)

    def _send(self, rows: StepRows, layout: Layout, reader: Reader) -> Any:
        """Inputs and the plan of chunks' attention to the device, padded."""
        kv_heads = self._attention.num_kv_heads
        parts = self._staging.zeros(layout)
        layout.write(parts, rows, dummy=self.most, kv_heads=kv_heads, has_axes=self._has_axes)
        chunk_plan: Any = ()
        if layout.prompt:
            schedule = self._attention.schedule
            chunk_plan = schedule(rows.chunk_lengths, self._workspace, reader, padded_tokens=layout.prompt)
        self._staging.send(layout)
        return chunk_plan

    @torch.inference_mode()
    def _capture(self, size: Size) -> _Captured:
        layout = Layout(size.decode, size.prompt, MOST_CHUNKS if size.prompt else 0)
        reader = self._reader(size)
        plan = self._send(StepRows([], [], []), layout, reader)
        ids = layout.cut(self._staging.into)["ids"]  # of tokens that differ: each chooses experts of its own
        ids.copy_(torch.arange(layout.tokens, device=ids.device) % self._decoder.model.config.vocab_size)
        self._forward(layout, plan, reader)  # kernels compile and libraries set up outside of the capture
        graph = Graph(lambda: self._forward(layout, plan, reader), self.memory)
        return _Captured(graph, list(plan), reader)

    def _reader(self, size: Size) -> Reader:
        return self._attention.reader(size.prompt, splits=size.splits)

    def _forward(self, layout: Layout, chunk_plan: Any, reader: Reader) -> tuple[torch.Tensor, torch.Tensor]:
        """The step as it is captured."""
        parts: dict[str, torch.Tensor] = layout.cut(self._staging.into)
        decode, tokens = layout.decode, layout.tokens
        token_ids, slots = self._token_ids[:tokens], self._slots[:tokens]
        decode_inputs(parts["ids"], parts["places"], parts["positions"], self._future, self._table, token_ids, slots)
        of_step: list[Part] = []
        if decode:
            rows = DecodeRows(parts["places"][:decode], parts["positions"][:decode], parts["part_keys"])
            of_step.append(DecodePart(0, decode, self._attention.decoding, rows))
        if layout.prompt:
            gather_slots(self._table, parts["chunk_places"], parts["chunk_keys"], self._chunk_slots)
            queries, keys, workspace = parts["chunk_queries"], parts["chunk_keys"], self._workspace
            slots_of, attention = self._chunk_slots, self._attention
            of_step.append(
                PartPlan(attention, decode, layout.prompt, workspace, chunk_plan, queries, keys, slots_of, reader)
            )
        plan = StepPlan(self._attention.pool, slots, of_step, pad=layout.prompt > 0)
        hidden = self._decoder.model.embed(token_ids)
        deepstack = None
        if layout.prompt:
            width = hidden.shape[1]
            is_vision = parts["is_vision"][decode:].bool().unsqueeze(1)
            shown = torch.where(is_vision, self._vision[: layout.prompt], 0)  # (prompt, hidden * (1 + taps))
            hidden[decode:] = torch.where(is_vision, shown[:, :width], hidden[decode:])
            if self._decoder.told is not None:  # of text zeros, which nobody looks at
                self._decoder.told.see(plan.places[decode:], shown[:, :width])
            if self._num_taps:
                taps = shown.view(layout.prompt, -1, width)[:, 1:].transpose(0, 1)
                deepstack = Shown(decode, taps)
        rotary = parts["rotary"].view(3, tokens)
        if not self._has_axes or not layout.prompt:
            rotary = rotary[0]
        ends = parts["ends"] if layout.prompt else None
        logits = self._decoder.logits(hidden, rotary, plan, deepstack, ends)
        if layout.prompt:  # many of those would fill the memory
            logits = self._logits[: layout.samples].copy_(logits)
        drawn = torch.empty(layout.samples, dtype=torch.int64, device=logits.device)
        keys = parts["keys"].view(torch.int64)
        temperatures = parts["temperatures"].view(torch.float32)
        draw(logits, temperatures, keys, drawn, self._future, parts["sample_places"])
        return logits, drawn
