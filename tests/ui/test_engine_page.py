"""The page Engine: numbers worked out right, moving under load, and honest when there is no answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import PICTURES, Visit, until
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from serving import Served

BOUNDS = (0.01, 0.05, 0.1, 0.5)


@pytest.fixture
def page(visit: Callable[..., Visit]) -> Any:
    return open_tab(visit())


def open_tab(visit: Visit) -> Any:
    visit.page.get_by_role("tab", name="Engine").click()
    visit.page.wait_for_selector("beholder-engine .engine-figure")
    return visit.page


def figure(page: Any, title: str) -> dict[str, str]:
    """The numbers of a figure by their names."""
    place = page.locator(".engine-figure", has=page.get_by_role("heading", name=title, exact=True))
    names = place.locator("dt").all_inner_texts()
    return dict(zip(names, place.locator("dd").all_inner_texts(), strict=True))


def number(shown: str) -> float:
    """Of a figure; none yet is 0."""
    return float(shown.removesuffix(" %").replace(",", "").replace("–", "0"))


@pytest.fixture
def load(served_ui: Served) -> Iterator[None]:
    """Somebody asks about pictures, without a pause."""
    done = threading.Event()

    def ask() -> None:
        picture = (PICTURES / "garden.jpg").read_bytes()
        while not done.is_set():
            served_ui.caption(picture)

    asking = threading.Thread(target=ask)
    asking.start()
    yield
    done.set()
    asking.join()


def test_numbers_and_lines_move_under_load(page: Any, load: None) -> None:
    page.wait_for_function(
        """() => { const lines = [...document.querySelectorAll(".engine-figure:nth-child(-n + 5) .chart-line")];
          return lines.length >= 5 && lines.every((line) => line.getAttribute("d")?.length > 10); }"""
    )

    def rates() -> list[float]:
        tokens = figure(page, "Tokens a second")
        return [number(tokens[name]) for name in ("written", "read")]

    until(page, lambda: min(rates()) > 1)
    for title in ("Time to first token", "Time between tokens"):
        until(page, lambda title=title: all(one.endswith((" ms", " s")) for one in figure(page, title).values()))
    until(page, lambda: number(figure(page, "KV cache")["prefix hits"]) > 50)  # always the same picture
    until(page, lambda: "–" not in page.locator(".engine-stages dl").inner_text())
    assert "write" in page.locator(".stage-bar").get_attribute("aria-label")
    before = page.locator(".chart").nth(3).get_attribute("aria-label")
    page.wait_for_function("(before) => document.querySelectorAll('.chart')[3].ariaLabel !== before", arg=before)
    assert page.locator(".engine-state").inner_text().startswith(("At work", "Ready"))


def test_limits_and_the_models_card(page: Any) -> None:
    page.get_by_text("Limits and options").click()
    row = page.locator(".engine-options tr", has_text="--max-images").inner_text().split("\t")
    assert row == ["--max-images", "16", "Most pictures in one request."]
    page.get_by_text("Model card").click()
    card = page.locator(".engine-card")
    assert card.get_by_role("heading", name="What it can and cannot do").is_visible()
    assert card.locator("table").first.locator("th").count() == 6
    assert page.locator(".engine-about").inner_text().startswith("beholder on Beholder ")


def test_a_card_brings_nothing_but_words(page: Any) -> None:
    card = (
        "---\nlicense: x\n---\n# One\n\nA *b* **c** `d`, [e](javascript:alert(1)) <img src=x onerror=alert(1)>\n"
        "- f\n- g\n  h\n\n| i | j |\n|---|---|\n| k | <b>l</b> |\n\n```\n# m\n```\n"
    )
    html = page.evaluate(
        """async (text) => {
          const { markdown } = await import("/ui/own/markdown.js");
          const place = document.createElement("div");
          place.append(markdown(text));
          return place.innerHTML;
        }""",
        card,
    )
    assert html == (
        "<h3>One</h3><p>A <em>b</em> <strong>c</strong> <code>d</code>, e &lt;img src=x onerror=alert(1)&gt;</p>"
        '<ul><li>f</li><li>g h</li></ul><div class="card-table" tabindex="0" role="group" aria-label="Table">'
        "<table><tr><th>i</th><th>j</th></tr><tr><td>k</td><td>&lt;b&gt;l&lt;/b&gt;</td></tr></table></div>"
        '<pre tabindex="0"># m</pre>'
    )


def test_percentiles_are_those_of_prometheus(page: Any) -> None:
    """Two scrapes: what was seen between them counts, spread evenly within its bucket."""
    registry = CollectorRegistry()
    times = Histogram("times", "t", ["model_name"], registry=registry, buckets=BOUNDS).labels("m")
    count = Counter("answers", "a", ["reason"], registry=registry)
    texts = []
    for seen in ([0.02] * 50, [0.07] * 8 + [0.3] * 2):
        for value in seen:
            times.observe(value)
            count.labels('a "stop"').inc()
        texts.append(generate_latest(registry).decode())
    results = page.evaluate(
        """async (texts) => {
          const { growth, mean, parse, percentile, rate } = await import("/ui/own/metrics.js");
          const window = texts.map((text, index) => ({ timeS: 10 * index, values: parse(text) }));
          const empty = [window[1], window[1]];
          return [0.5, 0.8, 0.9, 1].map((share) => percentile(window, "times", share)).concat(
            mean(window, "times"), rate(window, "answers_total", { reason: 'a \\\\"stop\\\\"' }),
            growth(window, "answers_total"), percentile(empty, "times", 0.5), mean(empty, "times"));
        }""",
        texts,
    )
    assert results == pytest.approx([0.05 + 0.05 * 5 / 8, 0.1, 0.3, 0.5, 0.116, 1, 10, None, None])


def test_a_restart_is_a_gap_and_no_negative_rate(page: Any) -> None:
    results = page.evaluate(
        """async () => {
          const { Samples, parse } = await import("/ui/own/metrics.js");
          const samples = new Samples(100);
          const at = (start, count) => parse(`beholder_start_time_seconds ${start}\\nn_total ${count}`);
          samples.add(1, at(5, 10)), samples.add(2, at(5, 20)), samples.add(3, null), samples.add(4, at(5, 40));
          samples.add(5, at(9, 1)), samples.add(6, at(9, 3));
          return [0, 1, 2, 3, 4, 5].map((end) => samples.window(30, end)?.map(({ timeS }) => timeS) ?? null);
        }"""
    )
    assert results == [None, [1, 2], None, None, None, [5, 6]]


def test_a_server_that_dies_is_told_and_comes_back(browser: Any, served_ui: Served) -> None:
    visit = Visit(browser, served_ui.url)
    visit.expect_errors("Failed to load resource|ERR_")
    visit.open()
    page = open_tab(visit)
    page.wait_for_selector(".engine[data-state=ready]")
    (pid,) = served_ui.pids("server")
    os.kill(served_ui.process.pid, signal.SIGSTOP)  # so that nobody restarts what dies
    try:
        os.kill(pid, signal.SIGSTOP)
        page.wait_for_selector(".engine[data-state=no-answer]")
        assert "goes on by itself" in page.locator(".engine-head").inner_text()
        assert page.locator(".engine [role=status]").inner_text().startswith("No answer")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.kill(served_ui.process.pid, signal.SIGCONT)
    page.wait_for_selector(".engine[data-state=ready]")
    assert "up" in page.locator(".engine-state").inner_text()
    visit.close()
