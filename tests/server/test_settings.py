"""One settings tree: sources, checks, and what is made of it."""

from __future__ import annotations

import msgspec
import pytest
from PIL import Image

from engine.config import EngineConfig
from preprocess.config import PictureBound, PreprocessConfig
from server import model_source
from server.options.option import SettingsError, environment_name, is_service_link
from server.settings import CPU_ENCODER_OPERATIONS, OPTIONS, Settings


def test_defaults_pass_their_own_checks():
    assert Settings.load({}, {}) == Settings()


def test_defaults_agree_with_the_configs_that_they_fill():
    on_gpu = Settings(device="cuda")
    assert on_gpu.engine_config() == EngineConfig(model="", device="cuda")
    assert on_gpu.preprocess_config() == PreprocessConfig(model="")
    on_cpu = Settings(device="cpu")
    assert on_cpu.engine_config() == EngineConfig(model="", largest=PictureBound(0, CPU_ENCODER_OPERATIONS))
    assert on_cpu.preprocess_config() == PreprocessConfig(model="", largest=PictureBound(0, CPU_ENCODER_OPERATIONS))
    assert Settings(max_picture_tokens=9).preprocess_config().largest == PictureBound(9)


@pytest.mark.parametrize("found", [True, False])
def test_a_device_left_open_is_looked_for(monkeypatch: pytest.MonkeyPatch, found: bool):
    monkeypatch.setattr("server.settings.has_gpu", lambda: found)
    config = Settings().engine_config()
    assert config.device == "auto"
    assert config.largest == PictureBound(0, 0 if found else CPU_ENCODER_OPERATIONS)


def test_command_line_beats_environment_beats_default():
    environment = {"BEHOLDER_PORT": "1111", "BEHOLDER_WORKERS": "3", "HOME": "/root"}
    settings = Settings.load({"port": "2222", "host": None}, environment)
    assert (settings.port, settings.workers, settings.host) == (2222, 3, "127.0.0.1")


def test_every_picture_that_an_option_can_allow_is_one_that_pillow_opens():
    assert OPTIONS["max_image_pixels"].option.high == 2 * (Image.MAX_IMAGE_PIXELS or 0)


def test_an_empty_variable_is_not_set():
    assert Settings.load({}, {"BEHOLDER_PORT": ""}).port == Settings().port


def test_variables_of_the_client_programs_are_no_options():
    assert Settings.load({}, {"BEHOLDER_URL": "http://127.0.0.1:9000", "BEHOLDER_KEY": "k"}) == Settings()


def test_addresses_that_kubernetes_gives_every_pod_are_left_aside_with_a_warning(caplog: pytest.LogCaptureFixture):
    links = {
        "BEHOLDER_PORT": "tcp://10.96.0.7:8000",
        "BEHOLDER_SERVICE_HOST": "10.96.0.7",
        "BEHOLDER_SERVICE_PORT": "8000",
        "BEHOLDER_SERVICE_PORT_HTTP": "8000",
        "BEHOLDER_PORT_8000_TCP": "tcp://10.96.0.7:8000",
        "BEHOLDER_PORT_8000_TCP_PROTO": "tcp",
        "BEHOLDER_PORT_8000_TCP_PORT": "8000",
        "BEHOLDER_PORT_8000_TCP_ADDR": "10.96.0.7",
        "BEHOLDER_UI_PORT": "tcp://10.96.0.8:80",
        "BEHOLDER_UI_SERVICE_HOST": "10.96.0.8",
    }
    assert Settings.load({}, links) == Settings()
    assert all(name in caplog.text for name in links)
    assert "enableServiceLinks" in caplog.text
    assert Settings.load({}, {**links, "BEHOLDER_PORT": "8001"}).port == 8001
    assert not any(is_service_link(environment_name(name), "tcp://10.0.0.1:1") for name in OPTIONS if name != "port")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_can_be_set_by_its_variable_and_round_trips(name):
    field = OPTIONS[name]
    changed = {
        bool: "off" if field.default is True else "on",
        tuple: "https://a.example,https://b.example" if name == "allowed_origins" else "a.example,b.example",
        str: field.choices[-1] if field.choices else "word",
        int: str(int(field.option.high or 0)),
        float: str(field.option.high),
    }[field.kind]
    others = {"max_body_mb": "4096"} if name == "max_image_mb" else {}
    settings = Settings.load(others, {environment_name(name): changed})
    assert getattr(settings, name) != field.default
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name].option.low is not None])
def test_every_bound_is_checked_and_named(name):
    option = OPTIONS[name].option
    for value in (option.low - 1, option.high + 1):
        with pytest.raises(SettingsError, match=rf"^{environment_name(name)}: expected .*got '{value}'$"):
            Settings.load({}, {environment_name(name): str(value)})


@pytest.mark.parametrize(
    ("given", "environment", "message"),
    [
        ({}, {"BEHOLDER_PROT": "1"}, "Unknown environment variable BEHOLDER_PROT. Did you mean BEHOLDER_PORT?"),
        ({}, {"BEHOLDER_port": "1"}, "Unknown environment variable BEHOLDER_port."),
        ({"max_imagse": 1}, {}, "Unknown option max_imagse. Did you mean max_images?"),
        ({"zzz": 1}, {}, "Unknown option zzz."),
        ({"port": "http"}, {}, "--port: expected a whole number from 0 to 65535, got 'http'"),
        ({"port": 1.5}, {}, "--port: expected a whole number from 0 to 65535, got 1.5"),
        ({"port": True}, {}, "--port: expected a whole number"),
        ({"max_image_pixels": 0}, {}, "--max-image-pixels: expected a whole number from 1 to 178956970, got 0"),
        ({"grace_s": "nan"}, {}, "--grace-s: expected a number of s from 0 to 3600, got 'nan'"),
        ({"dtype": "int8"}, {}, "--dtype: expected one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"prefix_cache": "maybe"}, {}, "--prefix-cache: expected true or false, got 'maybe'"),
        ({"host": ""}, {}, "--host: expected an address"),
        ({"allowed_origins": "example.org"}, {}, "--allowed-origins: 'example.org' is no origin"),
        ({"allowed_hosts": "http://example.org"}, {}, "--allowed-hosts: 'http://example.org' is no host name"),
        (
            {"image_store_mb": 0, "image_ttl_s": 60},
            {},
            "--image-ttl-s is how long uploads stay",
        ),
        ({"max_image_mb": 100}, {}, "--max-image-mb 100 is larger than --max-body-mb 64"),
        ({"allowed_hosts": [1]}, {}, "--allowed-hosts: expected words with commas between them"),
    ],
)
def test_what_cannot_be_is_refused_in_words(given, environment, message):
    with pytest.raises(SettingsError) as refusal:
        Settings.load(given, environment)
    assert str(refusal.value).startswith(message)


def test_a_bad_api_key_is_not_repeated():
    with pytest.raises(SettingsError, match="--api-key") as refusal:
        Settings.load({"api_key": "se cret"})
    assert "cret" not in str(refusal.value)
    with pytest.raises(SettingsError) as refusal:
        Settings.load({"api_key": 12345})
    assert "12345" not in str(refusal.value)


def test_the_key_is_not_in_the_repr():
    assert "hunter2" not in repr(Settings.load({"api_key": "hunter2"}))


def test_sizes_reach_the_configs_in_bytes():
    settings = Settings.load({"model": "m", "max_image_mb": 1.5, "vision_cache_mb": 2, "preprocess_memory_mb": 64})
    assert settings.preprocess_config().limits.max_image_bytes == 3 << 19
    assert settings.preprocess_config().limits.memory_bytes == 64 << 20
    assert settings.engine_config().vision_cache_bytes == 2 << 20


def test_a_model_folder_gives_the_served_name(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    settings = Settings.load({"model": str(folder)}).resolve_model()
    assert settings.model == str(folder.resolve())
    assert settings.model_names == ("my-model",)
    named = Settings.load({"model": str(folder), "served_model_name": "a, b"}).resolve_model()
    assert (named.model_name, named.model_names) == ("a", ("a", "b"))


def test_a_resolved_model_stays_resolved(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    settings = Settings.load({"model": str(tmp_path)}).resolve_model()
    assert settings.resolve_model() == settings


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("./nowhere/at/all", "there is no folder './nowhere/at/all'"),
        ("nowhere", "there is no folder 'nowhere'"),
        ("/nowhere/x", "there is no folder '/nowhere/x'"),
    ],
)
def test_no_such_folder_is_one_clear_line(model, problem):
    with pytest.raises(SettingsError, match=f"^--model: {problem}[^\n]*$"):
        Settings.load({"model": model}).resolve_model()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"holds no config\.json"):
        Settings.load({"model": str(tmp_path)}).resolve_model()


def test_a_hub_name_offline_is_one_clear_line(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SettingsError, match=r"^--model: there is no folder 'owner/name'[^\n]*cannot be reached$"):
        Settings.load({"model": "owner/name"}).resolve_model()


def test_a_model_in_the_local_hub_cache_needs_no_network(monkeypatch, tmp_path):
    """The layout of the cache is the hub client's own."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    snapshot = cached / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"^--model: 'owner/name'[^\n]*no weights as safetensors[^\n]*$"):
        Settings.load({"model": "owner/name"}).resolve_model()
    (snapshot / "model.safetensors").write_text("")
    settings = Settings.load({"model": "owner/name"}).resolve_model()
    assert settings.model == str(snapshot)
    assert settings.model_name == "owner/name"


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt", "model-q4.gguf"])
def test_weights_in_other_formats_are_refused_in_one_line(weights, tmp_path):
    for file in ("config.json", weights):
        (tmp_path / file).write_text("{}")
    with pytest.raises(SettingsError, match=rf"^--model: the weights in [^\n]*{weights}[^\n]*never read[^\n]*$"):
        Settings.load({"model": str(tmp_path)}).resolve_model()


def test_only_data_files_are_taken_from_the_hub(monkeypatch, tmp_path):
    asked = {}

    def snapshot_download(name, allow_patterns):
        asked[name] = allow_patterns
        for file in ("config.json", "model.safetensors"):
            (tmp_path / file).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    settings = Settings.load({"model": "owner/name"}).resolve_model()
    assert settings.model == str(tmp_path)
    assert settings.model_name == "owner/name"
    assert asked == {"owner/name": list(model_source.HUB_FILES)}
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pkl", "*")) for pattern in model_source.HUB_FILES)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"draft_model": "a/b", "draft_head": "c"}, "--draft-model and --draft-head: expected one of them"),
        ({"speculation": "draft-model"}, "name the model with --draft-model"),
        ({"speculation": "echo", "draft_model": "a/b"}, "--draft-model: with --speculation echo it would never guess"),
        ({"speculation": "draft-model", "draft_head": "c"}, "--speculation draft-model: name the model"),
        ({"speculation": "none", "draft_head": "c"}, "--draft-head: with --speculation none it would never guess"),
    ],
)
def test_drafters_that_would_never_be_asked_are_refused(options, complaint):
    with pytest.raises(SettingsError, match=complaint):
        Settings.load(options)


def test_drafters_become_folders(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    settings = Settings.load({}, {"BEHOLDER_DRAFT_HEAD": str(tmp_path)}).resolve_model()
    assert settings.engine_config().draft_head == str(tmp_path.resolve())
    assert Settings.load({"draft_model": str(tmp_path)}).resolve_model().draft_model == str(tmp_path.resolve())
    assert Settings.load({}).resolve_model().draft_model == ""
    with pytest.raises(SettingsError, match="--draft-model: there is no folder"):
        Settings.load({"draft_model": "nowhere"}).resolve_model()
