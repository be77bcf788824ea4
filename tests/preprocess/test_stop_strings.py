"""The stop automaton against the obvious way of searching, for any text, strings and chunks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from preprocess.stop_strings import Match, StopMatcher

SMALL = st.text("ab", min_size=1, max_size=4)  # two letters: overlaps and repeats in nearly every case
STOPS = st.lists(SMALL, min_size=1, max_size=4)


def naive(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The first end, and the longest string that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@settings(max_examples=500)
@given(chunks=st.lists(st.text("abc", max_size=5), max_size=8), stops=STOPS)
def test_the_first_end_wins_then_the_longest(chunks: list[str], stops: list[str]) -> None:
    matcher, read = StopMatcher(stops), ""
    for chunk in chunks:
        match = matcher.feed(chunk)
        expected = naive(read + chunk, stops)
        if expected is not None:
            assert match == Match(expected[1], expected[0] - len(read))
            return
        assert match is None
        read += chunk
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
        assert matcher.held == max(
            length for length in range(len(read) + 1) if read[len(read) - length :] in beginnings
        )


@given(text=st.text("ab", max_size=12), more=st.text("abc", max_size=8), stops=STOPS)
def test_ignored_matches_are_ordinary_text(text: str, more: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed(text, ignore=True) is None
    expected = next(
        (
            (end, max((s for s in stops if (text + more)[:end].endswith(s)), key=len))
            for end in range(len(text) + 1, len(text + more) + 1)
            if any((text + more)[:end].endswith(s) for s in stops)
        ),
        None,
    )
    match = matcher.feed(more)
    assert match == (None if expected is None else Match(expected[1], expected[0] - len(text)))


def test_long_runs_are_linear() -> None:
    """A thousand characters of a stop string, nearly matched a hundred times over."""
    matcher = StopMatcher(["a" * 999 + "b"])
    assert matcher.feed("a" * 100_000) is None
    assert matcher.held == 999
    assert matcher.feed("b") == Match("a" * 999 + "b", 1)
