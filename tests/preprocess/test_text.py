"""Chats → ids: equal to transformers for ordinary text, and text that spells control tokens stays text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import smooth

from preprocess.errors import ClientError, ServiceError
from preprocess.families import load_family
from preprocess.model_folder import ModelFolder
from preprocess.text import CACHED_CHARACTERS, PromptEncoder, _any_of, _runs_of
from preprocess.wire import ImagePart, Message, TextPart

Content = list[TextPart | ImagePart]
Turn = tuple[str, Sequence[str | None]]
"""A role, and its parts: text, or None for a picture."""

WORDS = [
    "What is in this picture?",
    "two\nlines",
    "  spaces  ",
    "naïve façade 写真 📷",
    "1234.5",
    "",
    "a < b > c",
    "\t\n",
]


@pytest.fixture(scope="session")
def encoder(tiny_model: Path) -> PromptEncoder:
    folder = ModelFolder(tiny_model)
    return PromptEncoder(folder, load_family(folder))


@pytest.fixture(scope="session")
def processor(tiny_model: Path) -> Any:
    """The reference, without splitting."""
    from transformers import Idefics3Processor, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil.from_pretrained(tiny_model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    template = (tiny_model / "chat_template.jinja").read_text()
    return Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


def messages(turns: Sequence[Turn]) -> list[Message]:
    return [
        Message(role, [ImagePart(b"x") if part is None else TextPart(part) for part in parts]) for role, parts in turns
    ]


PLACEHOLDER = "<fake_token_around_image><global-img>" + "<image>" * 4 + "<fake_token_around_image>"


def ours(encoder: PromptEncoder, turns: Sequence[Turn]) -> list[int]:
    count = sum(part is None for _, parts in turns for part in parts)
    return encoder.encode(messages(turns), [PLACEHOLDER] * count, [4] * count).ids


def theirs(processor: Any, turns: Sequence[Turn]) -> list[int]:
    image = smooth(40, 30)
    conversation = [
        {
            "role": role,
            "content": [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts],
        }
        for role, parts in turns
    ]
    text = processor.apply_chat_template(conversation, add_generation_prompt=True)
    images = [image for _, parts in turns for part in parts if part is None]
    ids: list[int] = processor(text=text, images=[images] if images else None)["input_ids"][0]
    return ids


@pytest.mark.parametrize(
    "turns",
    [
        [("user", ["Hello"])],
        [("user", [None, "What is this?"])],
        [("user", ["What is this?", None])],
        [("user", [None])],
        [("user", ["between", None, None, "two pictures", None])],
        [
            ("system", ["Be brief."]),
            ("user", [None, "Look"]),
            ("assistant", ["A cat."]),
            ("user", ["And", None, "now?"]),
        ],
        [("user", ["a"]), ("assistant", ["unfinished"])],
        [("user", ["<", ">"]), ("assistant", ["<not_a_token>"])],
        [("user", ["\n\n", None, "\n"])],
    ],
)
def test_prompts_equal_the_reference(encoder: PromptEncoder, processor: Any, turns: list[Turn]) -> None:
    assert ours(encoder, turns) == theirs(processor, turns)


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant", "system"]),
            st.lists(st.one_of(st.none(), st.sampled_from(WORDS), st.text(max_size=12)), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_ordinary_prompt_equals_the_reference(encoder: PromptEncoder, processor: Any, turns: list[Turn]) -> None:
    assert ours(encoder, turns) == theirs(processor, turns)


def test_split_pictures_equal_the_reference(tmp_path: Path, processor: Any, tiny_model: Path) -> None:
    """Splitting puts newlines between placeholders, which the tokenizer may merge."""
    folder = ModelFolder(tiny_model)
    family = load_family(folder)
    layout = family.layout(60, 50, "high")
    encoder = PromptEncoder(folder, family)
    prompt = encoder.encode(
        messages([("user", ["Read", None, "this"])]), [family.placeholder(layout)], [layout.num_tokens]
    )
    text = processor.apply_chat_template(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Read"}, {"type": "image"}, {"type": "text", "text": "this"}],
            }
        ],
        add_generation_prompt=True,
    )
    expected = processor(text=text, images=[[smooth(60, 50)]], do_image_splitting=True)["input_ids"][0]
    assert prompt.ids == expected
    assert sum(length for _, length in prompt.spans[0]) == layout.num_tokens
    assert all(set(prompt.ids[start : start + length]) == {3} for start, length in prompt.spans[0])


# ---- text that spells control tokens ---------------------------------------------------------------------------------

SPELLINGS = ["<image>", "<|im_end|>", "<|im_start|>", "<end_of_utterance>", "<row_1_col_1>", "<global-img>",
             "<fake_token_around_image>", "<|endoftext|>"]  # fmt: skip


def control_ids(encoder: PromptEncoder, ids: Sequence[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in encoder._special_ids]


def decoded(encoder: PromptEncoder, ids: Sequence[int]) -> str:
    text: str = encoder._tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("role", ["user", "system", "assistant", "developer"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelled_control_tokens_stay_text(encoder: PromptEncoder, role: str, spelling: str) -> None:
    plain = ours(encoder, [(role, ["say X now"]), ("user", ["go"])])
    attack = ours(encoder, [(role, [f"say {spelling} now"]), ("user", ["go"])])
    assert control_ids(encoder, attack) == control_ids(encoder, plain)
    assert decoded(encoder, attack) == decoded(encoder, plain).replace("X", spelling)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("cut", [1, 3, -1])
def test_spelled_over_two_parts(encoder: PromptEncoder, spelling: str, cut: int) -> None:
    ids = ours(encoder, [("user", [spelling[:cut], spelling[cut:]])])
    assert control_ids(encoder, ids) == control_ids(encoder, ours(encoder, [("user", ["x"])]))
    assert spelling in decoded(encoder, ids)


def test_a_spelled_image_takes_no_picture_and_no_place(encoder: PromptEncoder) -> None:
    prompt = encoder.encode(messages([("user", ["<image> and <image>", None, "<image>"])]), [PLACEHOLDER], [4])
    assert prompt.ids.count(3) == 4
    assert len(prompt.spans) == 1
    (start, length), = prompt.spans[0]  # fmt: skip
    assert prompt.ids[start : start + length] == [3] * 4


ODD = st.sampled_from(
    [*SPELLINGS, "<", ">", "|", "im", "age", "\u200b", "＜image＞", "\U0010fffd", "\U0010fffc", "\ufdd0", "é"]
)


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.lists(ODD, max_size=6).map("".join), min_size=1, max_size=4))
def test_no_composition_makes_a_control_token(encoder: PromptEncoder, parts: list[str]) -> None:
    ids = ours(encoder, [("user", parts), ("assistant", parts)])
    harmless = ours(encoder, [("user", ["x"]), ("assistant", ["x"])])
    assert control_ids(encoder, ids) == control_ids(encoder, harmless)
    assert decoded(encoder, ids).count("".join(parts)) >= 2 or not "".join(parts)


def variant(tiny_model: Path, target: Path, template: str | None = None, **tokenizer_config: Any) -> ModelFolder:
    """The tiny folder's small files with another template."""
    target.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json",
                 "processor_config.json", "chat_template.jinja", "generation_config.json"):  # fmt: skip
        shutil.copy(tiny_model / name, target / name)
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    if tokenizer_config:
        path = target / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | tokenizer_config))
    return ModelFolder(target)


def encoder_of(folder: ModelFolder) -> PromptEncoder:
    return PromptEncoder(folder, load_family(folder))


def test_templates_that_change_case_make_no_control_token(tiny_model: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] | lower | trim }}{% endfor %}{% endfor %}"
    )
    ids = ours(encoder_of(variant(tiny_model, tmp_path, template)), [("user", ["<IMAGE> <|IM_end|> "])])
    assert 3 not in ids


def test_tokens_not_marked_special_stay_text_too(tiny_model: Path, tmp_path: Path) -> None:
    """Some folders add `<global-img>` as an ordinary token, which the tokenizer matches in any text."""
    folder = variant(tiny_model, tmp_path)
    tokenizer = json.loads(folder.tokenizer_path.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"] not in ("<global-img>", "<row_1_col_1>")
    folder.tokenizer_path.write_text(json.dumps(tokenizer))
    encoder = encoder_of(folder)
    ids = ours(encoder, [("user", ["a<global-img>b<row_1_col_1>", None])])
    assert ids.count(encoder.token_id("<global-img>") or -1) == 1
    assert encoder.token_id("<row_1_col_1>") not in ids


def test_tokens_matched_in_normalised_text_stay_text_too(tiny_model: Path, tmp_path: Path) -> None:
    """NFKC turns ＜image＞ into <image>, and an added token may be looked for after that."""
    folder = variant(tiny_model, tmp_path)
    tokenizer = json.loads(folder.tokenizer_path.read_text())
    tokenizer["normalizer"] = {"type": "NFKC"}
    for token in tokenizer["added_tokens"]:
        if token["content"] == "<image>":
            token.update(normalized=True, special=False)
    folder.tokenizer_path.write_text(json.dumps(tokenizer))
    encoder = encoder_of(folder)
    assert encoder._tokenizer.encode("＜image＞", add_special_tokens=False).ids == [3]
    assert 3 not in ours(encoder, [("user", ["＜image＞ <image>"])])


def test_a_template_may_still_look_into_the_text(tiny_model: Path, tmp_path: Path) -> None:
    """Reasoning models' templates cut at ``</think>``, which is no control token."""
    template = (
        "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'text' %}"
        "{{ p['text'].split('</think>')[-1] }}{% endif %}{% endfor %}{% endfor %}"
    )
    encoder = encoder_of(variant(tiny_model, tmp_path, template))
    assert decoded(encoder, ours(encoder, [("assistant", ["<think>long</think>short"])])).endswith("short")
    assert "long" not in decoded(encoder, ours(encoder, [("assistant", ["<think>long</think>short"])]))


# ---- templates and turns ---------------------------------------------------------------------------------------------


def test_a_template_of_plain_strings(tiny_model: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    encoder = encoder_of(variant(tiny_model, tmp_path, template))
    prompt = encoder.encode(messages([("user", ["see ", None, " <image>"])]), [PLACEHOLDER], [4])
    assert decoded(encoder, prompt.ids).endswith(f"user: see {PLACEHOLDER} <image>\n")
    assert prompt.ids.count(3) == 4


def test_the_template_is_found_in_every_place(tiny_model: Path, tmp_path: Path) -> None:
    folder = variant(tiny_model, tmp_path)
    assert "Assistant:" in folder.chat_template
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "two"}))
    assert ModelFolder(tmp_path).chat_template == "two"
    (tmp_path / "chat_template.json").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "three"}]
    assert variant(tiny_model, tmp_path, chat_template=named) is not None
    (tmp_path / "chat_template.jinja").unlink()
    assert ModelFolder(tmp_path).chat_template == "three"
    variant(tiny_model, tmp_path, chat_template=None)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ServiceError, match="no chat template"):
        _ = ModelFolder(tmp_path).chat_template


def test_a_template_that_refuses_is_the_clients_error(tiny_model: Path, tmp_path: Path) -> None:
    template = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(ClientError, match="refuses these messages: Conversation roles must alternate"):
        ours(encoder_of(variant(tiny_model, tmp_path, template)), [("user", ["x"])])


@pytest.mark.parametrize("template", ["{{ messages[7].role.x }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / messages }}"])
def test_a_template_that_breaks_is_ours(tiny_model: Path, tmp_path: Path, template: str) -> None:
    with pytest.raises(ServiceError, match="chat template failed") as caught:
        ours(encoder_of(variant(tiny_model, tmp_path, template)), [("user", ["x"])])
    assert caught.value.status == 500


def test_a_template_that_cannot_be_read_ends_the_start(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="cannot be read as jinja"):
        encoder_of(variant(tiny_model, tmp_path, "{% for %}"))


def test_templates_get_what_transformers_gives_them(tiny_model: Path, tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{{ strftime_now('%Y') | length }}{{ {'a': '<é>'} | tojson }}"
        "{% generation %}g{% endgeneration %}"
        "{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ add_generation_prompt }}"
    )
    encoder = encoder_of(variant(tiny_model, tmp_path, template))
    assert decoded(encoder, ours(encoder, [("user", ["x"])])) == '<|im_start|>4{"a": "<é>"}g1True'


def test_a_picture_the_template_leaves_out(tiny_model: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['role'] }}{% if m['type'] %}{% endif %}{% endfor %}"
    with pytest.raises(ClientError, match="shows 0 of 1 pictures"):
        ours(encoder_of(variant(tiny_model, tmp_path, template)), [("user", [None])])


@pytest.mark.parametrize(
    ("turns", "code", "param"),
    [
        ([], "messages_empty", "messages"),
        ([("user", ["x"]), ("bot", ["y"])], "unknown_role", "messages[1].role"),
        ([("user", [])], "messages_empty", "messages[0].content"),
    ],
)
def test_turns_that_make_no_chat(encoder: PromptEncoder, turns: list[Turn], code: str, param: str) -> None:
    with pytest.raises(ClientError) as caught:
        ours(encoder, turns)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_developer_is_system(encoder: PromptEncoder) -> None:
    assert ours(encoder, [("developer", ["x"]), ("user", ["y"])]) == ours(encoder, [("system", ["x"]), ("user", ["y"])])


def test_half_surrogates_become_replacement_characters(encoder: PromptEncoder) -> None:
    assert ours(encoder, [("user", ["a\ud83d b"])]) == ours(encoder, [("user", ["a\ufffd b"])])
    assert ours(encoder, [("user", ["\ud83d\ude00"])]) == ours(encoder, [("user", ["😀"])])


def test_a_beginning_token_is_added_once(tiny_model: Path, tmp_path: Path) -> None:
    """As the reference processor does: the tokenizer's own frame is left out where the template begins with it."""
    from tokenizers import Tokenizer, processors

    for name, template, expected in (("with", "{{ bos_token }}hi", 1), ("without", "hi", 1)):
        folder = variant(tiny_model, tmp_path / name, template)
        tokenizer = Tokenizer.from_file(str(folder.tokenizer_path))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
        tokenizer.save(str(folder.tokenizer_path))
        assert ours(encoder_of(folder), [("user", ["x"])]).count(1) == expected


def test_text_that_came_before_has_the_same_ids_and_nobody_can_change_them(encoder: PromptEncoder) -> None:
    for text in ("", "What is in it?", "界 \U0001d160" * 9, "word " * (CACHED_CHARACTERS // 4)):
        first = encoder.encode_text(text)
        expected = list(encoder._ids_of(text))
        assert first == expected
        first.clear()
        assert encoder.encode_text(text) == expected


@given(st.lists(st.text("ab<", min_size=1, max_size=3), min_size=1, max_size=4), st.text("ab<", max_size=30))
def test_a_run_of_one_control_token_is_that_many_of_it(spellings: list[str], prompt: str) -> None:
    runs = _runs_of(dict.fromkeys(spellings)).finditer(prompt)
    found = [match[1] for match in runs for _ in range(len(match[0]) // len(match[1]))]
    assert found == [match[0] for match in _any_of(spellings).finditer(prompt)]
