"""Draft models and heads beside steps that are graphs. See `engine.speculation.drafter`; `load_drafter` makes them.

The guesses of a step are graphs. What they catch up with, and guesses whose logits are changed before the draw
(penalties, bias), run kernel by kernel, as `engine.speculation.torch_drafters` says.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from engine.attention.flashinfer_modules import HEAD_DIMS
from engine.batch import RowSampling
from engine.gpu.forward import FusedDecoder, add_norm, gated_mlp, heads_of, to_residual
from engine.gpu.guess_graphs import Guesser, GuessGraphs, GuessStep
from engine.gpu.ops import rotate_and_write
from engine.models.decoder import Decoder
from engine.models.eagle3 import Eagle3
from engine.sampling import is_changed
from engine.speculation.drafter import DraftRow, split
from engine.speculation.torch_drafters import DraftModel, Head, Pools
from preprocess.blocks.gpu_kernels import rms_norm

HEAD_LATE: Final = 4096
"""Tokens that a head catches up with before one step: keys and values alone, a hundredth of what prompts take."""


class FusedDraftModel:
    """See `Guesser`.

    Args:
        model: A decoder.
        pool: Its entries.
    """

    def __init__(self, model: Decoder, pool: torch.Tensor) -> None:
        self.targets: torch.Tensor | None = None
        self.num_heads = model.config.num_heads
        self.known_ids = model.config.vocab_size
        self.has_axes = model.config.rope.sections is not None
        self._decoder = FusedDecoder(model, pool)

    def logits(self, step: GuessStep) -> torch.Tensor:
        """See `Guesser.logits`."""
        hidden = self._decoder.model.embed(step.token_ids)
        return self._decoder.logits(hidden, step.rotary, step.plan, None, step.ends)

    def thin(self) -> Guesser:
        """See `Guesser.thin`."""
        guesser = copy.copy(self)
        guesser._decoder = self._decoder.thin()
        return guesser


class FusedHead:
    """See `Guesser`.

    Args:
        model: Its weights.
        target: The model that it was trained for.
        pool: Its entries.
        features: What the target's layers made of tokens, by slot: see `Told`.
        most_rows: Of a call.
    """

    def __init__(
        self, model: Eagle3, target: Decoder, pool: torch.Tensor, features: torch.Tensor, most_rows: int
    ) -> None:
        config = model.config
        self.num_heads = config.num_heads
        self.known_ids = config.vocab_size
        self.targets = model.targets
        self.has_axes = config.rope.sections is not None
        self._model = model
        self._embedding = model.embedding or target.embedding
        self._head = model.head or target.head
        self._pool = pool[0]
        self._features = features
        # Its own guess of what the target makes of each row's last token.
        self._ahead = torch.zeros((most_rows, config.hidden_size), dtype=pool.dtype, device=pool.device)

    def logits(self, step: GuessStep) -> torch.Tensor:
        """See `Guesser.logits`."""
        model, config = self._model, self._model.config
        if step.before is None:
            features = self._ahead[: len(step.token_ids)]
        else:
            features = model.fuse(self._features.index_select(0, step.before))  # (tokens, hidden)
        normed = rms_norm(features, model.feature_norm.weight, model.feature_norm.eps)
        embedded = rms_norm(self._embedding(step.token_ids), model.token_norm.weight, model.token_norm.eps)
        qkv = heads_of(torch.cat((embedded, normed), dim=1), model.qkv, config.head_dim)
        rotation, slots = model.rope.at(step.rotary), step.plan.slots
        query = rotate_and_write(qkv, rotation, slots, self._pool, num_kv_heads=config.num_kv_heads)
        x = normed if config.norm_before_residual else features  # from here on the residual stream
        normed = add_norm(to_residual(step.plan.read(0, query), model.out), x, model.mlp_norm)
        delta = gated_mlp(model.mlp, normed)
        if step.ends is not None:
            x, delta = x.index_select(0, step.ends), delta.index_select(-2, step.ends)
        normed = add_norm(delta, x, model.norm)
        ahead = self._ahead[: len(x)]
        if ahead.data_ptr() != x.data_ptr():
            ahead.copy_(x)
        return self._head.wide(normed)

    def thin(self) -> Guesser:
        """See `Guesser.thin`."""
        return self


class _Graphed:
    """What guesses in graphs. Of several bases the last one: what it catches up with is another's `forward`.

    Attributes:
        graphs: Of the guesses.
    """

    graphs: GuessGraphs

    if TYPE_CHECKING:

        def forward(self, rows: Sequence[DraftRow], *, guessed: bool) -> torch.Tensor: ...

    def draws(self, how: RowSampling) -> bool:
        """See `ChainDrafter.draws`."""
        return self.graphs.is_captured and not is_changed(how)

    def guess(
        self, rows: Sequence[DraftRow], lengths: Sequence[int], sampling: Sequence[RowSampling]
    ) -> list[list[int]]:
        """See `ChainDrafter.guess`.

        Graphs take the last few tokens of a text. Where one has more, or vision, what comes before the last token is
        computed by itself in all rows, as one may rest upon what another computes.
        """
        most = self.graphs.most_tokens(len(lengths))
        if any(not row.asks or len(row.token_ids) > most or row.vision is not None for row in rows):
            before, rows = split(rows)
            self.forward(before, guessed=False)
        return self.graphs.guess(rows, lengths, sampling)


class GraphedDraftModel(DraftModel, _Graphed):
    """A draft model whose guesses are graphs. Arguments as `DraftModel`'s."""

    def __init__(self, model: Decoder, pools: Pools, *, vocab_size: int, cost: float) -> None:
        super().__init__(model, pools, vocab_size=vocab_size, cost=cost)
        self.graphs = _graphs(FusedDraftModel(model, self.pool), self, pools, vocab_size)


class GraphedHead(Head, _Graphed):
    """A head whose guesses are graphs. Arguments as `Head`'s, and `late_cost` of `Drafter`."""

    most_late = HEAD_LATE

    def __init__(self, model: Eagle3, target: Decoder, pools: Pools, *, cost: float, late_cost: float) -> None:
        super().__init__(model, target, pools, cost=cost)
        self.late_cost = late_cost
        guesser = FusedHead(model, target, self.pool, self.told.features, pools.slot_table.shape[0])
        self.graphs = _graphs(guesser, self, pools, model.config.vocab_size)


def can_be_graphs(head_dim: int) -> bool:
    """Whether the GPU's kernels can read entries of such heads."""
    return head_dim in HEAD_DIMS


def _graphs(guesser: Guesser, drafter: DraftModel | Head, pools: Pools, vocab_size: int) -> GuessGraphs:
    assert pools.graphs is not None
    return GuessGraphs(
        guesser, drafter.pool, pools.slot_table, vocab_size=vocab_size, lag=drafter.lag, memory=pools.graphs
    )
