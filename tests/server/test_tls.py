"""https: a certificate of one's own, kept and renewed; what cannot be used is refused at start."""

from __future__ import annotations

import json
import os
import ssl
import stat
from pathlib import Path

import httpx
import pytest
from serving import Served
from websockets.sync.client import connect

from server.options.option import SettingsError
from server.settings import Settings
from server.tls import names_of, self_signed, with_certificate

NAMES = ["127.0.0.1", "::1", "gallery.local"]


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_a_certificate_is_kept_and_only_its_owner_can_read_the_key(tmp_path: Path):
    first, key = self_signed(NAMES, tmp_path / "kept")
    before = first.read_bytes()
    assert self_signed(NAMES[:2], tmp_path / "kept")[0].read_bytes() == before
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert sorted(path.name for path in key.parent.iterdir()) == ["certificate.pem", "key.pem"]


@pytest.mark.parametrize("spoil", ["another name", "no certificate", "no key"])
def test_a_certificate_that_does_not_fit_is_made_anew(spoil: str, tmp_path: Path):
    certificate, key = self_signed(NAMES, tmp_path)
    before = certificate.read_bytes()
    if spoil == "no certificate":
        certificate.write_text("nonsense")
    elif spoil == "no key":
        key.unlink()
    wanted = [*NAMES, "192.0.2.7"] if spoil == "another name" else NAMES
    certificate, key = self_signed(wanted, tmp_path)
    assert certificate.read_bytes() not in {before, b"nonsense"}
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)


def test_a_certificate_names_what_the_server_answers_to():
    assert set(names_of(Settings(host="192.0.2.1", allowed_hosts=("gallery.local", "*")))) >= {
        "localhost",
        "127.0.0.1",
        "::1",
        "192.0.2.1",
        "gallery.local",
    }
    assert "*" not in names_of(Settings(allowed_hosts=("*",)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls_certificate": "a.pem"}, "expected both or none"),
        ({"tls_certificate": "a.pem", "tls_key": "b.pem", "https_self_signed": True}, "expected no --tls-certificate"),
    ],
)
def test_half_of_what_https_needs_is_refused(given: dict[str, object], message: str):
    with pytest.raises(SettingsError, match=message):
        with_certificate(Settings.load(given))


def test_files_that_are_no_certificate_are_refused_by_name(tmp_path: Path):
    (tmp_path / "a.pem").write_text("nonsense")
    settings = Settings.load({"tls_certificate": tmp_path / "a.pem", "tls_key": tmp_path / "b.pem"})
    with pytest.raises(SettingsError, match=r"--tls-certificate .*a\.pem"):
        with_certificate(settings)


def test_the_server_speaks_https_and_secure_websockets(tiny_model: Path, state_home: Path):
    with Served(tiny_model, shell='exec "$@" --https-self-signed') as served:
        assert served.url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(state_home / "beholder" / "certificate.pem"))
        with httpx.Client(base_url=served.url, verify=trust) as client:
            assert client.get("/ready").json()["status"] == "ready"
            assert client.get("/v1/models", headers={"origin": served.url}).status_code == 200
        address = served.url.replace("https", "wss") + "/v1/stream"
        with connect(address, ssl=trust, subprotocols=["vlm.stream.v1"]) as socket:  # type: ignore[list-item]
            assert json.loads(socket.recv())["type"] == "session.created"
    assert os.listdir(state_home) == ["beholder"]
