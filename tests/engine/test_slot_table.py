"""The slot table on a device keeps its mirror and the tensor equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kv.cache import KVCache
from engine.kv.pool import FEW
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


def test_few_slots_are_had_and_given_back_as_many_are() -> None:
    """Those of few tokens are handled one by one, and those of many by numpy."""
    few, many = (KVCache(200, torch.zeros((4, 90), dtype=torch.int32)) for _ in range(2))
    holds = [[cache.open(np.arange(3)) for _ in range(3)] for cache in (few, many)]
    for _ in range(4):
        for hold in holds[0]:
            few.grow_each([hold], [FEW // 3])
        many.grow_each(holds[1], [FEW // 3] * 3)
        many.grow_each(holds[1], [FEW] * 3)  # more than are handled one by one
        for hold in holds[1]:
            many.shrink(hold, hold.num_slots - FEW)
        for cache, own in ((few, holds[0]), (many, holds[1])):
            cache.check(own)
            cache.shrink(own[1], own[1].num_slots - 2)
            cache.check(own)
        assert [hold.num_slots for hold in holds[0]] == [hold.num_slots for hold in holds[1]]
    for cache, own in ((few, holds[0]), (many, holds[1])):
        for hold in own:
            cache.close(hold)
        cache.check([])
