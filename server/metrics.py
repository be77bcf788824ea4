"""What `/metrics` tells, under vLLM's names where vLLM has one, so that its dashboards and load balancers work.

Two sources: routes observe requests here as they go; the engine's own report (`EngineStats`) is read at each scrape.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from preprocess.errors import BeholderError
from preprocess.wire import Delta, FinishReason
from server.service import Generation, Service

_LATENCY_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKEN_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_STAGE_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_MEDIA_CODES: Final = ("image", "video", "too_many_images", "too_many_frames", "invalid_data_url", "remote_")

# vLLM's name, what it is, and the field of EngineStats. Totals begin at 0 again when the engine restarts.
_ENGINE_TOTALS: Final = (
    ("vllm:prompt_tokens", "Prompt tokens processed.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens"),
    ("vllm:num_preemptions", "Sequences retracted because memory ran out.", "num_retracted"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queried_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("vllm:mm_cache_queries", "Pictures looked up in the vision cache.", "vision_queries"),
    ("vllm:mm_cache_hits", "Pictures found in the vision cache.", "vision_hits"),
    ("beholder_engine_steps", "Steps of the engine.", "num_steps"),
    (
        "beholder_engine_steps_over_target",
        "Steps beside decoding that took longer than the inter-token target.",
        "steps_over_target",
    ),
    ("beholder_encoder_slices", "Slices of pictures (a layer or two each) encoded beside decoding.", "encoder_slices"),
)
# The same by who guessed the tokens: the end of the field's name.
_DRAFT_TOTALS: Final = (
    ("vllm:spec_decode_num_draft_tokens", "Tokens guessed ahead and checked, by who guessed them.", "drafted"),
    ("vllm:spec_decode_num_accepted_tokens", "Tokens guessed ahead rightly, by who guessed them.", "accepted"),
)
_SOURCES: Final = ("ngram", "echo", "grammar", "habit", "draft-model", "head")


class Metrics:
    """The registry of one server and everything that routes report to it."""

    def __init__(self, model_name: str, service: Service, arena_bytes: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(name, text, ["model_name"], registry=self.registry, buckets=tuple(buckets))
            return family.labels(**self._labels)

        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, ["model_name", label], registry=self.registry)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _LATENCY_S)
        self._itl = _TokenGaps(self._labels)
        self.registry.register(self._itl)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _LATENCY_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "Time waiting in the engine.", _LATENCY_S)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Time in prefill.", _LATENCY_S)
        self._decode = histogram("vllm:request_decode_time_seconds", "Time in decode.", _LATENCY_S)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens generated for a choice.", _TOKENS)
        self._success = counter("vllm:request_success", "Choices finished, by reason.", "finished_reason")
        self._image_decode = histogram("beholder_image_decode_seconds", "Decoding the pictures.", _STAGE_S)
        self._preprocess = histogram("beholder_preprocess_seconds", "A request in its preprocess worker.", _STAGE_S)
        self._vision = histogram("beholder_vision_encode_seconds", "Vision encoder time of a request.", _STAGE_S)
        self._images = Counter("beholder_images", "Pictures taken in.", ["model_name"], registry=self.registry).labels(
            **self._labels
        )
        self._clips = histogram("beholder_clip_frames", "Frames of a clip that were looked at.", _TOKENS)
        self._clip_decode = histogram("beholder_clip_decode_seconds", "Decoding the clips.", _STAGE_S)
        self._image_tokens = histogram("beholder_image_tokens", "Vision tokens of a picture.", _TOKENS)
        self._media_rejected = counter("beholder_media_rejected", "Requests refused for a picture or clip.", "reason")
        self._refused = counter("beholder_requests_refused", "Requests answered with an error, by code.", "code")
        self.registry.register(_ServiceCollector(self._labels, service, arena_bytes))
        for reason in ("stop", "length", "abort", "error"):  # A dashboard finds the series before the first event.
            self._success.labels(finished_reason=reason, **self._labels)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def refused(self, error: BeholderError) -> None:
        """A request was answered with an error instead of text."""
        self._refused.labels(code=error.code, **self._labels).inc()
        if error.code.startswith(_MEDIA_CODES):
            self._media_rejected.labels(reason=error.code, **self._labels).inc()

    def admitted(self, generation: Generation) -> None:
        """A request passed preprocessing and admission."""
        self._prompt.observe(generation.num_prompt_tokens)
        self._preprocess.observe(generation.preprocess_ms / 1e3)
        if generation.clips:
            self._clip_decode.observe(generation.decode_ms / 1e3)
            for clip in generation.clips:
                self._clips.observe(len(clip.frame_times_s))
        if generation.images:
            self._images.inc(len(generation.images))
            if not generation.clips:
                self._image_decode.observe(generation.decode_ms / 1e3)
            for image in generation.images:
                self._image_tokens.observe(image.num_tokens)

    def first_token(self, seconds: float) -> None:
        """The first token of a request came so long after its arrival."""
        self._ttft.observe(seconds)

    def tokens(self, seconds: float, num_tokens: int) -> None:
        """A choice got `num_tokens` more, `seconds` after its last ones."""
        self._itl.add(seconds, num_tokens)

    def choice_finished(self, delta: Delta, arrival_s: float) -> None:
        """A choice ended with this delta."""
        self._e2e.observe(time.monotonic() - arrival_s)
        self.finished(delta.finish_reason or "error")
        usage = delta.usage
        if usage is not None:
            self._generated.observe(usage.completion_tokens)
            self._queue.observe(usage.queue_ms / 1e3)
            self._prefill.observe(usage.prefill_ms / 1e3)
            self._decode.observe(usage.decode_ms / 1e3)
            if usage.image_tokens:
                self._vision.observe(usage.vision_ms / 1e3)

    def finished(self, reason: FinishReason, num_choices: int = 1) -> None:
        """Choices ended for this reason."""
        self._success.labels(finished_reason=reason, **self._labels).inc(num_choices)


class _TokenGaps(Collector):
    """The histogram that every token is counted in: a tenth of the time of prometheus_client's, which locks, and which
    still says what a histogram's samples are.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        name, text = "vllm:inter_token_latency_seconds", "Time between tokens of a choice."
        self._empty = Histogram(name, text, list(labels), registry=None, buckets=_TOKEN_S)
        self._empty.labels(**labels)
        self._counts = [0] * (len(_TOKEN_S) + 1)  # one more is for all that are longer
        self._sum_s = 0.0

    def add(self, seconds: float, num_tokens: int) -> None:
        """So many came at once, so long after those before."""
        self._counts[bisect_left(_TOKEN_S, seconds / num_tokens)] += num_tokens
        self._sum_s += seconds

    def collect(self) -> Iterable[Metric]:
        """All buckets, each with those below it; how many there are; their sum; and since when."""
        values: list[float] = [*itertools.accumulate(self._counts), sum(self._counts), self._sum_s]
        for family in self._empty.collect():
            filled = [sample._replace(value=value) for sample, value in zip(family.samples, values, strict=False)]
            family.samples = filled + family.samples[len(values) :]
            yield family


class _ServiceCollector(Collector):
    """Reads the dispatcher at each scrape."""

    def __init__(self, labels: dict[str, str], service: Service, arena_bytes: int) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._service = service
        self._arena_bytes = arena_bytes
        self._started = Gauge("beholder_start_time_seconds", "Start of the server process.", registry=None)
        self._started.set_to_current_time()

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are known only by collecting."""
        return []

    def collect(self) -> Iterable[Metric]:
        """All values as they are now."""
        service = self._service
        stats = service.stats
        waiting = (stats.num_waiting if stats else 0) + service.num_preparing
        usage = stats.kv_slots_used / stats.kv_slots_total if stats and stats.kv_slots_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences that decode.", stats.num_running if stats else 0)
        yield self._gauge("vllm:num_requests_waiting", "Requests in preparation or waiting for the engine.", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is full.", usage)
        yield self._gauge("beholder_requests_preparing", "Requests in preparation.", service.num_preparing)
        yield self._gauge("beholder_arena_used_bytes", "Pixel arena under lease.", service.arena_bytes_used)
        yield self._gauge("beholder_arena_size_bytes", "Size of the pixel arena.", self._arena_bytes)
        yield self._gauge(
            "beholder_vision_cache_bytes",
            "Bytes of finished picture embeddings.",
            stats.vision_cache_bytes if stats else 0,
        )
        yield self._gauge(
            "beholder_encoding_bytes",
            "What the picture that is being encoded keeps between steps.",
            stats.encoding_bytes if stats else 0,
        )
        yield self._gauge(
            "beholder_device_bytes",
            "Memory of the GPU that the engine's tensors take.",
            stats.device_bytes if stats else 0,
        )
        yield self._gauge("beholder_ready", "Whether a request sent now would be served.", int(service.ready))
        for name, text, field in _ENGINE_TOTALS:
            family = CounterMetricFamily(name, text, labels=self._names)
            family.add_metric(self._values, getattr(stats, field, 0))
            yield family
        for name, text, field in _DRAFT_TOTALS:
            family = CounterMetricFamily(name, text, labels=[*self._names, "source"])
            for source in _SOURCES:
                total = getattr(stats, f"{field}_{source.replace('-', '_')}", 0)
                family.add_metric([*self._values, source], total)
            yield family
        restarts = CounterMetricFamily(
            "beholder_child_deaths",
            "Child processes that died and were restarted, by role.",
            labels=[*self._names, "role"],
        )
        for role, count in service.deaths().items():
            restarts.add_metric([*self._values, role], count)
        yield restarts
        yield from self._started.collect()

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family
