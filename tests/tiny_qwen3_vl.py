"""Makes Qwen3-VL folders, dense or with experts, with tiny random weights, as transformers itself would save them."""

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
    "<|image_pad|>",
    "<|video_pad|>",
]

CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tiny_qwen3_vl(
    folder: Path,
    *,
    seed: int = 0,
    experts: bool = False,
    tied: bool = True,
    max_shard_size: str = "1GB",
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    image: Mapping[str, Any] | None = None,
    video: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a Qwen3-VL (`experts`: Qwen3-VL-MoE) folder into `folder` and returns it.

    Args:
        folder: Where to write; made if missing.
        seed: Seed of the random float32 weights.
        experts: Whether some layers have experts in place of an MLP.
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
    prefix = "Qwen3VLMoe" if experts else "Qwen3VL"
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}
    config = getattr(transformers, f"{prefix}Config")(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_heads": 2,
            "patch_size": PATCH_SIZE,
            "num_position_embeddings": 25,
            "out_hidden_size": 48,
            "deepstack_visual_indexes": [0, 2],
            **(vision or {}),
        },
        text_config={
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "tie_word_embeddings": tied,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            **(mixture if experts else {}),
            **(text or {}),
        },
    )
    pixels = {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}
    frames = {"shortest_edge": 4 * 16 * 16, "longest_edge": 8 * 48 * 48}
    return save_qwen(
        folder,
        config,
        tokenizer,
        prefix=prefix,
        seed=seed,
        max_shard_size=max_shard_size,
        special_tokens=SPECIAL_TOKENS,
        chat_template=CHAT_TEMPLATE,
        shared={"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"},
        images={"size": pixels, "image_processor_type": "Qwen2VLImageProcessorFast", **(image or {})},
        videos={"size": frames, "video_processor_type": "Qwen3VLVideoProcessor", **(video or {})},
    )
