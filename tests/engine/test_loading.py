"""Model folders: what is loaded as it is, and what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_models import pack
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES
from tiny_smolvlm import tiny_smolvlm
from tiny_weights import randomise

from engine.config import EngineConfig
from engine.cpu.native import why_not
from engine.load import LIKELY, likely_shapes, load_runner, resolve_dtype
from engine.runner import TorchRunner
from engine.speculation.drafter import DraftRow
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.blocks.fields import ModelError
from preprocess.blocks.linear import Linear
from preprocess.config import PictureBound
from preprocess.families import load_family
from preprocess.model_folder import ModelFolder
from tests.engine.random_decoder import decoder_config

Config = dict[str, Any]


def _load(folder: Path, **options: Any) -> TorchRunner:
    options = {"dtype": "float32", "threads": 1, "kv_tokens": 64, **options}
    runner = load_runner(EngineConfig(str(folder), **options))
    assert isinstance(runner, TorchRunner)
    return runner


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def _edit(folder: Path, change: Callable[[Config], object], file: str = "config.json") -> None:
    config = json.loads((folder / file).read_text())
    change(config)
    (folder / file).write_text(json.dumps(config))


def _set(*path: Any) -> Callable[[Config], None]:
    """Sets a field given by the names that lead to it and its value."""
    *parents, name, value = path

    def change(config: Config) -> None:
        for parent in parents:
            config = config.setdefault(parent, {})
        config[name] = value

    return change


REFUSED = {
    "another model_type": (_set("model_type", "qwen9"), "model_type is 'qwen9', expected 'idefics3' or 'smolvlm'"),
    "no model_type": (lambda config: config.pop("model_type"), "config.json: model_type is missing"),
    "another language model": (_set("text_config", "model_type", "qwen2"), "text_config.model_type is 'qwen2'"),
    "attention bias": (_set("text_config", "attention_bias", True), "layers.0.self_attn.q_proj.bias is missing"),
    "mlp bias": (_set("text_config", "mlp_bias", True), "layers.0.mlp.gate_proj.bias is missing"),
    "a bias that is no switch": (_set("text_config", "mlp_bias", "all"), "text_config.mlp_bias is 'all'"),
    "another activation": (_set("text_config", "hidden_act", "gelu"), "text_config.hidden_act is 'gelu'"),
    "another vision activation": (_set("vision_config", "hidden_act", "relu"), "vision_config.hidden_act is 'relu'"),
    "another vision model": (_set("vision_config", "model_type", "clip"), "vision_config.model_type is 'clip'"),
    "oblong pictures": (_set("vision_config", "image_size", [32, 64]), "vision_config.image_size is [32, 64]"),
    "dynamic": (_set("text_config", "rope_parameters", {"rope_type": "dynamic"}), "rope_type is 'dynamic'"),
    "longrope, old spelling": (_set("text_config", "rope_scaling", {"type": "longrope"}), "type is 'longrope'"),
    "llama3 without its factor": (
        _set("text_config", "rope_parameters", {"rope_type": "llama3"}),
        "rope_parameters.factor is missing",
    ),
    "partial rotation": (_set("text_config", "partial_rotary_factor", 0.5), "partial_rotary_factor is 0.5"),
    "heads that do not divide": (_set("text_config", "num_key_value_heads", 4), "num_attention_heads is 6"),
    "a size that is no number": (_set("text_config", "hidden_size", "48"), "text_config.hidden_size is '48'"),
    "another quantisation": (_set("quantization_config", {"quant_method": "gptq"}), "quant_method is 'gptq'"),
    "another packing": (
        _set("quantization_config", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        "format is 'float-quantized'",
    ),
    "a section that is none": (_set("text_config", 7), "text_config is 7, expected an object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, folder: Path) -> None:
    change, message = REFUSED[name]
    _edit(folder, change)
    with pytest.raises(ModelError) as raised:
        _load(folder)
    assert message in str(raised.value)


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "new")  # not over the file itself: its tensors are mapped
    (folder / "new").replace(folder / "model.safetensors")


HEAD = "model.text_model.embed_tokens.weight"
NORM = "model.text_model.layers.1.input_layernorm.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ModelError, match=f"tensor {NORM} is missing"):
        _load(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.update({NORM: torch.zeros(47)}))
    with pytest.raises(ModelError, match=rf"{NORM} has shape \(47,\), expected \(48,\)"):
        _load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    _tensors(
        folder, lambda tensors: tensors.update({"model.text_model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    )
    with pytest.raises(ModelError, match=r"the model does not have: model\.text_model\.layers\.0\.self_attn\.q_norm"):
        _load(folder)


def test_a_bias_of_a_layer_that_has_none_is_named(folder: Path) -> None:
    _tensors(
        folder, lambda tensors: tensors.update({"lm_head.bias": torch.ones(512), "lm_head.weight": tensors[HEAD] + 0})
    )
    with pytest.raises(ModelError, match=r"the model does not have: lm_head\.bias"):
        _load(folder)


def test_parts_that_the_model_does_not_have_are_left_alone_and_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    further = {"value_head.weight": torch.ones(3), "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    _tensors(folder, lambda tensors: tensors.update(further))
    _load(folder)
    assert "not read: mtp.layers.0.mlp.up_proj.weight, value_head.weight" in caplog.text


def test_one_file_goes_before_an_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-1.safetensors"}}))
    _load(folder)


def test_a_tensor_that_its_file_does_not_hold_is_named(tmp_path: Path) -> None:
    folder = tiny_smolvlm(tmp_path, max_shard_size="40KB")
    files = sorted(file.name for file in folder.glob("model-*.safetensors"))

    def elsewhere(index: Config) -> None:
        index["weight_map"][NORM] = next(file for file in files if file != index["weight_map"][NORM])

    _edit(folder, elsewhere, "model.safetensors.index.json")
    with pytest.raises(ModelError, match=f"tensor {NORM} cannot be read"):
        _load(folder)


def test_integers_in_place_of_weights_are_refused(folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.update({NORM: torch.ones(48, dtype=torch.int32)}))
    with pytest.raises(ModelError, match="expected floating point"):
        _load(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.text_model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.vision_model.embeddings.position_ids",
    ],
)
def test_buffers_of_older_transformers_are_ignored(name: str, folder: Path) -> None:
    _tensors(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    _load(folder)


def test_an_untied_model_without_a_head_is_refused(folder: Path) -> None:
    _edit(
        folder,
        lambda config: (
            _set("tie_word_embeddings", False)(config),
            _set("text_config", "tie_word_embeddings", False)(config),
        ),
    )
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing and tie_word_embeddings is false"):
        _load(folder)


def test_pickles_are_never_read(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="never read"):
        _load(folder)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        _load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{broken}"])
def test_a_damaged_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        _load(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "model.bin", "/etc/passwd"])
def test_an_index_cannot_point_elsewhere(folder: Path, file: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(ModelError, match=r"expected a \.safetensors file in the same folder"):
        _load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_smolvlm(tmp_path, max_shard_size="40KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        _load(folder)


def test_a_context_beyond_the_model_is_refused(folder: Path) -> None:
    assert _load(folder, max_context=100).max_positions == 100
    with pytest.raises(ModelError, match="max_context is 2000"):
        _load(folder, max_context=2000)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"draft_model": "a", "draft_head": "b"}, "both draft_model and draft_head"),
        ({"speculation": "draft-model"}, "draft_model is not set"),
        ({"speculation": "head"}, "holds no folder head"),
        ({"speculation": "ngram", "draft_model": "a"}, "draft_model is set, but speculation is ngram"),
        ({"speculation": "none", "draft_head": "a"}, "draft_head is set, but speculation is none"),
        ({"speculation": "head", "draft_model": "a"}, "draft_model is set, but speculation is head"),
    ],
)
def test_options_of_drafters_that_would_not_count_are_refused(
    folder: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        _load(folder, **options)


def test_a_draft_model_of_another_vocabulary_is_refused_with_what_differs(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    expected = f"2 tokens differ, such as {first!r}, which is id 100 in the model and id 101 in the draft model"
    with pytest.raises(ModelError, match=re.escape(expected)):
        _load(folder, draft_model=str(other))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
def test_text_models_can_guess(kind: str, folder: Path, tmp_path: Path) -> None:
    """Their own language model says what transformers' says; the vocabulary may be padded to another size."""
    import transformers

    vocab = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"] + 8
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab, num_key_value_heads=2, max_position_embeddings=256, head_dim=8, **sizes
    )
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32).eval()
    randomise(reference, 4)
    draft = tmp_path / "draft"
    reference.save_pretrained(draft)
    shutil.copy(folder / "tokenizer.json", draft)
    runner = _load(folder, draft_model=str(draft))
    drafter = runner.drafter
    assert drafter is not None
    assert (drafter.kind.source, drafter.max_positions) == ("draft-model", 256)
    runner.slot_table[:2, :30] = torch.arange(1, 61).view(2, 30)
    ids = [(17 * index) % 400 + 30 for index in range(20)]
    rows = [DraftRow(row, 0, ids[row : 12 + row]) for row in range(2)]
    logits = [drafter.forward(rows, guessed=False)]
    logits.append(drafter.forward([DraftRow(row, 12, [ids[12 + row]]) for row in range(2)], guessed=True))
    for row in range(2):
        expected = reference(torch.tensor([ids[row : 13 + row]])).logits[0, :, : vocab - 8]
        for own, wanted in zip(logits, expected[-2:], strict=True):
            torch.testing.assert_close(own[row], wanted, atol=2e-5, rtol=1e-4)


def test_the_pool_is_chosen_from_memory_when_nothing_is_asked_for(folder: Path) -> None:
    assert 1 < _load(folder, kv_tokens=0).num_slots <= 65_537


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_likely_pictures_are_as_the_family_has_them_and_each_once(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = ModelFolder(make(tmp_path))
    for bound in (PictureBound(), PictureBound(tokens=16)):
        family = load_family(folder, bound)
        shapes = likely_shapes(family)
        assert len(set(shapes)) == len(shapes)
        assert set(shapes) == {family.layout(width, height, "auto").shape for width, height in LIKELY}


def test_every_type_loads(folder: Path) -> None:
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        runner = _load(folder, dtype=name)
        assert runner.kv_pool.dtype is dtype
        assert runner.encode([torch.zeros(1, 32, 32, 3, dtype=torch.uint8)])[0].dtype is dtype
    assert resolve_dtype("auto", torch.device("cpu")) in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("has_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("is_fast", [True, False], ids=["bfloat16 is quick", "bfloat16 is slow"])
def test_auto_is_the_type_that_is_quick_here(
    folder: Path, is_fast: bool, has_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native steps have bfloat16 wherever they are; torch computes the encoder in it only where it is quick."""
    if has_native and why_not(decoder_config(), torch.bfloat16):
        pytest.skip("no native step here")
    monkeypatch.setattr("engine.load._is_fast_at_bfloat16", lambda device: is_fast)
    if not has_native:
        monkeypatch.setattr("engine.cpu.native.library", lambda: None)
    quick = torch.bfloat16 if is_fast else torch.float32
    runner: Any = _load(folder, dtype="auto")
    assert runner.kv_pool.dtype is (torch.bfloat16 if has_native else quick)
    assert runner.encoder.dtype is quick
    picture = torch.randint(0, 255, (1, 32, 32, 3), dtype=torch.uint8)
    (whole,) = runner.encode([picture])
    sliced = runner.begin(picture)
    sliced.run(runner.num_slices(picture.shape))
    assert whole.dtype is runner.kv_pool.dtype
    assert torch.equal(sliced.result(), whole)
    asked: Any = _load(folder, dtype="bfloat16")
    assert asked.kv_pool.dtype is torch.bfloat16
    assert asked.encoder.dtype is quick
    drafted = _load(folder, dtype="auto", draft_model=str(folder))
    assert drafted.kv_pool.dtype is quick  # torch computes the draft model


def test_pixels_are_normalised_alike_by_old_and_new_folders(folder: Path) -> None:
    picture = torch.full((1, 32, 32, 3), 200, dtype=torch.uint8)
    plain = _load(folder).encode([picture])[0]
    changed = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "rescale_factor": 0.5}
    _edit(folder, lambda config: config.update(changed), "preprocessor_config.json")
    old = _load(folder).encode([picture])[0]
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    _edit(folder, _set("image_processor", settings), "processor_config.json")
    assert torch.equal(_load(folder).encode([picture])[0], old)
    assert not torch.equal(old, plain)


# ---- packed weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [0, 16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_equal_compressed_tensors(
    bits: int, group_size: int, symmetric: bool, dtype: torch.dtype, folder: Path
) -> None:
    if dtype is torch.bfloat16:
        _tensors(folder, lambda tensors: tensors.update({name: part.to(dtype) for name, part in tensors.items()}))
    packed, plain = pack(folder, bits=bits, group_size=group_size, symmetric=symmetric)
    checkpoint = Checkpoint(packed, dtype=dtype, device=torch.device("cpu"))
    for name, expected in load_file(plain / "model.safetensors").items():
        if expected.dim() == 2:
            kind = "Embedding" if "embed" in name else "Linear"
            rows, columns = expected.shape
            weight = checkpoint.weight(name.removesuffix(".weight"), (rows, columns), kind=kind)
            assert torch.equal(weight, expected)
            assert weight.dtype is dtype
        else:
            checkpoint.tensor(name, tuple(expected.shape))
    checkpoint.finish()


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("tied", [True, False])
def test_few_rows_of_an_8_bit_checkpoint_are_exact(
    rows: int, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 on a CPU torch multiplies few rows with the integers themselves: no coarser than bfloat16 weights."""
    monkeypatch.setattr("engine.cpu.native.library", lambda: None)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}
    folder = tiny_smolvlm(tmp_path, tied=tied, text={**sizes, "num_key_value_heads": 2})
    _tensors(folder, lambda tensors: tensors.update({name: part.bfloat16() for name, part in tensors.items()}))
    packed, plain = pack(folder, bits=8, group_size=0, symmetric=True)
    ours = _load(packed, dtype="bfloat16")
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).bfloat16()
    weights = load_file(plain / "model.safetensors")
    head = weights["model.text_model.embed_tokens.weight" if tied else "lm_head.weight"]
    qkv = torch.cat([weights[f"model.text_model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"])
    with torch.inference_mode():
        for layer, weight in ((ours.model.head, head), (ours.model.layers[0].qkv, qkv)):
            torch.testing.assert_close(layer(x).double(), x.double() @ weight.double().T, atol=0.1, rtol=0.02)
            assert layer._integers is not None or not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("weight", [torch.zeros(8, 64), torch.zeros(8, 64, dtype=torch.bfloat16, device="meta")])
def test_integers_that_nobody_multiplies_are_not_kept(weight: torch.Tensor) -> None:
    """In float32, and on a GPU, they would take half as much memory as the weight beside it."""
    layer = Linear(weight, integers=(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8)))
    assert layer.weights()[1] is None


def _checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, dtype=torch.float32, device=torch.device("cpu"))


MODULE = "model.text_model.layers.0.mlp.down_proj"


def test_an_activation_order_moves_scales_to_their_columns(folder: Path) -> None:
    """Each column takes the group that `weight_g_idx` names, as checkpoints with activation ordering say."""
    packed, plain = pack(folder, bits=4, group_size=16, symmetric=True)
    expected = load_file(plain / "model.safetensors")[f"{MODULE}.weight"]
    scale = load_file(packed / "model.safetensors")[f"{MODULE}.weight_scale"]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)) // 16
    _tensors(packed, lambda tensors: tensors.update({f"{MODULE}.weight_g_idx": order.int()}))
    integers = expected / scale.repeat_interleave(16, 1)
    torch.testing.assert_close(_checkpoint(packed).weight(MODULE, (48, 64)), integers.round() * scale[:, order])


QUANTISED_REFUSALS = {
    "quantised activations": (
        _set("quantization_config", "config_groups", "group_0", "input_activations", {"num_bits": 8}),
        "input_activations is",
    ),
    "three bits": (_set("quantization_config", "config_groups", "group_0", "weights", "num_bits", 3), "num_bits is 3"),
    "floats": (_set("quantization_config", "config_groups", "group_0", "weights", "type", "float"), "type is 'float'"),
    "a quantised cache": (_set("quantization_config", "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme is"),
    "no group for it": (
        _set("quantization_config", "config_groups", "group_0", "targets", ["Conv2d"]),
        "no group of config.json: quantization_config.config_groups targets it",
    ),
    "ignored but packed": (_set("quantization_config", "ignore", ["re:.*down_proj"]), "ignore excludes it"),
    "no configuration": (lambda config: config.pop("quantization_config"), "config.json has no quantization_config"),
}


@pytest.mark.parametrize("name", QUANTISED_REFUSALS)
def test_other_quantisations_are_refused_by_name(name: str, folder: Path) -> None:
    packed, _ = pack(folder, bits=8, group_size=0, symmetric=True)
    change, message = QUANTISED_REFUSALS[name]
    _edit(packed, change)
    with pytest.raises(ModelError) as raised:
        _load(packed)
    assert message in str(raised.value)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_shape", "weight_zero_point"])
def test_a_missing_part_of_a_packed_weight_is_named(suffix: str, folder: Path) -> None:
    packed, _ = pack(folder, bits=8, group_size=0, symmetric=False)
    _tensors(packed, lambda tensors: tensors.pop(f"{MODULE}.{suffix}"))
    with pytest.raises(ModelError, match=rf"{MODULE}\.{suffix} is missing"):
        _load(packed)


def test_the_most_specific_group_decides(folder: Path) -> None:
    """An exact name wins over a pattern, and that over a kind of module."""
    packed, _ = pack(folder, bits=8, group_size=0, symmetric=True)

    def change(config: Config) -> None:
        groups = config["quantization_config"]["config_groups"]
        right = groups["group_0"]
        wrong = {**right, "weights": {**right["weights"], "num_bits": 4}}
        groups["linear"] = {**wrong, "targets": ["Linear"]}
        groups["layers"] = {**wrong, "targets": ["re:.*mlp.*"]}
        groups["one"] = {**right, "targets": [MODULE]}

    _edit(packed, change)
    _checkpoint(packed).weight(MODULE, (48, 64))
    with pytest.raises(ModelError, match=r"gate_proj\.weight_packed has shape"):
        _checkpoint(packed).weight(MODULE.replace("down", "gate"), (64, 48))
