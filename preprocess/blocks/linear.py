"""Linear layers and embedding tables. Every matrix product of encoders and language models goes through `Linear`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from preprocess.blocks.checkpoint import Checkpoint

_INTEGER_ROWS: Final = 4
"""Most rows that are multiplied with integer weights: with more, the bfloat16 product is faster."""

_INTEGER_BLOCK: Final = 64
"""Inputs come in whole blocks of this many, as torch's integer kernels read them."""


class Linear:
    """y = x Wᵀ + b, for x of shape (…, inputs) and W of shape (outputs, inputs).

    In bfloat16 on a CPU the weight is laid out for oneDNN at the first call. `F.linear` lays it out anew at every call,
    which for few rows costs as much as the product: 384 → 2048 for 8 rows takes 142 µs and 82 µs laid out (one core,
    AMX).

    A step of very few rows is bound by reading weights, so there a checkpoint's own 8-bit `integers` (outputs, inputs)
    and scales (outputs,) are multiplied as they are: 1.0 instead of 2.5 ms for the layers of a 12M-parameter model.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        integers: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.outputs, self.inputs = weight.shape
        self.bias = bias
        self._weight: torch.Tensor | None = weight
        self._packed: Any = None
        # Where nobody multiplies them they would only take memory beside the weight: as much again by half.
        self._integers = integers if weight.device.type == "cpu" and weight.dtype is torch.bfloat16 else None
        self._is_laid_out = not _can_lay_out(weight)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        modules: str | Sequence[str],
        inputs: int,
        outputs: int | Sequence[int],
        *,
        bias: bool,
        kind: str = "Linear",
        more_inputs: int = 0,
        more_outputs: int = 0,
    ) -> Linear:
        """One layer from `modules`; several that read the same input become one, outputs in order.

        `kind` ``"Embedding"`` makes a layer of a table, for models whose head is tied to it. `more_inputs` and
        `more_outputs`, those of each module, follow its own and are zero: for sizes that kernels read slowly.
        """
        modules = [modules] if isinstance(modules, str) else modules
        sizes = [outputs] if isinstance(outputs, int) else outputs
        weights = [
            checkpoint.weight(module, (size, inputs), kind=kind) for module, size in zip(modules, sizes, strict=True)
        ]
        more = (0, more_inputs, 0, more_outputs)  # as `F.pad` counts: the last dimension first
        integers = None
        parts = [part for module in modules if (part := checkpoint.integers(module, kind=kind)) is not None]
        if len(parts) == len(modules):
            integers = (
                torch.cat([_filled(part, more) for part, _ in parts]),
                torch.cat([_filled(scale, more[2:]) for _, scale in parts]),
            )
        biases = (
            [checkpoint.tensor(f"{module}.bias", (size,)) for module, size in zip(modules, sizes, strict=True)]
            if bias
            else []
        )
        return cls(
            torch.cat([_filled(weight, more) for weight in weights]),
            torch.cat([_filled(each, more[2:]) for each in biases]) if bias else None,
            integers,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, inputs) → (…, outputs)."""
        if not self._is_laid_out:
            self._lay_out()
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        if self._integers is not None and x.dim() == 2 and len(x) <= _INTEGER_ROWS:
            return torch._weight_int8pack_mm(x.contiguous(), *self._integers)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y

    @property
    def weight(self) -> torch.Tensor:
        """(outputs, inputs), as long as it has not been laid out for a CPU."""
        assert self._weight is not None
        return self._weight

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """float32 (rows, outputs) of (rows, inputs). On a GPU the sums are not rounded to the weights' type between."""
        if x.device.type == "cuda" and x.dtype is not torch.float32 and self.bias is None:
            assert self._weight is not None
            return torch.mm(x, self._weight.T, out_dtype=torch.float32)
        return self(x).float()

    def without_bias(self, x: torch.Tensor) -> torch.Tensor:
        """(…, inputs) → (…, outputs), for whoever adds the bias later, in a pass that there is anyway (on a GPU)."""
        return F.linear(x, self.weight)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """For whoever multiplies otherwise, before the first call: a checkpoint's integers and their scales, or the
        weight and None; and the bias.
        """
        weight, scales = (self.weight, None) if self._integers is None else self._integers
        return weight, scales, self.bias

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """As `weights`; the layer is empty afterwards."""
        taken = self.weights()
        self._weight = self._integers = None
        return taken

    def _lay_out(self) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), 8)
        self._weight = None
        if self.bias is not None or self.inputs % _INTEGER_BLOCK:
            self._integers = None
        self._is_laid_out = True

    def gelu(self, x: torch.Tensor, approximate: str) -> torch.Tensor:
        """GELU of the layer's result, (…, inputs) → (…, outputs); `approximate` as in `F.gelu`."""
        if not self._is_laid_out:
            self._lay_out()
        if self._packed is None:
            assert self._weight is not None
            if x.device.type == "cuda" and approximate == "tanh" and self.bias is not None:
                flat = torch._addmm_activation(self.bias, x.reshape(-1, self.inputs), self._weight.T, use_gelu=True)
                return flat.view(*x.shape[:-1], self.outputs)
            return F.gelu(self(x), approximate=approximate)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "gelu", [], approximate)
        return y


def _filled(tensor: torch.Tensor, more: tuple[int, ...]) -> torch.Tensor:
    """With zeros where `more` says so, which is as `F.pad` takes it (and copies even where there are none)."""
    return F.pad(tensor, more) if any(more) else tensor


def _can_lay_out(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a layout of its own for the weight."""
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


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
