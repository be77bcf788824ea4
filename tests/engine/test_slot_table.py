"""The slot table on a device keeps its mirror and the tensor equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kv.table import SlotTable


@pytest.mark.parametrize("is_mirrored", [False, True], ids=["host", "device"])
def test_the_tensor_holds_what_was_written(is_mirrored: bool) -> None:
    tensor = torch.zeros((3, 8), dtype=torch.int32)
    table = SlotTable(tensor)
    if is_mirrored:  # as on another device: the tensor's memory is not ours
        table._device, table._host = tensor, np.zeros((3, 8), np.int32)
    table.write_run(1, 2, np.array([5, 6, 7], np.int32))
    table.write_cells([0, 2], [7, 0], np.array([8, 9], np.int32))
    expected = [[0] * 7 + [8], [0, 0, 5, 6, 7, 0, 0, 0], [9] + [0] * 7]
    assert tensor.tolist() == expected
    assert [table.read_run(row, 0, 8).tolist() for row in range(3)] == expected


@pytest.mark.parametrize("tensor", [torch.zeros((3, 8)), torch.zeros(8, dtype=torch.int32)])
def test_another_shape_or_type_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"\(rows, positions\) int32"):
        SlotTable(tensor)
