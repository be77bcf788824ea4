"""Linear layers and embedding tables. Every matrix product of encoders and language models goes through `Linear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from preprocess.blocks.checkpoint import Checkpoint


class Linear:
    """y = x Wᵀ + b, for x of shape (…, inputs) and W of shape (outputs, inputs).

    In bfloat16 on a CPU the weight is laid out once for oneDNN. `F.linear` lays it out anew at every call, which for
    few rows costs as much as the product: 384 → 2048 for 8 rows takes 142 µs and 82 µs laid out (one core, AMX).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        self._packed: Any = _lay_out(weight)
        self._weight = weight if self._packed is None else None

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        modules: str | Sequence[str],
        inputs: int,
        outputs: int | Sequence[int],
        *,
        bias: bool,
    ) -> Linear:
        """One layer from `modules`; several that read the same input become one, outputs in order."""
        modules = [modules] if isinstance(modules, str) else modules
        sizes = [outputs] if isinstance(outputs, int) else outputs
        weights = [checkpoint.weight(module, (size, inputs)) for module, size in zip(modules, sizes, strict=True)]
        biases = (
            [checkpoint.tensor(f"{module}.bias", (size,)) for module, size in zip(modules, sizes, strict=True)]
            if bias
            else []
        )
        return cls(torch.cat(weights), torch.cat(biases) if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, inputs) → (…, outputs)."""
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    def gelu(self, x: torch.Tensor, approximate: str) -> torch.Tensor:
        """GELU of the layer's result, (…, inputs) → (…, outputs); `approximate` as in `F.gelu`."""
        if self._packed is None:
            return F.gelu(self(x), approximate=approximate)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "gelu", [], approximate)
        return y


def _lay_out(weight: torch.Tensor) -> Any:
    """The weight in oneDNN's own layout, or None where that does not apply."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return None
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)


class Embedding:
    """A table (ids, width) of vectors by id."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    @classmethod
    def load(cls, checkpoint: Checkpoint, module: str, ids: int, width: int) -> Embedding:
        """The table of `module`, packed or not."""
        return cls(checkpoint.weight(module, (ids, width), kind="Embedding"))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """(tokens,) → (tokens, width)."""
        return self.table.index_select(0, ids)
