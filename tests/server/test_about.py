"""What a server tells of itself: options that clients can use, and nothing that is nobody's business."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from server.app import create_app
from server.settings import OPTIONS, Settings


def test_the_server_tells_its_limits(client: Any, settings: Settings) -> None:
    about = client.get("/v1/server").json()
    assert (about["object"], about["models"]) == ("server", ["tiny", "alias"])
    assert 0 <= time.time() - about["created"] < 60
    options = {option["name"]: option for option in about["options"]}
    assert options["max_images"] == {
        "name": "max_images",
        "value": 3,
        "unit": "",
        "help": OPTIONS["max_images"].option.help,
    }
    assert options["max_image_mb"]["value"] == settings.max_image_mb
    assert options["device"]["value"] == "cpu"


def test_keys_folders_and_addresses_are_not_told(client_of: Any, service: Any, tmp_path: Path) -> None:
    secret = {
        "api_key": "swordfish",
        "allowed_hosts": "inner.example",
        "presets": str(tmp_path),
        "model": str(tmp_path),
    }
    app = create_app(Settings.load(secret), service)
    told = client_of(app, authorization="Bearer swordfish").get("/v1/server").text
    assert not [value for value in (*secret.values(), "api_key", "127.0.0.1") if value in told]
    assert client_of(app).get("/v1/server").status_code == 401


def test_the_card_is_the_readme_of_the_model(client_of: Any, service: Any, tmp_path: Path) -> None:
    client = client_of(create_app(Settings.load({"model": str(tmp_path)}), service))
    missing = client.get("/v1/card")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "card_not_found")
    (tmp_path / "README.md").write_text("# Tiny\n\nKnows drawings.\n")
    card = client.get("/v1/card")
    assert card.headers["content-type"].startswith("text/markdown")
    assert card.text == "# Tiny\n\nKnows drawings.\n"
