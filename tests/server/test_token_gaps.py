"""The histogram of the gaps between tokens tells what prometheus_client's own would."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from server.metrics import _TOKEN_S, Metrics
from tests.server.conftest import ScriptedService

NAME = "vllm:inter_token_latency_seconds"


def of_gaps(exposition: bytes) -> list[str]:
    """The lines about gaps, without the time since when they are counted."""
    lines = [line for line in exposition.decode().splitlines() if NAME in line]
    return [re.sub(r"(_created\{.*\}) \S+$", r"\1", line) for line in lines]


def own(gaps: Sequence[tuple[float, int]]) -> bytes:
    metrics = Metrics("a model", ScriptedService(), 0)
    for seconds, num_tokens in gaps:
        metrics.tokens(seconds, num_tokens)
    return metrics.exposition()


def prometheus_clients(gaps: Sequence[tuple[float, int]]) -> bytes:
    registry = CollectorRegistry()
    family = Histogram(NAME, "Time between tokens of a choice.", ["model_name"], registry=registry, buckets=_TOKEN_S)
    child = family.labels(model_name="a model")
    for seconds, num_tokens in gaps:
        for _ in range(num_tokens):
            child.observe(seconds / num_tokens)
    return generate_latest(registry)


@given(st.lists(st.tuples(st.integers(0, 4000).map(lambda n: n / 1024), st.sampled_from([1, 2, 4, 8]))))
def test_gaps_are_told_as_prometheus_client_tells_them(gaps: list[tuple[float, int]]) -> None:
    assert of_gaps(own(gaps)) == of_gaps(prometheus_clients(gaps))


def test_a_gap_as_long_as_a_bucket_is_in_it() -> None:
    gaps = [(bound, 1) for bound in _TOKEN_S]
    assert of_gaps(own(gaps)) == of_gaps(prometheus_clients(gaps))
