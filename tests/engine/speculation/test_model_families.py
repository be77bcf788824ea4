"""Draft models and heads beside families with clips, DeepStack and positions of three axes: the same text, and guesses
that are as right as the text that the drafter sees allows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_heads import tiny_head
from tiny_models import FAMILIES

from engine.config import EngineConfig
from engine.core import Engine
from engine.load import load_runner
from engine.speculation.lengths import Always
from tests.engine.family_parity import CASES, Checked, pixels_of, run

NAMES = ["smolvlm2", "qwen2_vl", "qwen3_vl"]
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=NAMES)
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    return Checked(FAMILIES[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("kind", ["draft-model", "head"])
@pytest.mark.parametrize("chunk", [24, 4096])
def test_every_kind_of_chat_is_answered_as_without(checked: Checked, tmp_path: Path, kind: str, chunk: int) -> None:
    """All of them at once, each against itself alone without drafts."""
    if kind == "head":
        text = json.loads((checked.folder / "config.json").read_text())["text_config"]
        count = text["num_hidden_layers"]
        fields = {"eagle_aux_hidden_state_layer_ids": [count - 1, count // 2, count], "max_position_embeddings": 4096}
        rope = text.get("rope_parameters") or {}
        if "mrope_section" in rope:
            axes = {name: rope[name] for name in ("mrope_section", "mrope_interleaved") if name in rope}
            fields |= {"rope_scaling": {"rope_type": "default", **axes}, "head_dim": 2 * sum(rope["mrope_section"])}
        options = {"draft_head": str(tiny_head(tmp_path, checked.folder, fields=fields))}
    else:
        options = {"draft_model": str(checked.folder)}
    cases = [case for case in CASES if checked.shows(case)]
    requests = [checked.request(case, max_tokens=NEW_TOKENS) for case in cases]
    config = EngineConfig(str(checked.folder), dtype="float32", threads=1, kv_tokens=8192, max_running=8, **options)
    engine = Engine(
        EngineConfig("", max_batched_tokens=chunk, max_running=8, speculation=kind, check=True),  # type: ignore[arg-type]
        load_runner(config),
    )
    engine.speculator.controller = Always(3)
    for request in requests:
        engine.submit(request, pixels_of)
    said = run(engine)
    assert said == {request.request_id: checked.answer(request).ids for request in requests}
    assert sum(engine.speculator.drafted.values()) > 2 * len(cases)
    if kind == "draft-model":
        assert engine.speculator.accepted["draft-model"] > 0


def test_a_draft_model_with_three_axes_is_right_about_text(checked: Checked) -> None:
    """Its positions behind a picture are the model's own; about text alone it is always right."""
    config = EngineConfig(
        str(checked.folder), dtype="float32", threads=1, kv_tokens=4096, draft_model=str(checked.folder)
    )
    runner = load_runner(config)
    drafter = runner.drafter
    assert drafter is not None
    case = next(case for case in CASES if not any(not hasattr(part, "text") for m in CASES[case] for part in m.content))
    engine = Engine(EngineConfig("", speculation="draft-model", check=True), runner)
    engine.speculator.controller = Always(3)
    engine.submit(checked.request(case, max_tokens=NEW_TOKENS), pixels_of)
    run(engine)
    drafted, accepted = engine.speculator.drafted["draft-model"], engine.speculator.accepted["draft-model"]
    assert drafted == accepted > 0
    assert torch.get_num_threads() == 1
