"""Host, Origin and API key: what a web page can reach of a server on this machine."""

from __future__ import annotations

import asyncio

import pytest

from server.app import create_app
from server.settings import Settings

BODY = {"messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def client_with(service, client_of):
    def make(**options):
        return client_of(create_app(Settings.load({"served_model_name": "tiny", **options}), service))

    return make


def status_for_host(client, host):
    return client.get("/v1/models", headers={"host": host}).status_code


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "localhost",
        "LOCALHOST:9",
        "localhost.",
        "[::1]:8000",
        "app.localhost",
        "127.9.9.9",
    ],
)
def test_names_of_this_machine_are_accepted(client_with, host):
    assert status_for_host(client_with(), host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "192.168.1.5",
        "localhost@evil.example",
        "evil.example/localhost",
        "localhost evil.example",
        "localhost:http",
        "",
    ],
)
def test_other_hosts_are_refused_naming_the_option(client_with, host):
    response = client_with().get("/v1/models", headers={"host": host})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in response.json()["error"]["message"]


def test_the_host_is_checked_on_every_path(client_with):
    for path in ("/health", "/ready", "/metrics", "/version", "/nowhere"):
        assert client_with().get(path, headers={"host": "evil.example"}).status_code == 403


def test_listed_and_bound_hosts_are_accepted(client_with):
    listed = client_with(allowed_hosts="beholder.example, Other.Example:80")
    assert status_for_host(listed, "beholder.example:443") == 200
    assert status_for_host(listed, "other.example") == 200
    assert status_for_host(listed, "third.example") == 403
    assert status_for_host(client_with(host="gpu.lan"), "gpu.lan:8000") == 200
    assert status_for_host(client_with(host="192.168.1.5"), "192.168.1.5:8000") == 200
    assert status_for_host(client_with(allowed_hosts="*"), "any.example") == 200


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
def test_on_every_interface_addresses_are_accepted_and_names_need_a_list_or_a_key(client_with, bound):
    open_to_all = client_with(host=bound)
    assert status_for_host(open_to_all, "192.168.1.5:8000") == 200
    assert status_for_host(open_to_all, "[fe80::1]:8000") == 200
    assert status_for_host(open_to_all, "evil.example") == 403
    response = client_with(host=bound, api_key="k").get(
        "/v1/models", headers={"host": "any.example", "authorization": "Bearer k"}
    )
    assert response.status_code == 200


# ---- Origin ---------------------------------------------------------------------------------------------------------


def post_from(client, origin, content_type="application/json", host="127.0.0.1:8000"):
    headers = {"origin": origin, "content-type": content_type, "host": host}
    return client.post("/v1/chat/completions", content=b'{"messages":[{"role":"user","content":"x"}]}', headers=headers)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://localhost", "localhost"),
        ("http://localhost:80", "localhost"),
        ("https://localhost", "localhost:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_the_same_origin_may(client_with, service, origin, host):
    response = post_from(client_with(), origin, host=host)
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "",
        "http://localhost:8000",  # another name is another origin
        "http://127.0.0.1:3000",
        "http://127.0.0.1",
        "file://127.0.0.1:8000",
        "http://127.0.0.1:8000.evil.example",
        "http://evil.example:80 http://127.0.0.1:8000",
        "http://127.0.0.1:x",
    ],
)
def test_another_origin_is_refused_naming_the_option_and_nothing_runs(client_with, service, origin, content_type):
    response = post_from(client_with(), origin, content_type)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "--allowed-origins" in response.json()["error"]["message"]
    assert "access-control-allow-origin" not in response.headers
    assert service.submitted == []


def test_an_allowed_origin_may_and_can_read_answers_and_errors(client_with):
    client = client_with(allowed_origins="https://app.example")
    response = post_from(client, "https://app.example")
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert "Origin" in response.headers["vary"]
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    missing = client.get("/nowhere", headers={"origin": "https://app.example"})
    assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, "https://app.example")
    for other in ("https://app.example:444", "http://app.example", "https://sub.app.example", "null"):
        assert post_from(client, other).status_code == 403


def test_a_star_allows_every_origin(client_with):
    assert post_from(client_with(allowed_origins="*"), "https://any.example").status_code == 200


def preflight(client, origin):
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    return client.request("OPTIONS", "/v1/chat/completions", headers=headers)


def test_a_preflight_is_answered_for_allowed_origins_only_and_needs_no_key(client_with):
    client = client_with(allowed_origins="https://app.example", api_key="k")
    response = preflight(client, "https://app.example")
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    refused = preflight(client, "https://evil.example")
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


# ---- API key --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("authorization", ["Bearer s3cret", "bearer s3cret", "Bearer  s3cret "])
def test_the_key_opens(client_with, authorization):
    client = client_with(api_key="s3cret")
    for path in ("/v1/models", "/metrics"):
        assert client.get(path, headers={"authorization": authorization}).status_code == 200


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, "missing_api_key"),
        ("s3cret", "missing_api_key"),
        ("Basic s3cret", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Bearer wrong", "invalid_api_key"),
        ("Bearer s3cretx", "invalid_api_key"),
        ("Bearer s3cré", "invalid_api_key"),
    ],
)
def test_without_the_key_nothing_of_v1_is_shown(client_with, service, authorization, code):
    client = client_with(api_key="s3cret")
    headers = {"authorization": authorization.encode()} if authorization else {}
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/nowhere"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/captions"),
        ("GET", "/metrics"),
    ):
        response = client.request(method, path, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, code)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "s3cret" not in response.text
    assert service.submitted == []


def test_probes_need_no_key(client_with):
    client = client_with(api_key="s3cret")
    assert [client.get(path).status_code for path in ("/health", "/ready", "/version")] == [200, 200, 200]


def test_a_websocket_of_another_origin_is_closed_before_it_opens(client_with, service):
    app = create_app(Settings.load({}), service)
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:8000"), (b"origin", b"https://evil.example")]
    scope = {"type": "websocket", "path": "/v1/anything", "headers": headers, "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]
