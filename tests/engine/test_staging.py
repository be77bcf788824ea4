"""Host memory beside a GPU is used again, but never while somebody reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.gpu.flight import CudaFlight
from engine.gpu.staging import MOST_RESULTS, TURNS, Results, Staging
from tests.engine.simulated_gpu import Event, simulate


@dataclass(frozen=True)
class Line:
    """Two parts, one behind the other."""

    length: int

    def cut(self, flat: Any) -> dict[str, Any]:
        """See `Inputs.cut`."""
        return {"first": flat[:2], "rest": flat[2 : self.length]}


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)


def test_inputs_are_zeros_but_for_what_is_written() -> None:
    into = torch.full((8,), 9, dtype=torch.int32)
    staging = Staging(into)
    for number in range(1, 3 * TURNS):
        line = Line(5 + number % 2)
        parts = staging.zeros(line)
        assert not parts["first"].any()
        assert not parts["rest"].any()
        parts["first"][:] = number
        if number % 3 == 0:
            continue  # whatever prepared it has failed
        staging.send(line)
        assert into.tolist()[: line.length] == [number, number, *[0] * (line.length - 2)]


def test_inputs_on_their_way_are_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that comes again is waited for."""
    waited: list[object] = []
    monkeypatch.setattr(Event, "synchronize", lambda event: waited.append(event))
    staging, line = Staging(torch.zeros(4, dtype=torch.int32)), Line(4)
    arrays = []
    for _ in range(2 * TURNS):
        arrays.append(staging.zeros(line)["first"].ctypes.data)
        staging.send(line)
    assert len(set(arrays)) == TURNS
    assert arrays[:TURNS] == arrays[TURNS:]
    assert waited == [turn.copied for turn in staging._turns] * 2


def test_memory_is_written_again_only_behind_what_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event behind a copy says that the copy is done: not one before it."""
    told: list[str] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *given, **how: (told.append("copy"), copy(*given, **how))[1])
    monkeypatch.setattr(Event, "record", lambda event: told.append("record"))
    monkeypatch.setattr(Event, "synchronize", lambda event: told.append("synchronize"))
    staging, line = Staging(torch.zeros(4, dtype=torch.int32)), Line(4)
    for _ in range(TURNS + 1):
        staging.zeros(line)
        staging.send(line)
    assert told == ["synchronize", "copy", "record"] * (TURNS + 1)
    told.clear()
    CudaFlight(torch.tensor([7]), [0], {}, Results()).result()
    assert told == ["copy", "record", "synchronize"]


def test_a_result_is_asked_for_once() -> None:
    """Its memory is the next one's."""
    flight = CudaFlight(torch.tensor([7]), [0], {}, Results())
    assert flight.result()[0].token_id == 7
    with pytest.raises(RuntimeError, match="asked for twice"):
        flight.result()


def test_tokens_that_nobody_has_read_stay() -> None:
    results = Results()
    flights = [CudaFlight(torch.tensor([number, -number]), [1, 0], {}, results) for number in range(1, 5)]
    for number, flight in enumerate(flights, 1):
        flight.wait()
        assert [token.token_id for token in flight.result()] == [-number, number]
    again = [CudaFlight(torch.tensor([7]), [0], {}, results) for _ in range(5)]
    assert len({flight._pinned.data_ptr() for flight in again}) == 5
    assert {flight._pinned.data_ptr() for flight in flights} < {flight._pinned.data_ptr() for flight in again}
    assert all(flight.result()[0].token_id == 7 for flight in again)


def test_tokens_of_large_steps_have_memory_of_their_own() -> None:
    results = Results()
    for count in (MOST_RESULTS, MOST_RESULTS + 1, 3):
        flight = CudaFlight(torch.arange(count), list(range(count)), {}, results)
        assert [token.token_id for token in flight.result()] == list(range(count))
    assert len(results._free) == 1
