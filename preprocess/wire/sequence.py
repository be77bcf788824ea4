"""What the engine needs to know of one sequence: ids, pixels, how it is sampled, how its text is told."""

from __future__ import annotations

from typing import Final

import msgspec

GREEDY_TEMPERATURE: Final = 0.0


class Pixels(msgspec.Struct, frozen=True):
    """uint8 pixels of one item, C order: in the arena at `offset` or inline.

    `shape` = (tiles or frames, height, width, 3).
    """

    shape: tuple[int, int, int, int]
    offset: int = 0
    inline: bytes = b""


class MediaItem(msgspec.Struct, frozen=True):
    """What the encoder attends over at once: a picture, or of a clip one frame or a few that it sees together.

    `digest` (32 bytes) names the encoded bytes and every option that changes its tokens. `spans` are the
    (start, length) runs of placeholder ids in the prompt that its vision tokens replace, in order.
    """

    digest: bytes
    pixels: Pixels
    spans: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """Vision tokens of this item."""
        return sum(length for _, length in self.spans)


class SamplingParams(msgspec.Struct, frozen=True):
    """How one sequence is sampled: all resolved, nothing left to default.

    `temperature` 0 is greedy. `top_k` 0 is all. `stop_token_ids` holds the model's end ids too, unless `ignore_eos` was
    asked. `seed` (63 bits) and the output index are the whole state of the noise.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: int | None = None
    score_ids: list[int] = msgspec.field(default_factory=list)
    """Log probabilities are those of these ids, in this order, instead of the most likely ones'."""
    grammar: str = ""
    """In the form that `preprocess.grammar` gives it; empty: any text."""


class TextOptions(msgspec.Struct, frozen=True):
    """What the detokenizer must know of a request."""

    stop: list[str] = msgspec.field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    strip_leading_space: bool = False
    """Where the prompt ends in text (``Assistant:``), answers begin with a space, which is no part of them: in the next
    turn the template writes it again."""
    min_tokens: int = 0
    """A stop string that ends before this many output tokens is ordinary text."""


class EngineRequest(msgspec.Struct, frozen=True, tag="request"):
    """One sequence for the engine. `prompt_ids`: int64 little-endian token ids, placeholders not yet replaced.

    `positions`: of models whose positions have three axes (M-RoPE), int32 little-endian (3, n): time, row and column of
    the first n tokens of the prompt, at least to the end of its last item. What follows goes on from the largest + 1 on
    all axes. Empty: 0, 1, 2, … The keys and values of a prefix are shared by ids, so whatever decides positions must
    be in the ids or in the items' digests.
    """

    request_id: str
    prompt_ids: bytes
    media: list[MediaItem]
    sampling: SamplingParams
    text: TextOptions
    arrival_s: float
    session_id: str = ""
    priority: int = 0
    positions: bytes = b""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length in tokens."""
        return len(self.prompt_ids) // 8
