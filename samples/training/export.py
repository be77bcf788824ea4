"""Writes a checkpoint folder as SmolVLM tools read it: weights, configuration, tokenizer, processor, template.

Run `python -m samples.training.export CHECKPOINT.pt TOKENIZER OUT` (the averaged weights are taken), or call `write`.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samples.training.dialogue import CHAT_TEMPLATE, END, FAKE, GLOBAL, IMAGE, PAD, SPECIAL, START, UTTERANCE
from samples.training.model import IMAGE_SIDE, IMAGE_TOKENS, hf_config

IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor",
    "processor_class": "SmolVLMProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"longest_edge": 2 * IMAGE_SIDE},
    "resample": 1,
    "do_image_splitting": False,
    "max_image_size": {"longest_edge": IMAGE_SIDE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pad": True,
    "video_sampling": {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 2 * IMAGE_SIDE}},
}


def added(content: str) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def side_files() -> dict[str, Any]:
    """Name and JSON contents of every file beside the weights and the tokenizer."""
    extra = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>",
             "global_image_token": "<global-img>"}  # fmt: skip
    return {
        "config.json": hf_config(),
        "generation_config.json": {
            "bos_token_id": START,
            "eos_token_id": [END, UTTERANCE],
            "pad_token_id": PAD,
            "do_sample": False,
            "max_new_tokens": 128,
        },
        "preprocessor_config.json": IMAGE_PROCESSOR,
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": IMAGE_TOKENS},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "SmolVLMProcessor",
            "added_tokens_decoder": {str(number): {**added(text),
            "special": True} for number, text in enumerate(SPECIAL)},
            "bos_token": SPECIAL[START],
            "eos_token": SPECIAL[UTTERANCE],
            "pad_token": SPECIAL[PAD],
            "unk_token": SPECIAL[PAD],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "model_max_length": 4096,
            **extra,
        },
        "special_tokens_map.json": {
            "bos_token": added(SPECIAL[START]),
            "eos_token": added(SPECIAL[UTTERANCE]),
            "pad_token": added(SPECIAL[PAD]),
            "unk_token": added(SPECIAL[PAD]),
            "additional_special_tokens": [SPECIAL[token] for token in (FAKE, IMAGE, UTTERANCE, GLOBAL)],
        },
    }  # fmt: skip


def write(state: dict[str, Tensor], tokenizer: Path, out: Path, shards: int = 4) -> None:
    """Write a state dict (names of `BundledModel`) as a bf16 checkpoint folder."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.numel() for tensor in state.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    place: dict[str, str] = {}
    filled = 0
    for name, tensor in state.items():
        shard = min(shards - 1, filled * shards // total)
        filled += tensor.numel()
        parts[shard][name] = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        place[name] = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
    for shard, part in enumerate(parts):
        save_file(part, out / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": total * 2}, "weight_map": place}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    for name, contents in side_files().items():
        (out / name).write_text(json.dumps(contents, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n")
    if tokenizer.resolve() != out.resolve():
        shutil.copy(tokenizer / "tokenizer.json", out / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(
        torch.load(arguments.checkpoint, map_location="cpu", weights_only=True)["average"],
        arguments.tokenizer,
        arguments.out,
    )


if __name__ == "__main__":
    main()
