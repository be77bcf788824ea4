"""Loads what guesses beside a model: a draft model, or a head trained for it. Called by `engine.load`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from engine.config import EngineConfig
from engine.cpu.head import NativeHead
from engine.cpu.native import NativeModel, why_not_head
from engine.models.decoder import Decoder
from engine.models.eagle3 import Eagle3, Eagle3Config, num_late_weights, num_weights
from engine.models.llama import llama_config
from engine.models.qwen import qwen_text_config
from engine.speculation.drafter import Drafter
from engine.speculation.torch_drafters import DraftModel, Head, Pools, entry_bytes, head_entry_bytes
from preprocess.blocks.checkpoint import Checkpoint
from preprocess.errors import ModelError
from preprocess.model_folder import ModelFolder
from preprocess.tokenizer import load_tokenizer

BUNDLED_HEAD: Final = "head"
"""Folder of a head inside its model's."""

Language = Callable[[Checkpoint], Decoder]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Weights, before there are slots.

    Attributes:
        token_bytes: What the drafter keeps of a token.
        num_layers: Of its model.
        why_not_native: Why steps of the model cannot be native calls beside it, in a few words; empty: they can.
        on: Makes it on the model's slots: in native calls where the model's steps are, of graphs where those are.
    """

    token_bytes: int
    num_layers: int
    why_not_native: str
    on: Callable[[Pools, NativeModel | None], Drafter]


def load_drafter(
    config: EngineConfig,
    target: Decoder,
    checkpoint: Checkpoint,
    languages: Mapping[str, Language],
    *,
    is_quick: bool = False,
) -> Loaded | None:
    """What guesses for `target`, or None.

    Args:
        config: Options.
        target: The loaded model.
        checkpoint: What it was loaded from: type and device are the same for the drafter.
        languages: Language models by `model_type`, in folders of vision models.
        is_quick: Steps of the model are native calls, beside which a head brings little (docs/performance.md), or
            graphs, beside which that was not measured: there it guesses only where somebody asks for it.

    Raises:
        ModelError: The drafter does not fit the model, or an option names one that would never be asked.
    """
    _check_options(config)
    if config.draft_model and config.speculation in ("auto", "draft-model"):
        return _draft_model(Path(config.draft_model), config, target, checkpoint, languages)
    bundled = Path(config.model) / BUNDLED_HEAD
    folder = Path(config.draft_head) if config.draft_head else bundled
    is_found = (bundled / "config.json").is_file() and (config.speculation == "head" or not is_quick)
    if config.speculation in ("auto", "head") and (config.draft_head or is_found):
        return _head(folder, target, checkpoint)
    if config.speculation == "head":
        raise ModelError(
            f"speculation is head, but {config.model} holds no folder {BUNDLED_HEAD}; set draft_head to "
            "the folder of a head that was trained for this model"
        )
    return None


def _check_options(config: EngineConfig) -> None:
    if config.draft_model and config.draft_head:
        raise ModelError("both draft_model and draft_head are set; expected one of them")
    if config.speculation == "draft-model" and not config.draft_model:
        raise ModelError("speculation is draft-model, but draft_model is not set; name a smaller model")
    for name, mode in (("draft_model", "draft-model"), ("draft_head", "head")):
        if getattr(config, name) and config.speculation not in ("auto", mode):
            raise ModelError(
                f"{name} is set, but speculation is {config.speculation}, so it would never guess; expected auto or "
                f"{mode}"
            )


def _draft_model(
    folder: Path, config: EngineConfig, target: Decoder, beside: Checkpoint, languages: Mapping[str, Language]
) -> Loaded:
    known = {**languages, "llama": _text_model(llama_config), "qwen2": _text_model(qwen_text_config)}
    known["qwen3"] = known["qwen2"]
    checkpoint = Checkpoint(folder, dtype=beside.dtype, device=beside.device)
    model_type = checkpoint.config.choice("model_type", tuple(known))
    _check_vocabulary(Path(config.model), folder)
    with contextlib.closing(checkpoint), torch.inference_mode():
        model = known[model_type](checkpoint)
    if model.config.experts is not None:
        raise ModelError(f"{folder}: a model with experts cannot guess; expected a dense one")
    cost = num_weights(model.config) / num_weights(target.config)

    def on(pools: Pools, _: NativeModel | None) -> Drafter:
        if pools.graphs is not None:
            # Triton comes with torch only where CUDA does.
            from engine.gpu.drafters import GraphedDraftModel, can_be_graphs

            if can_be_graphs(model.config.head_dim):
                return GraphedDraftModel(model, pools, vocab_size=target.config.vocab_size, cost=cost)
        return DraftModel(model, pools, vocab_size=target.config.vocab_size, cost=cost)

    return Loaded(entry_bytes(model.config, beside.dtype), model.config.num_layers, "", on)


def _text_model(read: Callable[..., object]) -> Language:
    """A language model that is saved by itself."""

    def load(checkpoint: Checkpoint) -> Decoder:
        tied = checkpoint.config.flag("tie_word_embeddings", False)
        return Decoder(checkpoint, read(checkpoint.config), prefix="model", head="lm_head", tied=tied)  # type: ignore[arg-type]

    return load


def _check_vocabulary(target: Path, draft: Path) -> None:
    """Raises `ModelError` where a token is another id in the draft model, or none."""
    ours, theirs = (load_tokenizer(ModelFolder(folder)).get_vocab(with_added_tokens=True) for folder in (target, draft))
    if ours == theirs:
        return
    wrong = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, theirs.get(token)), token),
    )
    token = wrong[0]
    raise ModelError(
        f"{draft} has another vocabulary than {target}, so it cannot guess for it: {len(wrong)} tokens differ, such as "
        f"{token!r}, which is {_id(ours, token)} in the model and {_id(theirs, token)} in the draft model"
    )


def _id(vocabulary: Mapping[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"


def _head(folder: Path, target: Decoder, beside: Checkpoint) -> Loaded:
    checkpoint = Checkpoint(folder, dtype=beside.dtype, device=beside.device)
    config = Eagle3Config.read(checkpoint.config, num_target_layers=target.config.num_layers)
    for name in ("hidden_size", "vocab_size"):
        own, expected = getattr(config, name), getattr(target.config, name)
        if own != expected:
            raise ModelError(f"{folder} is no head for this model: its {name} is {own}, the model's is {expected}")
    with contextlib.closing(checkpoint), torch.inference_mode():
        model = Eagle3(checkpoint, config)
        checkpoint.finish()
    cost, late_cost = (number(config) / num_weights(target.config) for number in (num_weights, num_late_weights))

    def on(pools: Pools, native: NativeModel | None) -> Drafter:
        if pools.graphs is not None:
            from engine.gpu.drafters import GraphedHead, can_be_graphs

            if can_be_graphs(config.head_dim):
                return GraphedHead(model, target, pools, cost=cost, late_cost=late_cost)
        if native is None:
            return Head(model, target, pools, cost=cost)
        return NativeHead(model, target, native, pools, cost=cost, late_cost=late_cost)

    return Loaded(head_entry_bytes(config, beside.dtype), 1, why_not_head(config), on)
