"""Saves what the tiny folders of all Qwen-VL families share: weights, tokenizer, template, processors' settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tiny_weights import randomise

PATCH_SIZE: Final = 8
"""Side of a patch in pixels; a vision token takes 2 × 2 of them."""


def save_qwen(
    folder: Path,
    config: Any,
    tokenizer: Any,
    *,
    prefix: str,
    seed: int,
    max_shard_size: str,
    special_tokens: list[str],
    chat_template: str,
    shared: Mapping[str, Any],
    images: Mapping[str, Any],
    videos: Mapping[str, Any],
) -> Path:
    """Writes a folder and returns it.

    Args:
        folder: Where to write.
        config: Of the whole model.
        tokenizer: A `tokenizers.Tokenizer` that has `special_tokens`.
        prefix: What the names of transformers' classes begin with, such as ``"Qwen2VL"``.
        seed: Seed of the random float32 weights.
        max_shard_size: As in `save_pretrained`.
        special_tokens: All control tokens.
        chat_template: As jinja.
        shared: Settings of both processors, beside sizes of patches.
        images: Settings of the image processor alone.
        videos: Settings of the video processor alone.
    """
    import torch
    import transformers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    ids = {token: tokenizer.token_to_id(token) for token in special_tokens}
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).to(torch.float32).eval()
    randomise(model, seed)
    with torch.no_grad():  # no model says placeholders, and the reference would look for their pictures
        model.get_output_embeddings().weight[[ids["<|image_pad|>"], ids["<|video_pad|>"]]] = 0
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]], pad_token_id=0
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=special_tokens,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    both = {"patch_size": PATCH_SIZE, "temporal_patch_size": 2, "merge_size": 2, **shared}
    (folder / "preprocessor_config.json").write_text(json.dumps({**both, **images}, indent=2) + "\n")
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**both, **videos}, indent=2) + "\n")
    return folder
