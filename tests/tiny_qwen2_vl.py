"""Makes Qwen2-VL and Qwen2.5-VL folders with tiny random weights, as transformers itself would save them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tiny_qwen import PATCH_SIZE, save_qwen
from tiny_tokenizer import tiny_tokenizer

SPECIAL_TOKENS: Final = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]

CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}"
    "{%- if loop.first and message['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tiny_qwen2_vl(
    folder: Path,
    *,
    seed: int = 0,
    model_type: str = "qwen2_vl",
    tied: bool = True,
    max_shard_size: str = "1GB",
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    image: Mapping[str, Any] | None = None,
    video: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a Qwen2-VL or Qwen2.5-VL folder into `folder` and returns it.

    Args:
        folder: Where to write; made if missing.
        seed: Seed of the random float32 weights.
        model_type: ``"qwen2_vl"`` or ``"qwen2_5_vl"``.
        tied: Whether output and input embeddings are one tensor.
        max_shard_size: As in `save_pretrained`; ``"100KB"`` gives a sharded checkpoint.
        text: Fields of `text_config` to replace.
        vision: Fields of `vision_config` to replace.
        image: Settings of the image processor to replace.
        video: Settings of the video processor to replace.
    """
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(SPECIAL_TOKENS)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    prefix = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}[model_type]
    shared_sizes = {"depth": 4, "num_heads": 2, "patch_size": PATCH_SIZE}
    sizes = {
        "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 48},
        "qwen2_5_vl": {
            "hidden_size": 32,
            "intermediate_size": 44,
            "out_hidden_size": 48,
            "window_size": 4 * PATCH_SIZE,
            "fullatt_block_indexes": [1, 3],
            "tokens_per_second": 2,
        },
    }[model_type]
    config = getattr(transformers, f"{prefix}Config")(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
        vision_config={**shared_sizes, **sizes, **(vision or {})},
        text_config={
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": tied,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            **(text or {}),
        },
    )
    pixels = {"min_pixels": 32 * 32, "max_pixels": 96 * 96}
    frames = {"shortest_edge": 16 * 16, "longest_edge": 48 * 48}
    return save_qwen(
        folder,
        config,
        tokenizer,
        prefix=prefix,
        seed=seed,
        max_shard_size=max_shard_size,
        special_tokens=SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
        shared={"processor_class": f"{prefix}Processor"},
        images={**pixels, "image_processor_type": "Qwen2VLImageProcessor", **(image or {})},
        videos={"size": frames, "video_processor_type": "Qwen2VLVideoProcessor", **(video or {})},
    )
