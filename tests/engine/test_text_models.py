"""Text models by themselves against transformers': positions in three dimensions, DeepStack, experts.

The families' parity tests compare whole models on what processors make of pictures; here positions and pictures are
random, so that no two of a token's three positions agree by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_weights import randomise

from engine.attention.backend import Segment
from engine.attention.torch_backend import TorchAttention
from engine.models.decoder import Decoder, DecoderConfig, DeepStack
from engine.models.experts import Experts, ExpertsConfig
from engine.models.qwen import qwen2_config, qwen3_config
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import Fields
from preprocess.blocks.linear import Linear
from preprocess.blocks.rope import RopeConfig, mrope_axes
from preprocess.errors import ModelError

qwen3_moe_config = partial(qwen3_config, has_experts=True)

SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
FROM_64: dict[str, Any] = {"original_max_position_embeddings": 64}
NUM_TOKENS = 23
NUM_TAPS = 2


def _rope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **more}}


@dataclass(frozen=True)
class Case:
    """`kind`: the class of transformers, without ``TextModel``."""

    kind: str
    config: Callable[[Fields], DecoderConfig]
    fields: Mapping[str, Any]


CASES = {
    "qwen2-vl": Case("Qwen2VL", qwen2_config, _rope([1, 1, 2])),
    "qwen2.5-vl, one key head": Case("Qwen2_5_VL", qwen2_config, {"num_key_value_heads": 1, **_rope([2, 1, 1])}),
    "qwen3-vl": Case("Qwen3VL", qwen3_config, {"head_dim": 16, **_rope([4, 2, 2])}),
    "qwen3-vl, sections of another head": Case("Qwen3VL", qwen3_config, {"head_dim": 24, **_rope([24, 20, 20])}),
    "linear": Case("Qwen2VL", qwen2_config, _rope([1, 1, 2], rope_type="linear", factor=2.0)),
    "llama3": Case(
        "Qwen3VL",
        qwen3_config,
        {"head_dim": 16, **_rope([4, 2, 2], rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    "yarn": Case("Qwen2_5_VL", qwen2_config, _rope([1, 1, 2], rope_type="yarn", factor=4.0, **FROM_64)),
    "yarn from the whole context": Case(
        "Qwen3VL", qwen3_config, {"head_dim": 32, **_rope([8, 4, 4], rope_type="yarn", factor=2.0)}
    ),
    "yarn, everything said": Case(
        "Qwen3VL",
        qwen3_config,
        {
            "head_dim": 32,
            **_rope([8, 4, 4], rope_type="yarn", factor=4.0, beta_fast=8, beta_slow=2, truncate=False, **FROM_64),
        },
    ),
    "yarn, two scales": Case(
        "Qwen3VL",
        qwen3_config,
        {"head_dim": 16, **_rope([4, 2, 2], rope_type="yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.2, **FROM_64)},
    ),
    "yarn, its scale said": Case(
        "Qwen2VL", qwen2_config, _rope([1, 1, 2], rope_type="yarn", factor=4.0, attention_factor=0.9, **FROM_64)
    ),
    "biases": Case("Qwen3VL", qwen3_config, {"head_dim": 16, "attention_bias": True, **_rope([4, 2, 2])}),
    "as many key heads, by null": Case("Qwen2VL", qwen2_config, {"num_key_value_heads": None, **_rope([1, 1, 2])}),
    "qwen3-vl-moe": Case("Qwen3VLMoe", qwen3_moe_config, {"head_dim": 8, **EXPERTS, **_rope([2, 1, 1])}),
    "every second layer has experts": Case(
        "Qwen3VLMoe", qwen3_moe_config, {**EXPERTS, "decoder_sparse_step": 2, **_rope([2, 1, 1])}
    ),
    "a layer without experts": Case(
        "Qwen3VLMoe", qwen3_moe_config, {**EXPERTS, "mlp_only_layers": [1], **_rope([2, 1, 1])}
    ),
    "as many experts as there are": Case(
        "Qwen3VLMoe", qwen3_moe_config, {**EXPERTS, "num_experts_per_tok": 6, **_rope([2, 1, 1])}
    ),
}


@dataclass(frozen=True)
class Loaded:
    """The same weights in both."""

    model: Decoder
    reference: Any


def _reference(case: Case) -> Any:
    import transformers

    config = getattr(transformers, f"{case.kind}TextConfig")(**{**SIZES, **case.fields})
    model = getattr(transformers, f"{case.kind}TextModel")(config).to(torch.float32).eval()
    randomise(model, seed=5)
    return model


def _load(case: Case, folder: Path) -> Decoder:
    checkpoint = Checkpoint(folder, dtype=torch.float32, device=torch.device("cpu"))
    fields = Fields(checkpoint.config.values, "config.json: ")
    with torch.inference_mode():
        model = Decoder(checkpoint, case.config(fields), prefix="model", head="lm_head", tied=True)
    checkpoint.finish()
    return model


def _save(reference: Any, folder: Path) -> Path:
    """As a language model is saved inside a larger one: under a prefix."""
    reference.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Loaded:
    case = CASES[request.param]
    reference = _reference(case)
    return Loaded(_load(case, _save(reference, tmp_path)), reference)


def _hidden(model: Decoder, ids: torch.Tensor, positions: torch.Tensor, chunk: int, stack: DeepStack) -> torch.Tensor:
    """Hidden states (tokens, hidden), normalised, of a sequence that is computed in chunks."""
    config = model.config
    pool = torch.zeros(config.num_layers, len(ids) + 1, 2, config.num_kv_heads, config.head_dim)
    attention = TorchAttention(pool, 1 + torch.randperm(len(ids), dtype=torch.int32)[None])
    outputs = []
    for start in range(0, len(ids), chunk):
        stop = min(start + chunk, len(ids))
        plan = attention.plan([Segment(0, start, stop - start)], torch.arange(start, stop))
        here = (stack.tokens >= start) & (stack.tokens < stop)
        part = DeepStack(stack.tokens[here] - start, stack.taps[:, here])
        outputs.append(model.forward(model.embed(ids[start:stop]), positions[..., start:stop], plan, part))
    return model.norm(torch.cat(outputs))


@torch.inference_mode()
def test_hidden_states_equal_transformers(loaded: Loaded) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 90, (NUM_TOKENS,), generator=generator)
    positions = torch.randint(0, 400, (3, NUM_TOKENS), generator=generator)
    visual = torch.tensor([2, 3, 4, 9, 10, 22])
    taps = torch.randn(NUM_TAPS, len(visual), 32, generator=generator)
    is_stacked = "Qwen3" in type(loaded.reference).__name__
    more: dict[str, Any] = {}
    if is_stacked:
        mask = torch.zeros(1, NUM_TOKENS, dtype=torch.bool)
        mask[0, visual] = True
        more = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(taps)}
    stack = DeepStack(visual, taps if is_stacked else taps[:0])
    expected = loaded.reference(input_ids=ids[None], position_ids=positions[:, None], **more).last_hidden_state[0]
    for chunk in (NUM_TOKENS, 1, 4):
        hidden = _hidden(loaded.model, ids, positions, chunk, stack)
        torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=1e-5)


@torch.inference_mode()
def test_equal_positions_may_be_given_once(loaded: Loaded) -> None:
    ids, positions = torch.arange(NUM_TOKENS), torch.arange(100, 100 + NUM_TOKENS)
    nothing = DeepStack(torch.empty(0, dtype=torch.long), torch.empty(0, 0, 32))
    once = _hidden(loaded.model, ids, positions, NUM_TOKENS, nothing)
    assert torch.equal(once, _hidden(loaded.model, ids, positions.expand(3, -1), NUM_TOKENS, nothing))


def _as_published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts in one tensor, inputs before outputs."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in weights.items()
    }


def _one_by_one(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A module for each expert."""
    result = {}
    for name, tensor in weights.items():
        prefix, _, part = name.rpartition(".experts.")
        for index, matrix in enumerate(tensor) if prefix else ():
            halves = zip(("gate", "up"), matrix.chunk(2), strict=True) if part == "gate_up_proj" else [("down", matrix)]
            for half, weight in halves:
                result[f"{prefix}.experts.{index}.{half}_proj.weight"] = weight.contiguous()
        if not prefix:
            result[name] = tensor
    return result


@pytest.mark.parametrize("sizes", [{}, {"moe_intermediate_size": 32}, {"moe_intermediate_size": 16}])
@pytest.mark.parametrize("spelling", [_as_published, _one_by_one])
def test_experts_are_read_in_every_spelling(
    spelling: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], sizes: dict[str, int], tmp_path: Path
) -> None:
    """Also where a matrix is square, so that its own shape does not tell which way round it is."""
    case = CASES["qwen3-vl-moe"]
    case = Case(case.kind, case.config, {**case.fields, **sizes})
    folder = _save(_reference(case), tmp_path)
    today = _load(case, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(spelling(weights), folder / "model.safetensors")
    other = _load(case, folder)
    x = torch.randn(30, 32, generator=torch.Generator().manual_seed(4))
    for layer, same in zip(today.layers, other.layers, strict=True):
        assert isinstance(layer.mlp, Experts)
        with torch.inference_mode():
            assert torch.equal(layer.mlp(x), same.mlp(x))


@torch.inference_mode()
def test_experts_equal_transformers() -> None:
    """Also with two experts that the router cannot tell apart."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(hidden_size=32, norm_topk_prob=True, **EXPERTS)
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).eval()
    randomise(block, seed=2)
    block.gate.weight[4] = block.gate.weight[1]
    ours = Experts(
        Linear(block.gate.weight),
        block.experts.gate_up_proj,
        block.experts.down_proj,
        ExpertsConfig(6, 2, 20, 1, ()),
    )
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours(x), block(x[None])[0], atol=1e-6, rtol=1e-5)
    assert torch.equal(ours(x[:0]), x[:0])


def test_waves_follow_the_positions_that_the_layouts_say() -> None:
    sectioned = RopeConfig(1e4, sections=(2, 3, 3))
    assert mrope_axes(sectioned, 8).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    interleaved = RopeConfig(1e4, sections=(4, 2, 2), interleaved=True)
    assert mrope_axes(interleaved, 8).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("config", "fields", "complaint"),
    [
        (qwen2_config, _rope([1, 1, 1]), "mrope_section is .* expected numbers that sum up to 4"),
        (qwen2_config, _rope([1, 1]), "mrope_section is .* expected three whole numbers"),
        (qwen2_config, _rope([2, 1, 1], mrope_interleaved=True), "mrope_interleaved is True"),
        (qwen3_config, _rope([2, 1, 1], mrope_interleaved=False), "mrope_interleaved is False"),
        (qwen3_config, _rope([2, 1, 1], partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (qwen2_config, {"use_sliding_window": True}, "use_sliding_window is True"),
        (qwen3_config, {"attention_bias": 1}, "attention_bias is 1"),
        (qwen2_config, _rope([2, 1, 1], rope_type="dynamic"), "rope_type is 'dynamic'"),
        (qwen3_config, _rope([2, 1, 1], rope_type="linear"), "factor is missing"),
        (
            qwen3_moe_config,
            {"num_experts": 2, "num_experts_per_tok": 3},
            "at most num_experts 2",
        ),
        (qwen3_moe_config, {"mlp_only_layers": 1}, "a list of layer indices"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: Callable[[Fields], DecoderConfig], fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        config(Fields({**SIZES, **fields}, "config.json: "))
