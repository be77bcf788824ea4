"""What the server knows of the other processes: which are up, which have died, and whether a request would be served.

engine and detokenizer up ──Reset──▶ engine ──ResetDone──▶ both: nothing is left of earlier requests ──▶ pipeline up
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from preprocess.errors import ServiceError
from preprocess.wire import ChildState, Role


@dataclass
class _Child:
    state: ChildState
    deaths: int = 0
    is_used: bool = False
    """Whether its present process gets work, and whoever listens has been told so."""


class Children:
    """States of all child processes by place.

    Args:
        num_workers: Preprocess workers that the launcher runs.
    """

    def __init__(self, num_workers: int) -> None:
        self.on_use: Callable[[ChildState], None] = lambda _: None
        """Called when a child that came up gets work from now on: until then requests may be refused for want of it."""
        roles: list[tuple[Role, int]] = [("engine", 0), ("detokenizer", 0)]
        roles += [("preprocess", index) for index in range(num_workers)]
        self._children = {place: _Child(ChildState(*place, up=False, reason="starting")) for place in roles}
        self._num_workers = num_workers
        self._reset_sent = False
        self.engine_has_reset = False
        self._detokenizer_has_reset = False

    @property
    def pipeline_up(self) -> bool:
        """Whether engine and detokenizer take requests."""
        return self._both_up and self.engine_has_reset and self._detokenizer_has_reset

    @property
    def ready(self) -> bool:
        """Whether a request sent now would be served."""
        return self.pipeline_up and any(self.worker(index).up for index in range(self._num_workers))

    def worker(self, index: int) -> ChildState:
        """State of a preprocess worker."""
        return self._children["preprocess", index].state

    def states(self) -> dict[str, ChildState]:
        """Every child's last known state, by a name such as ``preprocess-0``."""
        return {
            role if role != "preprocess" else f"preprocess-{index}": child.state
            for (role, index), child in self._children.items()
        }

    def deaths(self) -> dict[str, int]:
        """Deaths seen by this server process, by role."""
        totals: dict[str, int] = {}
        for (role, _), child in self._children.items():
            totals[role] = totals.get(role, 0) + child.deaths
        return totals

    def refuse_if_down(self) -> None:
        """Raises `ServiceError` (503), naming what is down, when no request can be served."""
        if not self.pipeline_up:
            down = [f"the {name} is down ({state.reason})" for name, state in self.states().items() if not state.up]
            raise ServiceError(
                f"Not ready yet: {', '.join(down) or 'the engine is being reset'}; /ready tells when it is.",
                code="not_ready",
                retry_after_s=1.0,
            )

    def note(self, state: ChildState) -> None:
        """A child came up or died."""
        child = self._children[state.role, state.index]
        child.state, child.is_used = state, False
        if not state.up:
            child.deaths += 1
            if state.role != "preprocess":
                self._reset_sent = self.engine_has_reset = self._detokenizer_has_reset = False

    def generation_to_reset(self) -> int | None:
        """The generation of an engine that shall be told to forget earlier requests, once; None: not now."""
        if not self._both_up or self._reset_sent:
            return None
        self._reset_sent = True
        return self._children["engine", 0].state.generation

    def note_reset(self, role: Role) -> None:
        """The engine or the detokenizer has forgotten every earlier request."""
        if role == "engine":
            self.engine_has_reset = True
        else:
            self._detokenizer_has_reset = True

    def tell_of_use(self) -> None:
        """Tell of the children that get work since the last call: engine and detokenizer only once both are reset."""
        for (role, _), child in self._children.items():
            if child.state.up and not child.is_used and (role == "preprocess" or self.pipeline_up):
                child.is_used = True
                self.on_use(child.state)

    @property
    def _both_up(self) -> bool:
        return self._children["engine", 0].state.up and self._children["detokenizer", 0].state.up
