"""The bodies that clients may send, as msgspec decodes them: every known field, and those known and not served."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from preprocess.wire import Detail
from server.shape_models import ResponseFormat, StructuredOutputs
from server.tool_models import Tool, ToolCallOut, ToolChoice

DEFAULT_PROMPT: Final = "Describe the picture."
DEFAULT_CLIP_PROMPT: Final = "Describe the video."
"""What is asked where nobody asks anything."""


class ImageUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `image_url` of a content part."""

    url: str
    detail: Detail | None = None


class TextContent(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """A content part with text."""

    text: str


class ImageContent(msgspec.Struct, frozen=True, tag="image_url", forbid_unknown_fields=True):
    """A content part with a picture."""

    image_url: ImageUrl


class VideoUrl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `video_url` of a content part. `fps` and `max_frames` are additions: how much of it is looked at."""

    url: str
    fps: float | None = None
    max_frames: int | None = None


class VideoContent(msgspec.Struct, frozen=True, tag="video_url", forbid_unknown_fields=True):
    """A content part with a clip."""

    video_url: VideoUrl


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn, with the fields that clients send back of an earlier answer: those must be empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextContent | ImageContent | VideoContent] | None = None
    tool_calls: list[ToolCallOut] | None = None
    tool_call_id: str | None = None
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream has besides text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is sampled, and its shape. null is the same as absent."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class Sampling(SamplingFields, frozen=True, kw_only=True):
    """What chat and captions have besides. `max_completion_tokens` is another name of `max_tokens`."""

    model: str | None = None
    stream: bool | None = None
    max_completion_tokens: int | None = None
    session_id: str | None = None
    priority: int | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    preset: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    # Change nothing in the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Would change the answer, and are not served: accepted only with a value that means "off" (see HARMLESS).
    store: Any = None
    service_tier: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    prompt_logprobs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None


# Field → values that ask for nothing beyond what is served. null always is one.
HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
}
MESSAGE_EXTRAS: Final = (
    "name",
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "reasoning",
    "reasoning_content",
)


CaptionFormat = Literal["json", "text", "timed_json", "srt", "vtt"]
TIMED_FORMATS: Final = ("timed_json", "srt", "vtt")
"""A clip's captions part by part, with their times."""


class CaptionRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a JSON `POST /v1/captions`; a form has the same fields, its files being the pictures and clips."""

    prompt: str | None = None
    preset: str | None = None
    format: CaptionFormat | None = None
    detail: Detail | None = None
    image: str | None = None
    images: list[str] | None = None
    video: str | None = None
    fps: float | None = None
    max_frames: int | None = None
    segment_s: float | None = None


# Fields that a form or a query may have, and those of the Python API.
CAPTION_FIELDS: Final = tuple(
    field.name for field in msgspec.structs.fields(CaptionRequest) if field.name not in {"image", "images", "video"}
)
SAMPLING_FIELDS: Final = tuple(
    field.name
    for field in msgspec.structs.fields(Sampling)
    if field.name not in {"model", "stream", "session_id", "priority"}
)
