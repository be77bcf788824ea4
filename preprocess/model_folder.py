"""Reads the small files of a Hugging Face model folder: configs, chat template, special tokens. No weights, no torch.

Old and new spellings are made one here, so that nobody else looks into these files.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from preprocess.blocks.fields import Fields
from preprocess.errors import ServiceError

JsonObject = dict[str, Any]

_ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Of special tokens, that every tokenizer may have."""


class ModelFolder:
    """A model folder on disk. Missing optional files read as empty; broken ones raise `ServiceError`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.json").is_file():
            raise bad_folder(self.path, "there is no config.json in it")

    @cached_property
    def config(self) -> JsonObject:
        """`config.json`."""
        return self._read("config.json")

    @property
    def text_config(self) -> JsonObject:
        """The language model's part of `config.json`, which is the whole of it in text-only folders."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    @property
    def fields(self) -> Fields:
        """`config.json`, to be read by type."""
        return Fields(self.config, "config.json: ")

    @property
    def text_fields(self) -> Fields:
        """`text_config`, to be read by type."""
        where = "config.json: " if self.text_config is self.config else "config.json: text_config."
        return Fields(self.text_config, where)

    @property
    def vision_fields(self) -> Fields:
        """The encoder's part of `config.json`, to be read by type."""
        return self.fields.section("vision_config")

    @property
    def model_type(self) -> str:
        """The family's name, such as ``"smolvlm"``."""
        return str(self.config.get("model_type", ""))

    @property
    def brings_code(self) -> bool:
        """Whether the folder names Python code of its own to load it with. It is never run."""
        return any("auto_map" in source for source in (self.config, self.tokenizer_config, self.processor_config))

    @cached_property
    def generation_config(self) -> JsonObject:
        """`generation_config.json`, or nothing."""
        return self._read("generation_config.json", optional=True)

    @cached_property
    def processor_config(self) -> JsonObject:
        """`processor_config.json`, or nothing."""
        return self._read("processor_config.json", optional=True)

    @cached_property
    def image_processor_config(self) -> JsonObject:
        """The image processor's settings: in `processor_config.json` (new) or `preprocessor_config.json` (old)."""
        nested = self.processor_config.get("image_processor")
        return nested if isinstance(nested, dict) else self._read("preprocessor_config.json", optional=True)

    @cached_property
    def video_processor_config(self) -> JsonObject:
        """The video processor's settings, in a place of their own (new) or among those of the image processor (old)."""
        nested = self.processor_config.get("video_processor")
        own = nested if isinstance(nested, dict) else self._read("video_preprocessor_config.json", optional=True)
        return own or self.image_processor_config

    @property
    def image_settings(self) -> Fields:
        """`image_processor_config`, to be read by type."""
        return Fields(self.image_processor_config, "image processor: ")

    @property
    def video_settings(self) -> Fields:
        """`video_processor_config`, to be read by type."""
        return Fields(self.video_processor_config, "video processor: ")

    @cached_property
    def tokenizer_config(self) -> JsonObject:
        """`tokenizer_config.json`, or nothing."""
        return self._read("tokenizer_config.json", optional=True)

    @property
    def tokenizer_path(self) -> Path:
        """`tokenizer.json`. Older folders may have a vocabulary and merges in its place."""
        return self.path / "tokenizer.json"

    @cached_property
    def added_tokens(self) -> dict[int, JsonObject]:
        """Tokens beside the vocabulary by id: of `added_tokens_decoder` (new) or `added_tokens.json` (old)."""
        listed = self.tokenizer_config.get("added_tokens_decoder")
        if listed is None:
            special = set(self.special_tokens)
            listed = {
                token_id: {"content": token, "special": token in special, "normalized": token not in special}
                for token, token_id in self._read("added_tokens.json", optional=True).items()
            }
        try:
            return {int(token_id): dict(fields) for token_id, fields in listed.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise bad_folder(self.path, "its added tokens are not listed by whole numbers") from error

    @cached_property
    def special_tokens(self) -> list[str]:
        """Tokens that the folder declares special, whether or not its tokenizer has them."""
        tokens: list[Any] = []
        for source in (self._read("special_tokens_map.json", optional=True), self.tokenizer_config):
            tokens += [source.get(role) for role in _ROLES]
            for name in ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"):
                listed = source.get(name)
                tokens += listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else []
        contents = (token.get("content") if isinstance(token, dict) else token for token in tokens)
        return list(dict.fromkeys(content for content in contents if isinstance(content, str) and content))

    @cached_property
    def named_tokens(self) -> dict[str, str]:
        """Special tokens by role, such as ``"bos_token"``, as chat templates may name them."""
        tokens: dict[str, str] = {}
        for source in (self._read("special_tokens_map.json", optional=True), self.tokenizer_config):
            extra = source.get("extra_special_tokens")
            model_specific = source.get("model_specific_special_tokens")
            for names in (source, extra, model_specific):
                if not isinstance(names, dict):
                    continue
                for role, value in names.items():
                    content = value.get("content") if isinstance(value, dict) else value
                    if role.endswith("_token") and isinstance(content, str):
                        tokens[role] = content
        return tokens

    @cached_property
    def chat_template(self) -> str:
        """The jinja source of the chat template.

        Looked for in `chat_template.jinja`, `chat_template.json` and `tokenizer_config.json`, in this order; of several
        named templates the one named ``default``.
        """
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        for source in (
            self._read("chat_template.json", optional=True),
            self.processor_config,
            self.tokenizer_config,
        ):
            template = source.get("chat_template")
            if isinstance(template, list):
                template = {str(entry.get("name")): entry.get("template") for entry in template}
            if isinstance(template, dict):
                template = template.get("default")
            if isinstance(template, str):
                return template
        raise bad_folder(self.path, "it has no chat template (chat_template.jinja, or one in tokenizer_config.json)")

    @cached_property
    def eos_ids(self) -> list[int]:
        """Every id that ends an answer; not the tokenizer's own.

        As in `generate` of transformers, `config.json` counts only where `generation_config.json` names none: classes
        of configurations have defaults, such as 2, which in other vocabularies is an ordinary word.
        """
        for source in (self.generation_config, self.config, self.text_config):
            value = source.get("eos_token_id")
            ids = [
                token_id for token_id in (value if isinstance(value, list) else [value]) if isinstance(token_id, int)
            ]
            if ids:
                return list(dict.fromkeys(ids))
        return []

    def _read(self, name: str, *, optional: bool = False) -> JsonObject:
        path = self.path / name
        if optional and not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise bad_folder(self.path, f"{name} cannot be read as JSON") from error
        if not isinstance(value, dict):
            raise bad_folder(self.path, f"{name} is not a JSON object")
        return value


def bad_folder(path: Path, what: str) -> ServiceError:
    """The error for a model folder that cannot be used; it ends the start, never a request."""
    return ServiceError(f"cannot use the model folder {path}: {what}", code="bad_model_folder")
