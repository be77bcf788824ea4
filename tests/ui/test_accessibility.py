"""No serious fault of accessibility in any tab, light or dark, empty or at work: found by axe-core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import CLIPS, PHONE, PICTURES, ROOT, Visit

SERIOUS = ("serious", "critical")


def faults(page: Any) -> list[str]:
    """Serious faults, each with where it is."""
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{found['id']}: {node['html'][:160]} {node['failureSummary']}"
        for found in violations
        if found["impact"] in SERIOUS
        for node in found["nodes"]
    ]


def open_tab(visit: Visit, name: str) -> Any:
    visit.page.get_by_role("tab", name=name).click()
    visit.page.wait_for_selector(f"beholder-{name.lower()} > *")
    return visit.page


@pytest.fixture(params=["light", "dark", "phone"])
def looks(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How somebody looks at the page."""
    return {
        "dark": request.param == "dark",
        "viewport": PHONE if request.param == "phone" else None,
        "reduced_motion": True,  # colours that fade in would be seen half way
    }


def test_every_tab_empty_and_at_work(visit: Callable[..., Visit], looks: dict[str, Any]) -> None:
    begun = visit(**looks)
    assert not faults(open_tab(begun, "Live"))
    page = open_tab(begun, "Picture")
    assert not faults(page)
    page.set_input_files(".picture-files", [str(PICTURES / "kitchen.jpg"), str(CLIPS / "car.mp4")])
    page.wait_for_selector(".turn[data-state=done]")
    assert not faults(page)
    page.get_by_text("As the model sees it").click()
    page.wait_for_selector(".picture-stage[data-view=seen] img")
    assert not faults(page)
    open_tab(begun, "Placard")
    assert not faults(page)
    page.set_input_files(".placard-file", str(PICTURES / "gallery.jpg"))
    page.wait_for_selector(".placard-code:not([hidden])")
    assert not faults(page)
    open_tab(begun, "Engine")
    page.wait_for_selector(".engine:is([data-state=ready], [data-state=at-work])")
    for summary in ("Model card", "Limits and options"):
        page.get_by_text(summary).click()
    assert not faults(page)
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    assert not faults(page)


@pytest.mark.parametrize("width", [320, 360, 640, 1024])
def test_nothing_has_to_be_scrolled_sideways(visit: Callable[..., Visit], width: int) -> None:
    """On phones, and at 200 % and 400 % of a laptop's page."""
    begun = visit(viewport={"width": width, "height": 640})
    for name in ("Live", "Picture", "Placard", "Engine"):
        page = open_tab(begun, name)
        if name == "Placard":
            page.set_input_files(".placard-file", str(PICTURES / "gallery.jpg"))
            page.wait_for_selector(".placard-code:not([hidden])")
        if name == "Engine":
            page.get_by_text("Limits and options").click()
            page.wait_for_selector(".engine-options tr")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        cut = page.evaluate(
            """(width) => [...document.querySelectorAll("button, a, input, select, textarea, summary")]
              .filter((control) => control.checkVisibility() && !control.closest(".unseen, [aria-hidden]"))
              .filter((control) => getComputedStyle(control).opacity !== "0")
              .map((control) => [control.getBoundingClientRect(), control.outerHTML.slice(0, 80)])
              .filter(([{ left, right }]) => left < -1 || right > width + 1).map(([, html]) => html)""",
            width,
        )
        assert not cut, name


@pytest.mark.parametrize("path", ["kiosk.html", "label.html"])
def test_pages_of_their_own(visit: Callable[..., Visit], looks: dict[str, Any], path: str) -> None:
    assert not faults(visit(f"/ui/own/{path}", **looks).page)


@pytest.mark.parametrize("name", ["missing.html", "waiting.html"])
def test_pages_instead_of_gradios(visit: Callable[..., Visit], looks: dict[str, Any], name: str) -> None:
    begun = visit("/health", **looks)
    html = (ROOT / "ui" / "static" / name).read_text().replace("location.reload()", "0")  # which ends what looks at it
    begun.page.route("**/ui/instead", lambda route: route.fulfill(body=html, content_type="text/html"))
    begun.open("/ui/instead")
    assert not faults(begun.page)


def test_a_fault_would_be_found(visit: Callable[..., Visit]) -> None:
    page = open_tab(visit(), "Placard")
    page.evaluate("document.querySelector('.placard-choose').textContent = ''")
    assert [fault for fault in faults(page) if fault.startswith("button-name")]
