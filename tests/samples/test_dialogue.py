"""Training strings are serving strings: the chat template, SmolVLM's picture strings, and the same ids."""

from pathlib import Path

import jinja2
import pytest
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from samples.training.clips import intro, stamp
from samples.training.dialogue import CHAT_TEMPLATE, Seen, Writer, image_string, load_tokenizer, message


def render(messages: list[dict[str, object]]) -> str:
    return jinja2.Environment().from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)


@pytest.mark.parametrize(("split", "rows"), [(False, 0), (True, 2)])
def test_a_picture_is_written_as_smolvlm_writes_it(split: bool, rows: int) -> None:
    theirs = get_image_prompt_string(rows, rows, 64, "<fake_token_around_image>", "<image>", "<global-img>")
    assert image_string(split) == theirs


def test_the_template_writes_what_training_wrote() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, {"type": "image"}]},
    ]
    ours = (
        "<|im_start|>"
        + message("System", ["Be brief."])
        + message("User", [Seen(), "What is this?"])
        + message("Assistant", ["A cat."])
        + message("User", ["And this?", Seen()])
        + "Assistant:"
    )
    assert render(messages).replace("<image>", image_string()) == ours


def test_text_alone_may_be_a_string_or_a_part() -> None:
    part = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert (
        render([{"role": "user", "content": "Hi"}])
        == render(part)
        == "<|im_start|>User: Hi<end_of_utterance>\nAssistant:"
    )


def test_frames_have_the_words_of_smolvlm() -> None:
    assert intro(4, 75) == "You are provided the following series of four frames from a 0:01:15 [H:MM:SS] video.\n"
    assert stamp(61.5) == "\nFrame from 01:01:"


def test_a_document_begins_with_the_prompt_that_serving_sends(samples: Path) -> None:
    writer = Writer(load_tokenizer(samples / "model"))
    turns = [([Seen(), "\nWhat is this?"], "A cat."), (["Where?"], "On the left.")]
    document = writer.document(turns, "Be brief.")
    first = [("System", ["Be brief."]), ("User", [Seen(), "\nWhat is this?"])]
    second = [*first, ("Assistant", ["A cat."]), ("User", ["Where?"])]
    for prompt in (writer.prompt(first), writer.prompt(second)):
        assert document.ids[: len(prompt)] == prompt
        assert document.weights[len(prompt) - 1] == 0
        assert document.weights[len(prompt)] > 0
    assert document.ids.count(3) == 64 * document.pictures == 64
