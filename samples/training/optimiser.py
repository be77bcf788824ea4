"""The optimiser: Muon (orthogonalised momentum; Jordan et al. 2024) for matrices inside the blocks, AdamW for the rest.

Matrices of one shape are stacked, so that a step is few kernels.
"""

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximately the nearest semi-orthogonal matrices, (n, rows, columns), by Newton-Schulz iteration in bf16."""
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Nesterov momentum, orthogonalised; updates are scaled to the size that AdamW's have."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.momentum, self.decay = momentum, decay
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            shapes.setdefault(parameter.shape, []).append(parameter)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])  # (n, rows, columns)
            buffer.lerp_(gradient, 1 - self.momentum)
            update = orthogonalise(gradient.lerp(buffer, self.momentum)).float()
            update *= -rate * 0.2 * max(buffer.shape[1:]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind(0)))


class Optimiser:
    """Both optimisers under one learning rate in [0, 1], the share of each peak rate."""

    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float) -> None:
        inside = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
        names = {name for name, _ in inside}
        rest = [(n, p) for n, p in model.named_parameters() if n not in names]
        self.matrix_rate, self.other_rate = matrix_rate, other_rate
        self.muon = Muon([p for _, p in inside])
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for _, p in rest if p.ndim >= 2], "weight_decay": 0.05},
                {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=other_rate,
            betas=(0.9, 0.98),
            fused=next(model.parameters()).is_cuda,
        )

    def step(self, share: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * share
        self.muon.step(self.matrix_rate * share)
        self.adam.step()

    def state_dict(self) -> dict[str, object]:
        return {"muon": self.muon.buffers, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for own, saved in zip(self.muon.buffers, state["muon"], strict=True):  # type: ignore[call-overload]
            own.copy_(saved)
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
