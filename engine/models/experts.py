"""A mixture of experts in place of one MLP (arXiv:1701.06538; Qwen3, arXiv:2505.09388): each token takes a few of many.

The tokens of a step are grouped by expert, so that an expert's weights are read once a step, and only if it is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import Fields
from preprocess.blocks.linear import Linear


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes, and which layers have experts: every `step`-th, but those in `plain_layers`."""

    num_experts: int
    top_k: int
    intermediate_size: int
    step: int
    plain_layers: tuple[int, ...]

    @classmethod
    def read(cls, fields: Fields, *, num_experts: int, top_k: int, intermediate_size: int) -> ExpertsConfig:
        """From a text configuration, with the defaults of its class."""
        plain = fields.values.get("mlp_only_layers") or []
        if not (isinstance(plain, list) and all(isinstance(layer, int) for layer in plain)):
            raise fields.error("mlp_only_layers", plain, "a list of layer indices")
        config = cls(
            # transformers 5 calls its attribute num_experts and writes it as num_local_experts.
            num_experts=fields.integer("num_local_experts", fields.integer("num_experts", num_experts)),
            top_k=fields.integer("num_experts_per_tok", top_k),
            intermediate_size=fields.integer("moe_intermediate_size", intermediate_size),
            step=fields.integer("decoder_sparse_step", 1),
            plain_layers=tuple(plain),
        )
        if config.top_k > config.num_experts:
            raise fields.error("num_experts_per_tok", config.top_k, f"at most num_experts {config.num_experts}")
        return config

    def covers(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.plain_layers and (layer + 1) % self.step == 0


class Experts:
    """Σ wₑ · downₑ(silu(gateₑ(x)) · upₑ(x)) over the `top_k` experts e that the router likes best for a token.

    Attributes:
        router: hidden → a score for each expert.
        gate_up: Of each expert, hidden → 2 * intermediate, gates first.
        down: Of each expert, intermediate → hidden.
    """

    def __init__(self, router: Linear, gate_up: torch.Tensor, down: torch.Tensor, config: ExpertsConfig) -> None:
        """`gate_up` (experts, 2 * intermediate, hidden) and `down` (experts, hidden, intermediate) are weights."""
        self.router = router
        # On a GPU all experts are multiplied in one go, from one tensor: see `engine.gpu.experts`.
        self.stacked = (gate_up, down) if gate_up.device.type == "cuda" else None
        self.gate_up = [Linear(weight) for weight in gate_up]
        self.down = [Linear(weight) for weight in down]
        self.top_k = config.top_k

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str, width: int, config: ExpertsConfig) -> Experts:
        """The experts of `prefix`: one tensor for all of them, either way round, or modules of their own."""
        router = Linear.load(checkpoint, f"{prefix}.gate", width, config.num_experts, bias=False)
        stacked = f"{prefix}.experts.gate_up_proj"
        weights = _stacked if checkpoint.has(stacked) else _separate
        return cls(router, *weights(checkpoint, f"{prefix}.experts", width, config), config)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden) → the same."""
        weights, chosen = self.route(x)
        experts, order = chosen.flatten().sort(stable=True)
        tokens = order // self.top_k
        weights = weights.flatten()[order].unsqueeze(1)
        # In float32: the sum of a token's experts then does not depend on the type that they compute in.
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        first = 0
        wanted, counts = torch.unique_consecutive(experts, return_counts=True)
        for expert, count in zip(wanted.tolist(), counts.tolist(), strict=True):
            rows = tokens[first : first + count]
            gate, up = self.gate_up[expert](x[rows]).chunk(2, dim=-1)  # each (count, intermediate)
            y = self.down[expert](F.silu(gate) * up)
            total.index_add_(0, rows, y * weights[first : first + count])
            first += count
        return total.to(x.dtype)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, hidden) → float32 weights and int64 experts, each (tokens, top_k)."""
        weights, chosen = torch.topk(self.router(x).softmax(dim=-1, dtype=torch.float32), self.top_k, dim=-1)
        # They sum up to 1 whatever `norm_topk_prob` says, as in transformers' model; published folders say so, too.
        return weights / weights.sum(dim=-1, keepdim=True), chosen


def _stacked(
    checkpoint: Checkpoint, prefix: str, width: int, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor for all experts: (experts, outputs, inputs) as saved today, or (experts, inputs, outputs) as Qwen
    published them.
    """
    experts, inner = config.num_experts, config.intermediate_size
    down, gate_up = f"{prefix}.down_proj", f"{prefix}.gate_up_proj"
    today = checkpoint.shape(down) == (experts, width, inner)
    if width == inner:  # the other tensor tells
        today = checkpoint.shape(gate_up) == (experts, 2 * inner, width)
    if today:
        return checkpoint.tensor(gate_up, (experts, 2 * inner, width)), checkpoint.tensor(down, (experts, width, inner))
    gate_up_weight = checkpoint.tensor(gate_up, (experts, width, 2 * inner))
    down_weight = checkpoint.tensor(down, (experts, inner, width))
    return gate_up_weight.transpose(1, 2).contiguous(), down_weight.transpose(1, 2).contiguous()


def _separate(
    checkpoint: Checkpoint, prefix: str, width: int, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """A module for each expert."""
    inner = config.intermediate_size
    gate_up, down = [], []
    for index in range(config.num_experts):
        expert = f"{prefix}.{index}"
        parts = [checkpoint.weight(f"{expert}.{name}_proj", (inner, width)) for name in ("gate", "up")]
        gate_up.append(torch.cat(parts))
        down.append(checkpoint.weight(f"{expert}.down_proj", (width, inner)))
    return torch.stack(gate_up), torch.stack(down)
