"""In which order modules come where several processes share the tests: `make test`, whose workers take one module each.

Tests of pages and servers mostly wait for other processes; those of the engine compute. One of each by turns keeps all
cores busy, where alphabet or size would have every worker wait at once. Of both kinds those that take longest come
first, so that no worker is left alone with one at the end.

The lists were measured; when they are old, runs take longer and nothing else is wrong.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, zip_longest
from typing import Final

import pytest

WAITS: Final = ("tests/ui/", "tests/server/", "tests/test_")
"""Modules that start browsers and servers, by their beginnings."""

SLOW: Final = (
    "tests/ui/test_live.py",
    "tests/server/test_supervision.py",
    "tests/ui/test_picture.py",
    "tests/ui/test_placard.py",
    "tests/server/test_operators.py",
    "tests/server/stream/test_stream_processes.py",
    "tests/ui/test_accessibility.py",
    "tests/ui/test_layout.py",
    "tests/ui/test_page.py",
    "tests/server/stream/test_soak.py",
    "tests/ui/test_door.py",
    "tests/server/test_live_source.py",
    "tests/server/test_cli.py",
    "tests/server/test_clip_processes.py",
    "tests/server/stream/test_live_browser.py",
    "tests/ui/test_advice.py",
    "tests/server/stream/test_live_clients.py",
    "tests/server/test_tool_calls.py",
    "tests/ui/test_engine_page.py",
    "tests/ui/test_focus.py",
    "tests/ui/test_live_history.py",
    "tests/test_end_to_end.py",
    "tests/server/stream/test_stream_socket.py",
    "tests/test_shaped_answers.py",
    "tests/server/test_offline_threads.py",
    "tests/server/test_readiness.py",
    "tests/server/test_tls.py",
    "tests/server/test_sample_clients.py",
    # those that compute
    "tests/engine/test_family_parity.py",
    "tests/engine/test_simulated_drafts.py",
    "tests/engine/test_matrix.py",
    "tests/engine/test_simulated_guesses.py",
    "tests/engine/test_large_inputs.py",
    "tests/engine/speculation/test_model_sources.py",
    "tests/engine/speculation/test_waiting.py",
    "tests/engine/speculation/test_model_lengths.py",
    "tests/engine/speculation/test_same_text.py",
    "tests/engine/test_folder_variants.py",
    "tests/engine/test_cpu_step.py",
    "tests/engine/speculation/test_tree_controller.py",
    "tests/engine/speculation/test_controller.py",
    "tests/engine/test_encoder_graphs.py",
    "tests/engine/speculation/test_distribution.py",
    "tests/engine/test_pace_ahead.py",
    "tests/engine/speculation/test_native_head.py",
)
"""Those that take longest, of both kinds, the longest first. Of the others those with many tests come first."""


def ordered(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same tests; those of a module stay together and in their order."""
    sizes = Counter(_module(item) for item in items)
    places = {name: place for place, name in enumerate(SLOW)}
    names = sorted(sizes, key=lambda name: (places.get(name, len(SLOW)), -sizes[name]))
    waiting = [name for name in names if name.startswith(WAITS)]
    computing = [name for name in names if not name.startswith(WAITS)]
    by_turns = [name for name in chain(*zip_longest(computing, waiting)) if name is not None]
    turns = {name: turn for turn, name in enumerate(by_turns)}
    return sorted(items, key=lambda item: turns[_module(item)])


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
