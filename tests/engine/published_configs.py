"""`config.json` of the published models, by the fields that are theirs alone, and the settings of their processors.

Spelled as the folders on the hub are: defaults left out, fields of training left in. Values are those of the models'
cards and papers (arXiv:2504.05299, 2408.12637, 2409.12191, 2502.13923, 2511.21631).
"""

from __future__ import annotations

from typing import Any, Final

Config = dict[str, Any]

_SIGLIP_93M: Final = {"hidden_size": 768, "image_size": 512, "num_attention_heads": 12, "patch_size": 16}
_SIGLIP_400M: Final = {
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
_CLIP: Final = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def _idefics3(model_type: str, vision: Config, scale: int, image_token_id: int, **text: Any) -> Config:
    """SmolVLM and Idefics3: a Llama behind SigLIP."""
    side = vision["image_size"]
    return {
        "model_type": model_type,
        "image_token_id": image_token_id,
        "scale_factor": scale,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": text["vocab_size"],
        "text_config": {
            "model_type": "llama",
            "_flash_attn_2_enabled": True,
            "is_llama_config": True,
            "perceiver_config": {"resampler_depth": 6},
            "pixel_shuffle_factor": scale,
            "qk_layer_norms": False,
            "rms_norm_eps": 1e-5,
            "rope_interleaved": False,
            "use_resampler": False,
            **text,
        },
        "vision_config": {
            "model_type": "smolvlm_vision" if model_type == "smolvlm" else "idefics3",
            "max_image_size": {"longest_edge": side},
            "size": {"longest_edge": 4 * side},
            "use_base_siglip": True,
            **vision,
        },
    }


def _smolvlm(model_type: str) -> dict[str, Config]:
    small: Config = {"head_dim": 64, "rope_theta": 100000, "max_position_embeddings": 8192, "vocab_size": 49280}
    large = {**small, "rope_theta": 130000} if model_type == "smolvlm" else {**small, "rope_theta": 273768.0}
    sizes = {
        "256M": (_SIGLIP_93M, 4, 576, 1536, 9, 3, small),
        "500M": (_SIGLIP_93M, 4, 960, 2560, 15, 5, small),
        "2.2B": (_SIGLIP_400M, 3, 2048, 8192, 32, 32, large),
    }
    name = "SmolVLM2" if model_type == "smolvlm" else "SmolVLM"
    return {
        f"{name}-{size}": _idefics3(
            model_type,
            vision,
            scale,
            49190,
            hidden_size=width,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            **rest,
        )
        for size, (vision, scale, width, inner, heads, kv_heads, rest) in sizes.items()
    }


def _qwen2(model_type: str, width: int, inner: int, heads: int, kv_heads: int, vocab: int, **vision: Any) -> Config:
    """Qwen2-VL and Qwen2.5-VL: the text model's fields beside those of the whole."""
    encoders: dict[str, Config] = {
        "qwen2_vl": {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": width},
        "qwen2_5_vl": {
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": width,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
    }
    patches = {"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}
    return {
        "model_type": model_type,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": inner,
        "max_position_embeddings": 32768 if model_type == "qwen2_vl" else 128000,
        "max_window_layers": 28,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": width < 3000,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": vocab,
        "vision_config": {"depth": 32, "num_heads": 16, "in_chans": 3, **patches, **encoders[model_type], **vision},
    }


def _qwen3(width: int, inner: int, heads: int, kv_heads: int, *, experts: int = 0) -> Config:
    """Qwen3-VL, dense or with experts of this inside."""
    model_type = "qwen3_vl_moe" if experts else "qwen3_vl"
    is_small = width < 4000 and not experts
    encoder = (
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
        if is_small
        else {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
    )
    mixture = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": experts,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    return {
        "model_type": model_type,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "tie_word_embeddings": is_small,
        "text_config": {
            "model_type": f"{model_type}_text",
            "attention_bias": False,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": width,
            "intermediate_size": inner,
            "max_position_embeddings": 262144,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "vocab_size": 151936,
            **(mixture if experts else {}),
        },
        "vision_config": {
            "model_type": model_type,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": width,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **encoder,
        },
    }


CONFIGS: Final[dict[str, Config]] = {
    **_smolvlm("idefics3"),
    **_smolvlm("smolvlm"),
    "Idefics3-8B": _idefics3(
        "idefics3",
        {**_SIGLIP_400M, "image_size": 364},
        2,
        128257,
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=131072,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        rope_theta=500000.0,
        vocab_size=128259,
    ),
    "Qwen2-VL-2B": _qwen2("qwen2_vl", 1536, 8960, 12, 2, 151936),
    "Qwen2-VL-7B": _qwen2("qwen2_vl", 3584, 18944, 28, 4, 152064),
    "Qwen2-VL-72B": _qwen2("qwen2_vl", 8192, 29568, 64, 8, 152064),
    "Qwen2.5-VL-3B": _qwen2("qwen2_5_vl", 2048, 11008, 16, 2, 151936),
    "Qwen2.5-VL-7B": _qwen2("qwen2_5_vl", 3584, 18944, 28, 4, 152064),
    "Qwen2.5-VL-32B": _qwen2("qwen2_5_vl", 5120, 27648, 40, 8, 152064, intermediate_size=3456),
    "Qwen2.5-VL-72B": _qwen2("qwen2_5_vl", 8192, 29568, 64, 8, 152064, intermediate_size=3456),
    "Qwen3-VL-2B": _qwen3(2048, 6144, 16, 8),
    "Qwen3-VL-4B": _qwen3(2560, 9728, 32, 8),
    "Qwen3-VL-8B": _qwen3(4096, 12288, 32, 8),
    "Qwen3-VL-32B": _qwen3(5120, 25600, 64, 8),
    "Qwen3-VL-30B-A3B": _qwen3(2048, 6144, 32, 4, experts=768),
    "Qwen3-VL-235B-A22B": _qwen3(4096, 12288, 64, 4, experts=1536),
}


def image_processor(config: Config) -> Config:
    """`preprocessor_config.json` beside such a `config.json`."""
    if config["model_type"] in ("smolvlm", "idefics3"):
        side = config["vision_config"]["image_size"]
        return {
            "do_image_splitting": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "max_image_size": {"longest_edge": side},
            "resample": 1,
            "size": {"longest_edge": 4 * side},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": side}},
        }
    patches = {"patch_size": config["vision_config"]["patch_size"], "temporal_patch_size": 2, "merge_size": 2}
    if config["model_type"].startswith("qwen3"):
        size = {"longest_edge": 16777216, "shortest_edge": 65536}
        return {**patches, "size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return {**patches, **_CLIP, "min_pixels": 3136, "max_pixels": 12845056}
