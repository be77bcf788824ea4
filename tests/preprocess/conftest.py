"""Makes `pictures` importable (tests are no package), and prepares jobs on the tiny model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def _load_neighbour(name: str) -> None:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


_load_neighbour("pictures")

from preprocess.config import PreprocessConfig  # noqa: E402
from preprocess.prepare import Preparer  # noqa: E402
from preprocess.wire import GenerationOptions, Job, Lease, Message, Prepared, Refused  # noqa: E402

Prepare = Callable[..., Prepared | Refused]


@pytest.fixture(scope="session")
def preparer(tiny_model: Path) -> Preparer:
    """A preparer of the tiny model, without an arena."""
    return Preparer(PreprocessConfig(str(tiny_model)), None)


@pytest.fixture
def prepare(preparer: Preparer) -> Prepare:
    """Prepares messages with options, inline."""

    def run(messages: list[Message], **options: object) -> Prepared | Refused:
        job = Job("r1", messages, GenerationOptions(**options), Lease(), 0.0)  # type: ignore[arg-type]
        return preparer.prepare(job)

    return run
