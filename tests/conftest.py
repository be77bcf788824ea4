"""Fixtures that tests of every folder share."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
import torch
from hypothesis import HealthCheck, settings

# A busy machine is no fault of what is tested: only pytest's own timeout counts time. Every run tries the same cases
# and says something about the change that it is run for; `make explore` tries others each time.
settings.register_profile("beholder", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", settings.get_profile("beholder"), derandomize=False, print_blob=True)
settings.load_profile("beholder")

# Several workers share the cores, and threads of torch's that wait for each other on busy ones burn them.
torch.set_num_threads(1)


def _load(name: str) -> ModuleType:
    """Imports a module of this folder under `name`; tests are not a package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


_TINY: Final = (
    "tiny_tokenizer",
    "tiny_weights",
    "tiny_smolvlm",
    "tiny_qwen",
    "tiny_qwen2_vl",
    "tiny_qwen3_vl",
    "tiny_models",
)
"""Each after what it imports."""

for _name in (*_TINY, "tiny_heads", "packed_models", "serving", "streaming", "soak", "clips", "browser", "order"):
    _load(_name)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers share the tests in an order of their own; one process alone keeps that of the folders."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from order import ordered

        items[:] = ordered(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test that leaves its process at a real-time priority fails: it would starve every test after it."""
    yield
    if hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in {os.SCHED_FIFO, os.SCHED_RR}:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # the tests after it are not at fault
        pytest.fail(f"{item.nodeid} left its process real-time: tests/clips.py scheduling_kept says why that is bad")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SmolVLM folder with tied tiny random weights, made once a session."""
    import tiny_smolvlm

    folder: Path = tiny_smolvlm.tiny_smolvlm(tmp_path_factory.mktemp("tiny_model"))
    return folder
