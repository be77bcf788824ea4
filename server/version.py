"""The version of what runs, for `beholder version` and `GET /version`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """The version of the installed distribution, or ``0+unknown`` when run from a folder that nobody installed."""
    try:
        return version("beholder")
    except PackageNotFoundError:
        return "0+unknown"
