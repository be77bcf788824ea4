"""Makes SmolVLM and Idefics3 folders with tiny random weights, as transformers itself would save them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tiny_tokenizer import tiny_tokenizer
from tiny_weights import randomise

IMAGE_SIZE: Final = 32
"""Side of one tile in pixels: 4 × 4 patches, 2 × 2 vision tokens."""

TOKENS_PER_TILE: Final = 4

SPECIAL_TOKENS: Final = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]

_VIDEO_SIZE: Final = {"longest_edge": 2 * IMAGE_SIZE}

CHAT_TEMPLATE: Final = (
    "<|im_start|>"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "<end_of_utterance>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def tiny_smolvlm(
    folder: Path,
    *,
    seed: int = 0,
    model_type: str = "smolvlm",
    tied: bool = True,
    max_shard_size: str = "1GB",
    image_splitting: bool = False,
    video_sampling: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a SmolVLM (or Idefics3) folder into `folder` and returns it.

    Args:
        folder: Where to write; made if missing.
        seed: Seed of the random float32 weights. They are large enough that answers depend on pictures and vary.
        model_type: ``"smolvlm"`` or ``"idefics3"``.
        tied: Whether output and input embeddings are one tensor.
        max_shard_size: As in `save_pretrained`; ``"100KB"`` gives a sharded checkpoint.
        image_splitting: The folder's default for cutting large pictures into tiles.
        video_sampling: How SmolVLM2 samples clips (`fps`, `max_frames`); None leaves it out, as SmolVLM does.
        text: Fields of `text_config` to replace.
        vision: Fields of `vision_config` to replace.
    """
    import torch
    import transformers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(SPECIAL_TOKENS)
    end_of_utterance = tokenizer.token_to_id("<end_of_utterance>")
    prefix = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[model_type]

    config = getattr(transformers, f"{prefix}Config")(
        scale_factor=2,
        image_token_id=3,
        pad_token_id=0,
        tie_word_embeddings=tied,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": IMAGE_SIZE,
            "patch_size": 8,
            "hidden_act": "gelu_pytorch_tanh",
            **(vision or {}),
        },
        text_config={
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **(text or {}),
        },
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).to(torch.float32).eval()
    randomise(model, seed)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[end_of_utterance, 2], pad_token_id=0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<end_of_utterance>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<fake_token_around_image>", "<image>", "<end_of_utterance>"],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    ).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(folder / "preprocessor_config.json", _preprocessor_config(prefix, image_splitting, video_sampling))
    _write_json(
        folder / "processor_config.json", {"image_seq_len": TOKENS_PER_TILE, "processor_class": f"{prefix}Processor"}
    )
    return folder


def _preprocessor_config(
    prefix: str, image_splitting: bool, video_sampling: Mapping[str, Any] | None
) -> dict[str, Any]:
    sampling = {} if video_sampling is None else {"video_sampling": {"video_size": _VIDEO_SIZE, **video_sampling}}
    return {
        "image_processor_type": f"{prefix}ImageProcessor",
        "processor_class": f"{prefix}Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"longest_edge": 4 * IMAGE_SIZE},
        "resample": 1,
        "do_image_splitting": image_splitting,
        "max_image_size": {"longest_edge": IMAGE_SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pad": True,
        **sampling,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
