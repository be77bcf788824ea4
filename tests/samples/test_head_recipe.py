"""Pieces of the head's recipe: what is asked, what is noted down, how rounds are unrolled, trained and measured."""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import distributed

from samples.training.batches import Maker
from samples.training.dialogue import UTTERANCE, Seen, load_tokenizer
from samples.training.head import answers, train
from samples.training.head.answers import Target
from samples.training.head.batches import by_length, stream, together
from samples.training.head.evaluate import Tally, lines, measure, right
from samples.training.head.export import head_config, load, shape_of, target_state, write
from samples.training.head.model import Head, HeadShape
from samples.training.head.stories import TOP, Answer, Story
from samples.training.head.stories import load as load_stories
from samples.training.head.stories import save as save_stories
from samples.training.head.talks import KINDS, MIX, Asker, Question, Talk, draw, presets
from samples.training.model import load as load_model
from samples.training.pack import Pack
from tests.samples.plain_head import PlainHead, Sizes

SMALL = HeadShape(width=32, hidden=48, heads=4, kv_heads=2, head_dim=8)
DRAWABLE = {kind: share for kind, share in MIX.items() if kind != "read"}  # writing needs typefaces
FUSED = (1, 2, 3)


def story(seed: int, tokens: int = 14, vocabulary: int = 50) -> Story:
    """Numbers without meaning in the form of a talk with two answers."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, vocabulary, (tokens,), generator=rng)
    likely = torch.stack([torch.randperm(vocabulary, generator=rng)[:TOP] for _ in range(tokens)])
    likely[:, 0] = ids
    chance = torch.rand(tokens, TOP, generator=rng).sort(descending=True).values ** 6 + 1e-3
    chance[:, 0] = 3.0
    states = torch.randn(tokens, 4, SMALL.width, generator=rng).bfloat16()
    own = [Answer(4, 8, KINDS.index("chat")), Answer(10, tokens, KINDS.index("read"))]
    return Story(ids, states, likely, chance / chance.sum(1, keepdim=True), own)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads wait for each other at every small operation of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_head(seed: int = 0) -> Head:
    torch.manual_seed(seed)
    return Head(SMALL).eval()


# ---- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(DRAWABLE))
def test_every_kind_gives_a_talk_whose_pictures_are_in_its_turns(pack: Pack, kind: str) -> None:
    asker = Asker(Maker(pack, None, 3))
    for _ in range(5):
        talk = asker.talk(kind)
        seen = sum(isinstance(part, Seen) for parts, _ in talk.turns for part in parts)
        assert talk.turns
        assert seen == len(talk.pictures)
        assert all(question.text in str(parts[-1]) for parts, question in talk.turns if kind != "set")
        assert talk.turns[0][1].kind == kind


def test_a_seed_gives_the_same_talks(pack: Pack) -> None:
    first, again = (draw(Asker(Maker(pack, None, 5)), DRAWABLE) for _ in range(2))
    assert [first().turns for _ in range(8)] == [again().turns for _ in range(8)]


def test_prompts_of_presets_are_asked_as_they_are_sent(pack: Pack) -> None:
    asker = Asker(Maker(pack, None, 1))
    asked = {asker.question(kind).text for kind in ("caption", "detail", "placard", "shape") for _ in range(60)}
    wanted = ("one_line", "alt_text", "describe", "placard_in_words", "museum_placard", "hazards", "list_objects")
    assert {presets()[name]["prompt"] for name in wanted} <= asked
    assert json.loads(asker.question("shape").schema)["type"] == "object"


# ---- what is noted down ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(samples: Path) -> list[Story]:
    """Two talks with the bundled model in float32: one about a picture, with two turns, and one in a shape."""
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                         "additionalProperties": False})  # fmt: skip
    first = Talk([([Seen(), "Describe the picture."], Question("caption", "Describe the picture.")),
                  (["Is there a dog?"], Question("chat", "Is there a dog?"))], [None])  # type: ignore[list-item]  # fmt: skip
    second = Talk([(["Hello"], Question("shape", "Hello", schema))])
    with torch.inference_mode():
        target = Target(samples / "model", rows=2, dtype="float32")
        pixels = torch.full((1, 256, 256, 3), 200, dtype=torch.uint8)
        return target.answer([first, second], pixels)


def test_answers_are_what_the_target_finds_likeliest(told: list[Story], samples: Path) -> None:
    tokenizer = load_tokenizer(samples / "model")
    assert [len(one.answers) for one in told] == [2, 1]
    for one in told:
        for answer in one.answers:
            said = slice(answer.start, answer.end)
            assert torch.equal(one.likely[said, 0], one.ids[said])
            assert int(one.ids[answer.end - 1]) == UTTERANCE or KINDS[answer.kind] == "shape"
        assert float(one.chance.sum(1).max()) <= 1.0 + 1e-5
    shaped = tokenizer.decode(told[1].ids[told[1].answers[0].start :].tolist()).strip()
    assert set(json.loads(shaped)) == {"a"}


def test_states_are_those_of_the_recipes_own_model(told: list[Story], samples: Path) -> None:
    model = load_model(samples / "model", torch.float32)
    entered: list[torch.Tensor] = []
    for layer in model.model.text_model.layers:
        layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    one = told[0]
    ids = one.ids[None, :-1]
    length = ids.shape[1]
    places = (ids.flatten() == answers.IMAGE_ID).nonzero().flatten()
    pixels = torch.full((1, 3, 256, 256), 200 / 127.5 - 1)
    with torch.inference_mode():
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        model.hidden(ids, torch.arange(length)[None], mask, model.see(pixels).flatten(0, 1), places)
    expected = torch.stack([x[0] for x in entered], 1)  # (tokens, layers, width)
    assert torch.allclose(one.states[:-1], expected, atol=2e-3, rtol=1e-3)


def test_stories_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = [story(1), story(2, 17)]
    save_stories(written, tmp_path / "a.safetensors")
    for one, again in zip(written, load_stories(tmp_path / "a.safetensors"), strict=True):
        assert one.answers == again.answers
        for name in ("ids", "states", "likely"):
            assert torch.equal(getattr(one, name), getattr(again, name))
        assert torch.allclose(one.chance, again.chance.float(), atol=1e-3)


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_unrolled_rounds_are_those_of_the_plain_head() -> None:
    head, stories = small_head(), [story(3), story(4, 19)]
    batch = together(stories, FUSED)
    plain = PlainHead(dict(head.state_dict()), torch.randn(50, SMALL.width), Sizes(4, 2, 8))
    with torch.inference_mode():
        drafted = list(head.drafts(batch.embeds.float(), batch.states.float(), batch.starts, 4))
        for n, one in enumerate(stories):
            states = one.states.float()
            for r in batch.rounds[n].nonzero().flatten().tolist():
                start = int(batch.starts[n, r])
                plain.forget(0)
                for entry in range(start):
                    plain.remember(states[entry + 1, 0], plain.fuse(states[entry, list(FUSED)]), entry + 1)
                hidden = plain.fuse(states[start, list(FUSED)])
                for step in range(min(4, len(one) - start - 2)):
                    hidden = plain.see(states[start + step + 1, 0], hidden, start + step + 1)
                    assert torch.allclose(drafted[step][n, r], hidden, atol=1e-4), (n, r, step)


def test_a_round_begins_at_every_token_that_another_follows() -> None:
    batch = together([story(5)], FUSED)
    assert (batch.starts[batch.rounds] + 1).tolist() == [4, 5, 6, 10, 11, 12]
    real, likely, _ = batch.targets(1)
    assert real[batch.rounds].tolist() == [True, True, False, True, True, False]
    assert torch.equal(likely[real][:, 0], story(5).ids[torch.tensor([6, 7, 12, 13])])


def test_groups_hold_every_story_once_and_keep_their_bound() -> None:
    stories = [story(seed, random.Random(seed).randint(12, 60)) for seed in range(30)]
    groups = by_length(stories, 150)
    assert sorted(id(one) for group in groups for one in group) == sorted(map(id, stories))
    assert all(len(group) * max(map(len, group)) <= 150 for group in groups)


# ---- training --------------------------------------------------------------------------------------------------------


def test_a_loss_over_all_tokens_is_cross_entropy_to_the_target() -> None:
    head, table = small_head(), torch.randn(50, SMALL.width)
    batch = together([story(6)], FUSED)
    batch.embeds, batch.states = batch.embeds.float(), batch.states.float()
    loss, _ = train.round_loss(head, table, batch, 1, others=50)
    real, likely, chance = batch.targets(0)
    hidden = next(head.drafts(batch.embeds, batch.states, batch.starts, 1))[real]
    scores = (head.norm(hidden) @ table.T).log_softmax(1).gather(1, likely[real][:, : train.USED])
    chance = chance[real][:, : train.USED]
    chance = chance / chance.sum(1, keepdim=True)
    assert loss.item() == pytest.approx((-(chance * scores).sum(1).mean()).item(), rel=1e-5)


def test_drawn_tokens_stand_for_all_that_are_left_out() -> None:
    torch.manual_seed(0)
    chosen, lift = train.candidates(torch.tensor([[3, 7], [7, 9]]), 103, others=10)
    assert len(chosen) == 13
    assert {3, 7, 9} <= set(chosen.tolist())
    assert lift[lift > 0].exp().sum().item() == pytest.approx(100)
    assert lift[torch.isin(chosen, torch.tensor([3, 7, 9]))].abs().sum() == 0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Options of a run on a few stories, with a target of no more than a table."""
    save_stories([story(seed, 14 + seed % 5) for seed in range(4)], tmp_path / "a.safetensors")
    target = {"model.text_model.embed_tokens.weight": torch.randn(50, SMALL.width)}
    monkeypatch.setattr(train, "target_state", lambda: target)
    monkeypatch.setattr(train.Head, "begin", lambda self, target, layer: None)
    monkeypatch.setattr(train.HeadShape, "beside", staticmethod(lambda target, hidden, fused: SMALL))
    return argparse.Namespace(
        stories=tmp_path, out=tmp_path, steps=40, minutes=0.0, hidden=48, fused=FUSED, drafts=3, others=50, tokens=200,
        rate=2e-3, matrix_rate=4e-2, warm=5, average=0.9, start=None, test=None, log=1e9, seed=1, workers=1, threads=1,
    )  # fmt: skip


def test_training_learns_its_stories_by_heart_and_its_export_keeps_that(
    run: argparse.Namespace, tmp_path: Path
) -> None:
    train.work(0, run)
    saved = torch.load(tmp_path / "head.pt", weights_only=True)
    head = Head(HeadShape(**saved["shape"]))
    head.load_state_dict(saved["average"])
    write(head, saved["fused"], tmp_path / "out")
    again, fused = load(tmp_path / "out")
    assert tuple(fused) == FUSED
    table = train.target_state()["model.text_model.embed_tokens.weight"]
    stories = load_stories(tmp_path / "a.safetensors")
    fresh = measure(small_head(9).bfloat16(), table.bfloat16(), stories, FUSED)["all"]["acceptance"][0]
    learnt = measure(again.bfloat16(), table.bfloat16(), stories, FUSED)["all"]["acceptance"][0]
    assert fresh < 0.2 < 0.8 < learnt


def test_workers_share_the_mean_of_their_gradients(run: argparse.Namespace, tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        head = small_head()
        sum(p.square().sum() for p in head.parameters()).backward()
        before = [p.grad.clone() for p in head.parameters()]
        train.shared(head, 2)  # the other worker's gradients are nothing: it is not there
        assert all(torch.allclose(p.grad, g / 2) for p, g in zip(head.parameters(), before, strict=True))
    finally:
        distributed.destroy_process_group()


def test_a_head_begins_as_the_layer_that_would_come_next() -> None:
    target = target_state()
    head = Head(HeadShape())
    head.begin(target, 6)
    states = torch.randn(5, 3, 384)
    assert torch.corrcoef(torch.stack((head.fuse(states).flatten(), states[:, 2].flatten())))[0, 1] > 0.9
    prefix = "model.text_model.layers.6.self_attn"
    assert torch.equal(head.midlayer.self_attn.k_proj.weight[:, 384:], target[f"{prefix}.k_proj.weight"])


def test_files_that_come_while_training_are_read_the_next_time(tmp_path: Path) -> None:
    save_stories([story(1)], tmp_path / "a.safetensors")
    batches = stream(tmp_path, FUSED, seed=1)
    assert len(next(batches).embeds) == 1
    save_stories([story(2, 20), story(3, 20)], tmp_path / "b.safetensors")
    assert sum(len(batch.embeds) for batch, _ in zip(batches, range(1), strict=False)) == 3


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_tokens_a_step_follow_from_which_drafts_are_right() -> None:
    hits = torch.tensor(
        [[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    )
    reals = torch.tensor(
        [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    )
    tally = Tally()
    tally.add(hits * reals, reals)
    row = tally.row()
    assert row["acceptance"][:2] == [round(4 / 6, 4), 0.5]
    # Without drafts six steps; one draft: rounds 0, 2, 4 accept it; two drafts: 0 accepts two, then 3 accepts two.
    assert row["tokens_a_step"] == {"1": 2.0, "2": 3.0, "3": 3.0, "5": 3.0}


def test_drafts_are_counted_as_a_head_with_drafts_of_its_own_would_have_them_accepted() -> None:
    head, one = small_head(2), story(8, 40)
    one.answers[1] = Answer(10, 40, one.answers[1].kind)
    table = torch.randn(50, SMALL.width)
    batch = together([one], FUSED)
    batch.embeds, batch.states = table[one.ids[1:]][None], batch.states.float()
    with torch.inference_mode():
        hits, reals = right(head, table, batch)
        plain = PlainHead(dict(head.state_dict()), table, Sizes(4, 2, 8))
        for r in range(int(batch.rounds.sum())):
            start = int(batch.starts[0, r])
            plain.forget(0)
            known = [plain.fuse(states) for states in batch.states[0]]
            for entry in range(start):
                plain.remember(batch.embeds[0, entry], known[entry], entry + 1)
            tokens = plain.round(batch.embeds[0, start], known[start], start + 1, 5)
            expected = [int(one.ids[min(start + 2 + n, 39)]) for n in range(5)]
            run = [bool(reals[0, r, n]) and tokens[: n + 1] == expected[: n + 1] for n in range(5)]
            assert hits[0, r].cumprod(0).tolist() == run


def test_the_table_of_a_measurement_has_a_line_for_each_kind() -> None:
    table = measure(small_head().bfloat16(), torch.randn(50, SMALL.width).bfloat16(), [story(1), story(2)], FUSED)
    assert list(table) == ["read", "chat", "all"]
    assert table["read"]["answers"] == 2
    assert table["all"]["tokens"] == 2 * (3 + 3)
    assert len(lines(table)) == 4


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_a_folder_has_the_published_names_and_comes_back(tmp_path: Path) -> None:
    head = small_head(4)
    write(head, FUSED, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == head_config(SMALL, FUSED)
    assert shape_of(config) == SMALL
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = {name.removesuffix("_packed") for name in file.keys() if not name.endswith(("_scale", "_shape"))}  # noqa: SIM118
    projections = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    assert names == {"fc.weight", "norm.weight", *(f"midlayer.{name}.weight" for name in (*projections, *norms))}
    again, _ = load(tmp_path)
    for name, weight in head.state_dict().items():
        assert torch.allclose(again.state_dict()[name], weight, atol=float(weight.abs().max()) / 100)
