"""Every set of files that a tokenizer is published in gives the ids that transformers gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import FAMILIES

from preprocess.config import PreprocessConfig
from preprocess.errors import ServiceError
from preprocess.model_folder import ModelFolder
from preprocess.prepare import Preparer
from preprocess.tokenizer import load_tokenizer

TEXTS = [
    "Hello world 12345",
    "  Größe 写真 📷 don't\n\n x  ",
    "e\u0301 <think> a",
    "<|im_end|> y <|custom|> z",
    "line\r\nrow   end ",
]
KINDS = {"qwen2_vl": "Qwen2Tokenizer", "qwen3_vl": "Qwen2Tokenizer", "smolvlm": "GPT2Tokenizer"}

Folder = Callable[[str], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return lambda family: FAMILIES[family](tmp_path / family)


def _new_tokens(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokens that the vocabulary does not have, one special and one not."""
    first = max(token["id"] for token in tokenizer["added_tokens"])
    first = max(first, *tokenizer["model"]["vocab"].values()) + 1
    shared = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return [
        {"id": first, "content": "<|custom|>", "special": True, **shared},
        {"id": first + 1, "content": "<think>", "special": False, **shared},
    ]


def _split_up(folder: Path, kind: str, *, listed: bool) -> None:
    """`tokenizer.json` becomes the files of slow tokenizers; added tokens are `listed` in tokenizer_config.json."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": kind}
    added = [*tokenizer["added_tokens"], *_new_tokens(tokenizer)]
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"])
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    if listed:
        config["added_tokens_decoder"] = _by_id(added)
    else:
        config["extra_special_tokens"] = [token["content"] for token in added if token["special"]]
        (folder / "added_tokens.json").write_text(json.dumps({token["content"]: token["id"] for token in added}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _by_id(tokens: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(token["id"]): {name: token[name] for name in token if name != "id"} for token in tokens}


def _assert_equal(folder: Path, reference: Any) -> None:
    ours = load_tokenizer(ModelFolder(folder))
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == reference(text, add_special_tokens=False)["input_ids"]
    assert {
        token_id: (token.content, token.special) for token_id, token in ours.get_added_tokens_decoder().items()
    } == {token_id: (token.content, token.special) for token_id, token in reference.added_tokens_decoder.items()}
    Preparer(PreprocessConfig(str(folder)), None)


@pytest.mark.parametrize("listed", [True, False], ids=["added_tokens_decoder", "added_tokens.json"])
@pytest.mark.parametrize("family", KINDS)
def test_a_vocabulary_and_merges_are_enough(family: str, listed: bool, folder: Folder) -> None:
    import transformers

    path = folder(family)
    _split_up(path, KINDS[family], listed=listed)
    _assert_equal(path, getattr(transformers, KINDS[family]).from_pretrained(path))


@pytest.mark.parametrize("family", KINDS)
def test_tokens_that_only_the_configuration_names_are_added(family: str, folder: Folder) -> None:
    from transformers import PreTrainedTokenizerFast

    path = folder(family)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {
        "added_tokens_decoder": _by_id([*tokenizer["added_tokens"], *_new_tokens(tokenizer)]),
        "unk_token": "<unknown>",
        "extra_special_tokens": [*config["extra_special_tokens"], "<further>"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    _assert_equal(path, PreTrainedTokenizerFast.from_pretrained(path))


def test_the_kind_follows_the_model_where_no_file_says_it(folder: Folder) -> None:
    path = folder("qwen2_vl")
    _split_up(path, "Qwen2Tokenizer", listed=False)
    said = load_tokenizer(ModelFolder(path)).to_str()
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(ModelFolder(path)).to_str() == said


def _other_kind(folder: Path) -> None:
    _split_up(folder, "LlamaTokenizer", listed=True)


def _no_merges(folder: Path) -> None:
    _split_up(folder, "Qwen2Tokenizer", listed=True)
    (folder / "merges.txt").unlink()


def _broken_vocabulary(folder: Path) -> None:
    _split_up(folder, "Qwen2Tokenizer", listed=True)
    (folder / "vocab.json").write_text("[]")


def _gap(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {"9999": {"content": "<far>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_kind, "that of a LlamaTokenizer.*save it again"),
        (_no_merges, "no tokenizer.json in it, nor vocab.json and merges.txt"),
        (_broken_vocabulary, "vocab.json and merges.txt cannot be read"),
        (_gap, "'<far>' has the id 9999, but in its vocabulary it would get"),
    ],
)
def test_what_gives_no_tokenizer_is_refused(
    change: Callable[[Path], None], words: str, folder: Folder, tmp_path: Path
) -> None:
    path = shutil.copytree(folder("qwen2_vl"), tmp_path / "changed")
    change(path)
    with pytest.raises(ServiceError, match=words):
        load_tokenizer(ModelFolder(path))
