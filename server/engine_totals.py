"""The engine's running totals as this server process tells them: they never fall, although an engine that is restarted
begins at 0 again.
"""

from __future__ import annotations

import msgspec

from preprocess.wire import GAUGES, EngineStats

_TOTALS = tuple(name for name in EngineStats.__struct_fields__ if name not in GAUGES)


class EngineTotals:
    """Adds what earlier engines had counted to what the present one reports."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        """The last report, with the totals of all engines so far; None before the first."""
        self._base: EngineStats | None = None

    def report(self, stats: EngineStats) -> None:
        """The present engine's own report."""
        base = self._base
        if base is not None:
            stats = msgspec.structs.replace(
                stats, **{name: getattr(base, name) + getattr(stats, name) for name in _TOTALS}
            )
        self.stats = stats

    def engine_died(self) -> None:
        """The next report is another engine's. What there was is gone, however much had been counted."""
        if self.stats is not None:
            emptied = {name: 0 for name in GAUGES if name != "kv_slots_total"}
            self.stats = self._base = msgspec.structs.replace(self.stats, **emptied)
