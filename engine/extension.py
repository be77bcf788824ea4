"""Opens libraries of native code that `setup.py` builds, where it could."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import TypeVar

Library = TypeVar("Library", bound=ctypes.CDLL)


def opened(name: str, load: Callable[[str], Library]) -> Library | None:
    """The library of a module's name, by `ctypes.CDLL` or `PyDLL`; None where it was not built or cannot be loaded."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None
    try:
        return load(found.origin)
    except OSError:
        return None
