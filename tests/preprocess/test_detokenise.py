"""Ids → text: any cutting of the stream gives the text of the whole, and nothing after a stop string gets out."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from preprocess.detokenise import Detokenizer
from preprocess.incremental_text import WindowText
from preprocess.token_bytes import byte_fallback_table
from preprocess.wire import (
    Delta,
    OutputStart,
    Rejected,
    Stop,
    TextOptions,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
    Usage,
)

VOCAB_SIZE = 512  # of the tiny model; ids 0 … 22 are special
EOS = 6  # <end_of_utterance>
OTHER_EOS = 2  # in generation_config.json


def usage(completion_tokens: int) -> Usage:
    return Usage(5, completion_tokens, 0, 0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="session")
def detokenizer(tiny_model: Path) -> Detokenizer:
    return Detokenizer(str(tiny_model))


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@dataclass
class Said:
    """What came out of one request."""

    deltas: list[Delta] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def finish(self) -> Delta:
        assert [delta.finish_reason is not None for delta in self.deltas].index(True) == len(self.deltas) - 1
        return self.deltas[-1]


def run(
    detokenizer: Detokenizer,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    *,
    finish: str = "length",
    stop_token_id: int | None = None,
    engine_obeys: bool = True,
    logprobs: bool = False,
    **options: Any,
) -> Said:
    """Feed `ids` cut at `cuts` (default: one by one), as the engine would, and gather what comes out."""
    said = Said()
    detokenizer.start(OutputStart("r", TextOptions(**options)))
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))}) if cuts else list(range(len(ids) + 1))
    for start, end in pairwise(borders):
        if engine_obeys and said.stops:
            break
        new = list(ids[start:end])
        chances = [TokenLogprobs(-float(index), [(index, -1.0)]) for index in new] if logprobs else []
        last = end == len(ids)
        event = TokenEvent(
            "r", start, new, chances, finish if last else None, stop_token_id if last else None,  # type: ignore[arg-type]
            usage(len(ids)) if last else None,
        )  # fmt: skip
        deltas, stops = detokenizer.feed(TokenEvents([event]))
        said.deltas += deltas
        said.stops += stops
    if engine_obeys and said.stops:
        kept = said.stops[0].num_tokens
        end_event = TokenEvent("r", kept, [], [], "stop", None, usage(kept))
        deltas, stops = detokenizer.feed(TokenEvents([end_event]))
        said.deltas += deltas
        said.stops += stops
    return said


def ids_of(tokenizer: Any, text: str) -> list[int]:
    tokenizer.encode_special_tokens = True
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


IDS = st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=30)
BYTES_TOO = st.lists(st.one_of(st.integers(23, 278), st.integers(0, VOCAB_SIZE - 1)), max_size=30)
CUTS = st.lists(st.integers(1, 30), max_size=10)


@settings(max_examples=300, deadline=None)
@given(ids=IDS | BYTES_TOO, cuts=CUTS, skip=st.booleans())
def test_any_chunking_gives_the_text_of_the_whole(
    detokenizer: Detokenizer, tokenizer: Any, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Single bytes of invalid UTF-8 among them: replacement characters are where the tokenizer itself puts them."""
    said = run(detokenizer, [*ids, 50], cuts, skip_special_tokens=skip)
    assert said.text == tokenizer.decode([*ids, 50], skip_special_tokens=skip)
    assert said.token_ids == [*ids, 50]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), cuts=CUTS)
def test_any_text_comes_back(detokenizer: Detokenizer, tokenizer: Any, text: str, cuts: list[int]) -> None:
    ids = ids_of(tokenizer, text)
    if ids:
        assert run(detokenizer, ids, cuts).text == text


def test_half_a_character_waits_and_is_never_shown(detokenizer: Detokenizer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "📸写")
    assert len(ids) > 2
    assert all("\ufffd" not in delta.text for delta in run(detokenizer, ids).deltas)


def test_half_a_character_at_the_end_is_replaced(detokenizer: Detokenizer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "a📸")[:-1]
    said = run(detokenizer, ids)
    assert said.text == "a\ufffd" == tokenizer.decode(ids)
    assert said.finish.text == "\ufffd"


def test_a_genuine_replacement_character_passes_at_once(detokenizer: Detokenizer, tokenizer: Any) -> None:
    """sglang #34852: it looked like half a character for ever, and nothing streamed any more."""
    ids = ids_of(tokenizer, "\ufffd" * 100)
    said = run(detokenizer, [*ids, 50])
    assert said.text.startswith("\ufffd" * 100)
    assert len(said.deltas) >= 100


def test_a_run_of_invalid_bytes_streams_in_linear_time(detokenizer: Detokenizer, tokenizer: Any) -> None:
    lone = tokenizer.token_to_id("¤")  # byte 0xA4, which never begins a character
    said = run(detokenizer, [lone] * 100)
    assert said.text == "\ufffd" * 100
    assert len(said.deltas) == 100
    started = time.thread_time()
    run(detokenizer, [lone] * 20_000)
    assert time.thread_time() - started < 5


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("token", "reason"), [(EOS, None), (OTHER_EOS, None), (300, 300)])
def test_the_ending_token_is_not_shown(
    detokenizer: Detokenizer, tokenizer: Any, token: int, reason: int | None
) -> None:
    for skip in (True, False):
        said = run(
            detokenizer, [301, token], finish="stop", stop_token_id=token, skip_special_tokens=skip, logprobs=True
        )
        assert said.text == tokenizer.decode([301])
        assert (said.finish.finish_reason, said.finish.stop_reason) == ("stop", reason)
        assert said.token_ids == [301, token]


def test_a_finish_of_its_own_releases_what_was_held(detokenizer: Detokenizer, tokenizer: Any) -> None:
    said = run(detokenizer, ids_of(tokenizer, "one <st"), stop=["<stop>"])
    detokenizer.start(OutputStart("r", TextOptions(stop=["<stop>"])))
    first, _ = detokenizer.feed(TokenEvents([TokenEvent("r", 0, ids_of(tokenizer, "one <st"), [])]))
    assert first[0].text == "one "
    last, _ = detokenizer.feed(TokenEvents([TokenEvent("r", 7, [], [], "abort", None, usage(7))]))
    assert (last[0].text, last[0].finish_reason) == ("<st", "abort")
    assert said.text == "one <st"


def test_an_error_reaches_the_client(detokenizer: Detokenizer) -> None:
    error = Rejected("r", "the engine gave up", 500, "engine_failed")
    detokenizer.start(OutputStart("r", TextOptions()))
    deltas, _ = detokenizer.feed(TokenEvents([TokenEvent("r", 0, [], [], "error", None, None, error)]))
    assert (deltas[0].finish_reason, deltas[0].error) == ("error", error)


def test_forgotten_and_unknown_requests_are_ignored(detokenizer: Detokenizer) -> None:
    assert detokenizer.feed(TokenEvents([TokenEvent("nobody", 0, [30], [])])) == ([], [])
    run(detokenizer, [300])
    assert detokenizer.feed(TokenEvents([TokenEvent("r", 1, [301], [], "length")])) == ([], [])
    detokenizer.start(OutputStart("r", TextOptions()))
    detokenizer.reset()
    assert detokenizer.feed(TokenEvents([TokenEvent("r", 0, [301], [])])) == ([], [])


def test_requests_do_not_mix(detokenizer: Detokenizer, tokenizer: Any) -> None:
    texts = {"a": "first 📸 text", "b": "Zweiter Text, größer", "c": "写真"}
    streams = {name: ids_of(tokenizer, text) for name, text in texts.items()}
    got = dict.fromkeys(texts, "")
    for name in texts:
        detokenizer.start(OutputStart(name, TextOptions()))
    chance = random.Random(0)
    sent = dict.fromkeys(texts, 0)
    while any(sent[name] < len(ids) for name, ids in streams.items()):
        events = []
        for name, ids in streams.items():
            count = chance.randrange(3)
            new = ids[sent[name] : sent[name] + count]
            events.append(TokenEvent(name, sent[name], new, []))
            sent[name] += len(new)
        for delta in detokenizer.feed(TokenEvents(events))[0]:
            got[delta.request_id] += delta.text
    assert got == texts
    detokenizer.reset()


def test_tokens_told_twice_count_once(detokenizer: Detokenizer, tokenizer: Any) -> None:
    detokenizer.start(OutputStart("r", TextOptions()))
    first = detokenizer.feed(TokenEvents([TokenEvent("r", 0, [300, 301], [])]))[0]
    again = detokenizer.feed(TokenEvents([TokenEvent("r", 1, [301, 302], [], "length")]))[0]
    assert first[0].text + again[0].text == tokenizer.decode([300, 301, 302])


# ---- stop strings ----------------------------------------------------------------------------------------------------


def prefix_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of the tokens so far that can no longer change."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def reference(tokenizer: Any, ids: Sequence[int], stops: Sequence[str], min_tokens: int) -> tuple[str, str, int] | None:
    """Text before the first stop string, the string, and the number of tokens that gave it; ASCII only."""
    for count in range(1, len(ids) + 1):
        before, text = prefix_text(tokenizer, ids[: count - 1]), prefix_text(tokenizer, ids[:count])
        for end in range(len(before) + 1, len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop)]
            if ending and count >= min_tokens:
                longest = max(ending, key=len)
                return text[: end - len(longest)], longest, count
    return None


@pytest.fixture(scope="session")
def ascii_ids(tokenizer: Any) -> list[int]:
    return [i for i in range(23, VOCAB_SIZE) if (text := tokenizer.decode([i])).isascii() and text.isprintable()]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), cuts=CUTS, include=st.booleans(), obeys=st.booleans(), min_tokens=st.integers(0, 12))
def test_stop_strings_equal_the_obvious_search(
    detokenizer: Detokenizer,
    tokenizer: Any,
    ascii_ids: list[int],
    data: st.DataObject,
    cuts: list[int],
    include: bool,
    obeys: bool,
    min_tokens: int,
) -> None:
    ids = data.draw(st.lists(st.sampled_from(ascii_ids), min_size=1, max_size=20))
    text = tokenizer.decode(ids)
    piece = st.tuples(st.integers(0, len(text)), st.integers(1, 12)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = data.draw(st.lists(piece.filter(bool) | st.just("zzz"), min_size=1, max_size=4))
    said = run(
        detokenizer, ids, cuts, engine_obeys=obeys,
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens,
    )  # fmt: skip
    expected = reference(tokenizer, ids, stops, min_tokens)
    if expected is None:
        assert said.text == text
        assert said.finish.finish_reason == "length"
        assert said.stops == []
        return
    before, stop, count = expected
    assert said.text == before + (stop if include else "")
    assert (said.finish.finish_reason, said.finish.stop_reason) == ("stop", stop)
    assert said.finish.usage == usage(count)
    assert said.token_ids == ids[:count]
    assert len(said.stops) <= 1
    assert all(told == Stop("r", count) for told in said.stops)


def test_a_stop_string_over_many_tokens_never_shows(detokenizer: Detokenizer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "Answer: yes.###END### and more, much more")
    for width in range(1, len(ids)):
        said = run(detokenizer, ids, range(width, len(ids), width), stop=["###END###"], engine_obeys=False)
        assert said.text == "Answer: yes."
        assert said.finish.stop_reason == "###END###"


def test_only_what_may_become_a_stop_string_is_held(detokenizer: Detokenizer, tokenizer: Any) -> None:
    detokenizer.start(OutputStart("r", TextOptions(stop=["stop here please"])))
    shown = ""
    for index, token_id in enumerate(ids := ids_of(tokenizer, "we stop now, and stop he")):
        deltas, _ = detokenizer.feed(TokenEvents([TokenEvent("r", index, [token_id], [])]))
        shown += "".join(delta.text for delta in deltas)
        read = tokenizer.decode(ids[: index + 1])
        held = max((n for n in range(1, 16) if read.endswith("stop here please"[:n])), default=0)
        assert shown == read[: len(read) - held]
    detokenizer.reset()


def test_text_stops_at_once_and_the_finish_waits_for_the_engine(detokenizer: Detokenizer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "hello END")
    detokenizer.start(OutputStart("r", TextOptions(stop=["END"])))
    deltas, stops = detokenizer.feed(TokenEvents([TokenEvent("r", 0, ids, [])]))
    assert (deltas[0].text, deltas[0].finish_reason) == ("hello ", None)
    assert stops == [Stop("r", len(ids))]
    assert detokenizer.feed(TokenEvents([TokenEvent("r", len(ids), [300, 301], [])])) == ([], [])
    deltas, stops = detokenizer.feed(
        TokenEvents([TokenEvent("r", len(ids) + 2, [], [], "stop", None, usage(len(ids)))])
    )
    assert stops == []
    assert (deltas[0].text, deltas[0].token_ids, deltas[0].stop_reason) == ("", [], "END")


def test_predictions_behind_a_stop_string_are_not_counted(detokenizer: Detokenizer, tokenizer: Any) -> None:
    """All tokens come in one step, most of them guessed ahead; the string ends among them."""
    ids = tokenizer.encode("one two. three four").ids
    detokenizer.start(OutputStart("r", TextOptions(stop=["two."])))
    told = msgspec.structs.replace(usage(len(ids)), accepted_prediction_tokens=len(ids) - 1)
    (delta,), _ = detokenizer.feed(TokenEvents([TokenEvent("r", 0, ids, [], "length", None, told)]))
    assert delta.usage is not None
    assert (delta.text, delta.finish_reason) == ("one ", "stop")
    assert delta.usage.accepted_prediction_tokens == delta.usage.completion_tokens < len(ids) - 1


def test_a_stop_string_of_half_characters(detokenizer: Detokenizer, tokenizer: Any) -> None:
    said = run(detokenizer, ids_of(tokenizer, "abc 📸 def"), stop=["📸"])
    assert said.text == "abc "


def test_a_replacement_character_at_the_very_end_can_stop(detokenizer: Detokenizer, tokenizer: Any) -> None:
    said = run(detokenizer, ids_of(tokenizer, "ab📸")[:-1], stop=["\ufffd"])
    assert (said.text, said.finish.finish_reason, said.finish.stop_reason) == ("ab", "stop", "\ufffd")


# ---- log probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_carry_each_tokens_own_bytes(detokenizer: Detokenizer, tokenizer: Any) -> None:
    ids = ids_of(tokenizer, "é📸a")
    said = run(detokenizer, ids, logprobs=True)
    entries = [entry for delta in said.deltas for entry in delta.logprobs]
    assert len(entries) == len(ids)
    assert b"".join(entry.data for entry in entries) == "é📸a".encode()
    assert [entry.logprob for entry in entries] == [-float(token_id) for token_id in ids]
    assert entries[-1].token == "a"
    assert entries[-1].top == [("a", b"a", -1.0)]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in said.deltas)


# ---- other tokenizers ------------------------------------------------------------------------------------------------


def sentencepiece_like() -> Any:
    """Words with ▁ and single bytes, as Llama 2 and Gemma have them."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁", "▁the", "▁cat", "s", "▁sat", ".", "写", "a"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def windowed(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[str]]:
    text = WindowText(tokenizer, byte_fallback_table(tokenizer))
    pieces = [text.push(token_id) for token_id in ids] + [text.flush()]
    return "".join(pieces), pieces


WORDS = st.sampled_from([256, 257, 258, 259, 260, 261, 262, 263])
CHARACTERS = st.sampled_from(["é", "写", "📸", "\ufffd", "~"]).map(lambda character: list(character.encode()))


@settings(max_examples=200, deadline=None)
@given(groups=st.lists(WORDS.map(lambda word: [word]) | CHARACTERS, max_size=12))
def test_other_tokenizers_through_a_window(groups: list[list[int]]) -> None:
    ids = [token_id for group in groups for token_id in group]
    tokenizer = _SENTENCEPIECE
    assert windowed(tokenizer, ids)[0] == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_run_of_invalid_bytes_streams_through_the_window() -> None:
    text, pieces = windowed(_SENTENCEPIECE, [257, *[0xA4] * 100])
    assert text == "the" + "\ufffd" * 100
    assert max(map(len, pieces)) <= 3


_SENTENCEPIECE: Any = sentencepiece_like()


@given(text=st.text(alphabet=" \n\tab", max_size=12), cuts=st.lists(st.integers(1, 3), max_size=8))
def test_leading_space_is_left_out_on_wish_and_other_space_stays(
    detokenizer: Detokenizer, tokenizer: Any, text: str, cuts: list[int]
) -> None:
    said = run(detokenizer, ids_of(tokenizer, text), cuts, strip_leading_space=True)
    assert said.text == text.lstrip()
