"""What tests of the pages share: the bundled model, served once, and a browser to look at it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import ROOT, Visit, chromium, require_browser
from serving import Served


@pytest.fixture(scope="session")
def served_ui() -> Iterator[Served]:
    """The bundled model with its pages. Without guesses words come one by one, which asks the most of a layout."""
    require_browser()
    with Served(ROOT / "samples" / "model", speculation="none") as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a camera; modules that need one make their own with `chromium`.

    One a module, since playwright keeps an event loop running in this thread, which other modules could not bear.
    """
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any, served_ui: Served) -> Iterator[Callable[..., Visit]]:
    """Begins visits; each is checked when the test ends."""
    visits: list[Visit] = []

    def begin(path: str = "/ui", **options: Any) -> Visit:
        visits.append(Visit(browser, served_ui.url, **options))
        visits[-1].open(path)
        return visits[-1]

    yield begin
    for each in visits:
        each.close()
