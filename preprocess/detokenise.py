"""Tokens of all running requests → text deltas, and stop strings found across token borders.

The detokenizer process and offline use call it. It knows nothing of sockets; of a request it knows ids and options.

  OutputStart ─▶ running ─ stop string found: text out, Stop to the engine ─▶ stopped ─ the engine's finish ─▶ forgotten
                    └────────────────── the engine's finish: rest of the text out ─────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from preprocess.incremental_text import ByteLevelText, IncrementalText, WindowText
from preprocess.model_folder import ModelFolder
from preprocess.stop_strings import StopMatcher
from preprocess.token_bytes import byte_fallback_table, byte_table, is_byte_level
from preprocess.tokenizer import load_tokenizer
from preprocess.wire import (
    Delta,
    DeltaLogprob,
    OutputStart,
    Stop,
    TextOptions,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
    Usage,
)


@dataclass
class _Sequence:
    """One request. `text` and `token_ids` wait to go out; of `text`, the last `stops.held` characters must wait."""

    options: TextOptions
    decoder: IncrementalText
    stops: StopMatcher | None
    num_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[DeltaLogprob] = field(default_factory=list)
    stopped_by: str | None = None
    strips: bool = False
    """Nothing but white space has come yet, and that is not wanted."""


class Detokenizer:
    """Holds the tokenizer's tables and every sequence that has started and not finished."""

    def __init__(self, model_folder: str) -> None:
        folder = ModelFolder(model_folder)
        tokenizer = load_tokenizer(folder)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = tokenizer.token_to_id(folder.named_tokens.get("eos_token", ""))
        self._eos_ids = frozenset(folder.eos_ids) | ({eos} if eos is not None else set())
        self._new_text: Callable[[], IncrementalText]
        if is_byte_level(tokenizer):
            table = byte_table(tokenizer)
            self._bytes_of: Callable[[int], bytes] = lambda token_id: table.get(token_id, b"")
            self._new_text = lambda: ByteLevelText(table)
        else:
            bytes_spelled = byte_fallback_table(tokenizer)

            def bytes_of(token_id: int) -> bytes:
                if token_id in bytes_spelled:
                    return bytes((bytes_spelled[token_id],))
                text: str = tokenizer.decode([token_id], skip_special_tokens=False)
                return text.encode()

            self._bytes_of = bytes_of
            self._new_text = lambda: WindowText(tokenizer, bytes_spelled)
        self._sequences: dict[str, _Sequence] = {}

    def start(self, start: OutputStart) -> None:
        """A request's output begins. Must precede its first tokens."""
        stops = StopMatcher(start.text.stop) if start.text.stop else None
        self._sequences[start.request_id] = _Sequence(
            start.text, self._new_text(), stops, strips=start.text.strip_leading_space
        )

    def reset(self) -> None:
        """Forget every request."""
        self._sequences.clear()

    def feed(self, message: TokenEvents) -> tuple[list[Delta], list[Stop]]:
        """Take the events of one step. Requests that never started, or finished before, are ignored."""
        deltas: list[Delta] = []
        stops: list[Stop] = []
        for event in message.events:
            sequence = self._sequences.get(event.request_id)
            if sequence is None:
                continue
            was_running = sequence.stopped_by is None
            if was_running:
                self._take(sequence, event)
            if event.finish_reason is not None:
                del self._sequences[event.request_id]
                if sequence.stopped_by is None:
                    self._flush(sequence)
                deltas.append(self._finish(sequence, event))
                continue
            if was_running and sequence.stopped_by is not None:
                stops.append(Stop(event.request_id, sequence.num_tokens))
            delta = _progress(sequence, event.request_id)
            if delta is not None:
                deltas.append(delta)
        return deltas, stops

    def _take(self, sequence: _Sequence, event: TokenEvent) -> None:
        """Read the new tokens, up to the end of a stop string."""
        last = len(event.token_ids) - 1
        for index, token_id in enumerate(event.token_ids):
            if event.first_index + index < sequence.num_tokens:
                continue  # told before
            sequence.num_tokens += 1
            sequence.token_ids.append(token_id)
            if event.logprobs:
                sequence.logprobs.append(self._logprob(token_id, event.logprobs[index]))
            ends = index == last and event.stop_token_id is not None
            if ends or (sequence.options.skip_special_tokens and token_id in self._special_ids):
                continue
            self._add_text(sequence, sequence.decoder.push(token_id))
            if sequence.stopped_by is not None:
                return

    def _flush(self, sequence: _Sequence) -> None:
        self._add_text(sequence, sequence.decoder.flush())

    def _add_text(self, sequence: _Sequence, text: str) -> None:
        if sequence.strips:
            text = text.lstrip()
            sequence.strips = not text
        held_before = len(sequence.text)
        sequence.text += text
        if sequence.stops is None:
            return
        match = sequence.stops.feed(text, ignore=sequence.num_tokens < sequence.options.min_tokens)
        if match is not None:
            end = held_before + match.end
            kept = end if sequence.options.include_stop_str_in_output else end - len(match.stop)
            sequence.text = sequence.text[:kept]
            sequence.stopped_by = match.stop

    def _finish(self, sequence: _Sequence, event: TokenEvent) -> Delta:
        finish_reason, usage = event.finish_reason, event.usage
        stop_reason: str | int | None = None
        if sequence.stopped_by is not None and finish_reason != "error":
            finish_reason, stop_reason = "stop", sequence.stopped_by
            usage = _without_discarded(usage, sequence.num_tokens)
        elif event.stop_token_id is not None and event.stop_token_id not in self._eos_ids:
            stop_reason = event.stop_token_id
        return Delta(
            event.request_id,
            sequence.text,
            sequence.token_ids,
            sequence.logprobs,
            finish_reason,
            stop_reason,
            usage,
            event.error,
        )

    def _logprob(self, token_id: int, logprobs: TokenLogprobs) -> DeltaLogprob:
        own = self._bytes_of(token_id)
        top: list[tuple[str, bytes, float]] = []
        for other_id, logprob in logprobs.top:
            other = self._bytes_of(other_id)
            top.append((other.decode("utf-8", "replace"), other, logprob))
        return DeltaLogprob(own.decode("utf-8", "replace"), own, logprobs.logprob, top)


def _progress(sequence: _Sequence, request_id: str) -> Delta | None:
    """The text that is certain now, with the ids that have come; None while there is no new text."""
    held = sequence.stops.held if sequence.stops is not None and sequence.stopped_by is None else 0
    ready = len(sequence.text) - held
    if ready < 1:
        return None
    delta = Delta(request_id, sequence.text[:ready], sequence.token_ids, sequence.logprobs)
    sequence.text, sequence.token_ids, sequence.logprobs = sequence.text[ready:], [], []
    return delta


def _without_discarded(usage: Usage | None, num_tokens: int) -> Usage | None:
    """Usage without the tokens behind a stop string, where the engine ended before it heard of the stop."""
    if usage is None or usage.completion_tokens <= num_tokens:
        return usage
    accepted = min(usage.accepted_prediction_tokens, num_tokens)
    return msgspec.structs.replace(usage, completion_tokens=num_tokens, accepted_prediction_tokens=accepted)
