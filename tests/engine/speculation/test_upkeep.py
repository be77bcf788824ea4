"""What guessing takes beside steps, as it is paid for: near what it took, whatever a busy machine made of a part."""

from __future__ import annotations

import pytest

from engine.speculation.upkeep import Upkeep, Work

MS = 1e-3


@pytest.mark.parametrize("first_ms", [0.05, 5.0])
def test_a_hiccup_at_first_is_not_charged_for_again_and_again(first_ms: float) -> None:
    now_s = 0.0
    upkeep = Upkeep(lambda: now_s)
    charged_s = 0.0
    for taken_s in (first_ms * MS, *[0.05 * MS] * 29):
        started_s = upkeep.start(Work.BEGIN)
        now_s += taken_s
        charged_s += upkeep.stop(Work.BEGIN, started_s)
    assert now_s - 0.5 * MS < charged_s < now_s + 0.5 * MS
