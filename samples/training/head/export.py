"""Writes a trained head as a folder in the published EAGLE-3 layout, in 8 bits, and reads such a folder back.

Embedding and output tables are left out: they are the target's, whose vocabulary the drafts have. Run
    python -m samples.training.head.export RUN/head.pt OUT
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samples.training.head.model import Head, HeadShape
from samples.training.model import SHAPE
from samples.training.quantise import QUANTIZATION_CONFIG, compress, decompress

MODEL = Path(__file__).parents[2] / "model"


def head_config(shape: HeadShape, fused: Sequence[int], vocabulary: int = SHAPE.vocabulary) -> dict[str, Any]:
    """The contents of `config.json`. `fused`: the hidden states before these layers of the target run are fused.

    Two spellings are in use, and both are written: among all fields such ids count the layers before the place (vLLM),
    in `eagle_config` they name the layer whose result it is (SGLang), one less.
    """
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "vocab_size": vocabulary,
        "draft_vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "eagle_aux_hidden_state_layer_ids": list(fused),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in fused],
            "use_aux_hidden_state": True,
        },
        "quantization_config": QUANTIZATION_CONFIG,
    }


def write(head: Head, fused: Sequence[int], out: Path) -> None:
    """Write the folder."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(compress(state), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(head_config(head.shape, fused), indent=2) + "\n")


def shape_of(config: dict[str, Any]) -> HeadShape:
    """The sizes that a `config.json` names."""
    fused = config["eagle_aux_hidden_state_layer_ids"]
    return HeadShape(
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        len(fused),
        config["rope_theta"],
    )


def load(folder: Path) -> tuple[Head, list[int]]:
    """The head of a folder, in float32, and the layers of the target whose inputs it fuses."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    head = Head(shape_of(config))
    state = decompress(load_file(folder / "model.safetensors"))
    head.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return head.eval(), config["eagle_aux_hidden_state_layer_ids"]


def target_state(model: Path = MODEL) -> dict[str, Tensor]:
    """Every weight of the target, float32, by its name in the checkpoint."""
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in decompress(load_file(model / "model.safetensors")).items()}


def target_table(model: Path = MODEL) -> Tensor:
    """The target's embeddings, which are its output table, too: (vocabulary, width), float32."""
    return target_state(model)["model.text_model.embed_tokens.weight"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    saved = torch.load(arguments.checkpoint, map_location="cpu", weights_only=True)
    head = Head(HeadShape(**saved["shape"]))
    head.load_state_dict(saved["average"])
    write(head, saved["fused"], arguments.out)


if __name__ == "__main__":
    main()
