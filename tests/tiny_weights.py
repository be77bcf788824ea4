"""Random weights for tiny models."""

from __future__ import annotations

from typing import Any


def randomise(model: Any, seed: int) -> None:
    """Weights by which attention looks around; the default ones (0.02) give nearly the same logits for everything."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def noise(parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter.copy_(noise(parameter) * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
            elif "embed_tokens" in name or "position_embedding" in name or "lm_head" in name:
                parameter.copy_(noise(parameter) * 0.5)
            else:
                parameter.copy_(noise(parameter) * 1.5 / parameter[0].numel() ** 0.5)
