"""What an installation brings along: every package of the source tree is named in pyproject.toml, which lists them."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    found = [
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("server", "engine", "preprocess", "ui")
        for path in (ROOT / top).rglob("__init__.py")
    ]
    assert sorted(listed) == sorted(found)
