"""The other side of `beholder bench`: plain transformers `generate` in bfloat16, its own threads, the same weights.

Run as a script with the model folder; measures one round for every line on standard input and prints it as JSON.
Images go through the Pillow image processor, as the server's do; its time counts towards the first token.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from preprocess.blocks.checkpoint import Checkpoint

NEW_TOKENS = 128
REPEATS = 3


def load(folder: Path) -> Any:
    """The transformers model with the folder's weights, dequantised where they are packed."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    auto: Any = AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.bfloat16).eval()
    checkpoint = Checkpoint(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            kind = type(model.get_submodule(module)).__name__ if module != name else ""
            if kind in ("Linear", "Embedding") and checkpoint.has(name):
                parameter.copy_(checkpoint.weight(module, tuple(parameter.shape), kind=kind))
            elif checkpoint.has(name):
                parameter.copy_(checkpoint.tensor(name, tuple(parameter.shape)))
    model.tie_weights()
    return model


def inputs(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """One picture and the question, as transformers wants them."""
    import io

    from PIL import Image
    from tokenizers import Tokenizer
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    from server.bench.beside_transformers import PROMPT
    from server.bench.pictures import picture

    settings = json.loads((folder / "preprocessor_config.json").read_text())
    processor = Idefics3ImageProcessorPil(**{k: v for k, v in settings.items() if not k.endswith("_type")})
    pixels = processor(Image.open(io.BytesIO(picture(seed))), return_tensors="pt", do_image_splitting=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"] // config["scale_factor"]
    text = f"<|im_start|>User:{'<image>' * side * side}{PROMPT}<end_of_utterance>\nAssistant:"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids])
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found["pixel_values"] = pixels["pixel_values"].to(torch.bfloat16)
    return found


def measure(model: Any, folder: Path, seed: int) -> dict[str, float]:
    """Decode tokens a second and ms to the first token, medians of a few repeats."""

    def seconds(seed: int, tokens: int) -> float:
        started = time.perf_counter()
        model.generate(**inputs(folder, seed), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return time.perf_counter() - started

    first = [seconds(seed + i, 1) for i in range(REPEATS)]
    whole = [seconds(seed + i, NEW_TOKENS) for i in range(REPEATS)]
    first_s, whole_s = statistics.median(first), statistics.median(whole)
    return {"decode_tok_s": (NEW_TOKENS - 1) / (whole_s - first_s), "first_token_ms": first_s * 1e3}


def main() -> None:
    """Answer each line with one round."""
    folder = Path(sys.argv[1])
    with torch.inference_mode():
        model = load(folder)
        measure(model, folder, 0)
        for number, _ in enumerate(sys.stdin):
            print(json.dumps(measure(model, folder, 10_000 + number * 100)), flush=True)


if __name__ == "__main__":
    main()
