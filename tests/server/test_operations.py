"""Models, health, readiness, metrics, request ids, and errors of the router itself."""

from __future__ import annotations

import re

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from preprocess.errors import ClientError, ServiceError
from preprocess.wire import EngineStats
from server.engine_totals import EngineTotals

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    kv_slots_used=25,
    kv_slots_total=100,
    num_steps=10,
    num_retracted=1,
    prompt_tokens=500,
    generated_tokens=60,
    prefix_queried_tokens=400,
    prefix_hit_tokens=300,
    vision_queries=8,
    vision_hits=6,
    vision_cache_bytes=4096,
    encoding_bytes=2048,
    device_bytes=1 << 36,
    encoder_slices=30,
    steps_over_target=2,
    drafted_echo=70,
    accepted_echo=65,
    accepted_grammar=9,
    drafted_draft_model=12,
    accepted_draft_model=7,
    accepted_head=3,
)


def test_models_lists_every_name(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "alias"]
    assert client.get("/v1/models/alias").json() == listed["data"][1]
    assert listed["data"][0].keys() == {"id", "object", "created", "owned_by"}


def test_an_unknown_model_is_a_404(client):
    response = client.get("/v1/models/owner/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_health_says_ok_whatever_the_children_do(client, service):
    service.ready = False
    assert client.get("/health").json() == {"status": "ok"}


def test_ready_tells_every_child(client, service):
    children = {"engine": "up", "preprocess-0": "signal SIGKILL"}
    ready = client.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "children": children})
    service.ready = False
    starting = client.get("/ready")
    assert (starting.status_code, starting.json()) == (503, {"status": "starting", "children": children})
    service.draining = True
    draining = client.get("/ready")
    assert (draining.status_code, draining.json()["status"]) == (503, "draining")


def test_version_is_told(client):
    assert client.get("/version").json().keys() == {"version"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models"])
def test_head_is_get_without_a_body(client, path):
    response = client.request("HEAD", path)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/openapi.json", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/captions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
    ],
)
def test_the_routers_own_errors_have_the_same_shape(client, method, path, status, code):
    response = client.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert f"{method} {path}" in error["message"]
    assert ("allow" in response.headers) == (status == 405)


# ---- request ids ----------------------------------------------------------------------------------------------------


def test_a_sane_request_id_is_echoed_on_every_response(client):
    for method, path in (("GET", "/health"), ("GET", "/nowhere"), ("POST", "/v1/chat/completions")):
        assert client.request(method, path, headers={"x-request-id": "my-id.7"}).headers["x-request-id"] == "my-id.7"
    refused = client.get("/health", headers={"x-request-id": "my-id", "host": "evil.example"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (403, "my-id")


@pytest.mark.parametrize("given", [None, "", "a b", "a" * 129, "<script>", "a\tb"])
def test_another_request_id_is_replaced(client, given):
    headers = {} if given is None else {"x-request-id": given}
    first, second = (client.get("/health", headers=headers).headers["x-request-id"] for _ in range(2))
    assert re.fullmatch(r"req-[0-9a-f]{24}", first)
    assert first != second


def test_requests_are_logged_with_their_id_and_probes_are_not(client, caplog):
    caplog.set_level("INFO", "beholder.server")
    client.get("/health")
    client.get("/v1/models", headers={"x-request-id": "mine"})
    client.get("/v1/a%0Ab", headers={"x-request-id": "other"})
    (first, second) = caplog.messages
    assert re.fullmatch(r"GET '/v1/models' 200 in \d+ ms, mine", first)
    assert re.fullmatch(r"GET '/v1/a\\nb' 404 in \d+ ms, other", second)


# ---- metrics --------------------------------------------------------------------------------------------------------


def samples(client):
    text = client.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name", "tiny") == "tiny"
            found[sample.name, *sorted(sample.labels.values())] = sample.value
    return found


def test_the_engines_report_is_shown_under_vllms_names(client, service):
    service.stats = STATS
    service.num_preparing, service.arena_bytes_used = 4, 1024
    seen = samples(client)
    assert seen["vllm:num_requests_running",] == 3
    assert seen["vllm:num_requests_waiting",] == 6
    assert seen["vllm:kv_cache_usage_perc",] == 0.25
    assert seen["vllm:prompt_tokens_total",] == 500
    assert seen["vllm:generation_tokens_total",] == 60
    assert seen["vllm:num_preemptions_total",] == 1
    assert seen["vllm:prefix_cache_queries_total",] == 400
    assert seen["vllm:prefix_cache_hits_total",] == 300
    assert seen["vllm:mm_cache_queries_total",] == 8
    assert seen["vllm:mm_cache_hits_total",] == 6
    assert seen["vllm:spec_decode_num_draft_tokens_total", "echo"] == 70
    assert seen["vllm:spec_decode_num_draft_tokens_total", "ngram"] == 0
    assert seen["vllm:spec_decode_num_accepted_tokens_total", "echo"] == 65
    assert seen["vllm:spec_decode_num_accepted_tokens_total", "grammar"] == 9
    assert seen["vllm:spec_decode_num_draft_tokens_total", "draft-model"] == 12
    assert seen["vllm:spec_decode_num_accepted_tokens_total", "draft-model"] == 7
    assert seen["vllm:spec_decode_num_accepted_tokens_total", "head"] == 3
    assert seen["beholder_engine_steps_total",] == 10
    assert seen["beholder_engine_steps_over_target_total",] == 2
    assert seen["beholder_encoder_slices_total",] == 30
    assert seen["beholder_encoding_bytes",] == 2048
    assert seen["beholder_device_bytes",] == 1 << 36
    assert seen["beholder_vision_cache_bytes",] == 4096
    assert seen["beholder_arena_used_bytes",] == 1024
    assert seen["beholder_arena_size_bytes",] == 64 << 20
    assert seen["beholder_child_deaths_total", "preprocess"] == 1
    assert seen["beholder_ready",] == 1


def test_before_the_first_report_everything_is_zero(client):
    seen = samples(client)
    assert seen["vllm:num_requests_running",] == seen["vllm:prompt_tokens_total",] == 0
    assert seen["vllm:request_success_total", "stop"] == 0


def test_totals_go_on_when_the_engine_restarts_however_far_the_next_one_gets_before_it_is_asked():
    totals = EngineTotals()
    assert totals.stats is None
    totals.engine_died()
    assert totals.stats is None
    totals.report(STATS)
    totals.engine_died()
    assert totals.stats is not None
    assert (totals.stats.prompt_tokens, totals.stats.num_running, totals.stats.kv_slots_used) == (500, 0, 0)
    assert totals.stats.kv_slots_total == STATS.kv_slots_total
    totals.engine_died()
    for prompt_tokens in (20, 900):
        totals.report(msgspec.structs.replace(STATS, prompt_tokens=prompt_tokens, num_running=1))
        assert (totals.stats.prompt_tokens, totals.stats.num_running) == (500 + prompt_tokens, 1)
    assert totals.stats.accepted_echo == 2 * STATS.accepted_echo


def test_requests_are_counted_with_their_times(client):
    client.chat("x")
    client.chat("x", n=2, max_tokens=2, stream=True)
    client.post("/v1/captions", content=b"x", headers={"content-type": "image/png"})
    seen = samples(client)
    assert seen["vllm:request_success_total", "stop"] == 2
    assert seen["vllm:request_success_total", "length"] == 2
    assert seen["vllm:time_to_first_token_seconds_count",] == 3
    assert seen["vllm:inter_token_latency_seconds_count",] == 5 + 2 * 1 + 5
    assert seen["vllm:e2e_request_latency_seconds_count",] == 4
    assert seen["vllm:request_queue_time_seconds_sum",] == pytest.approx(0.004)
    assert seen["vllm:request_prompt_tokens_sum",] == 60
    assert seen["vllm:request_generation_tokens_sum",] == 6 + 2 * 2 + 6
    assert seen["beholder_preprocess_seconds_count",] == 3
    assert seen["beholder_image_decode_seconds_count",] == 1
    assert seen["beholder_images_total",] == 1
    assert seen["beholder_image_tokens_sum",] == 16


def test_refusals_and_failures_are_counted_by_reason(client, service):
    client.chat("x", n=99)
    service.refusal = ClientError("x", code="image_truncated")
    client.chat("x")
    client.chat("x", stream=True)
    service.refusal = ClientError("x", code="queue_full", status=429)
    client.chat("x")
    service.refusal, service.failure = None, ServiceError("x", code="engine_restarting")
    client.chat("x", stream=True)
    seen = samples(client)
    assert seen["beholder_requests_refused_total", "invalid_value"] == 1
    assert seen["beholder_requests_refused_total", "image_truncated"] == 2
    assert seen["beholder_media_rejected_total", "image_truncated"] == 2
    assert seen["beholder_requests_refused_total", "queue_full"] == 1
    assert ("beholder_media_rejected_total", "queue_full") not in seen
    assert seen["beholder_requests_refused_total", "engine_restarting"] == 1
    assert seen["vllm:request_success_total", "error"] == 1


def test_two_applications_do_not_share_a_registry(client, client_of, settings, service):
    from server.app import create_app

    other = client_of(create_app(settings, service))
    client.chat("x")
    assert samples(client)["vllm:e2e_request_latency_seconds_count",] == 1
    assert samples(other)["vllm:e2e_request_latency_seconds_count",] == 0
