"""What the routes answer, as types: the API's description is made of them, and tests hold the answers to them.

No field comes that is not named here; one that is ``NotRequired`` comes where it was asked for or applies.
"""

from typing import Any, Literal, NotRequired, TypedDict

from pydantic import ConfigDict, with_config

closed = with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))


@closed
class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    """The field at fault, as ``messages[0].role``."""
    code: str | None


@closed
class Error(TypedDict):
    """What comes instead of an answer; in a stream that has begun, as an event."""

    error: ErrorObject


@closed
class PromptTokensDetails(TypedDict):
    cached_tokens: int


@closed
class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


@closed
class Usage(TypedDict):
    prompt_tokens: int
    """Each prompt counts once, however many completions it has."""
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


@closed
class Logprobs(TypedDict):
    """Of each token: its text, its log-probability, those of the likeliest, where it begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@closed
class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


type PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id; null for the first token."""


@closed
class Watermark(TypedDict):
    """What was done about the mark, where the server has one. ``skipped``: it was to be marked and could not be."""

    status: Literal["watermarked", "skipped", "not_watermarked"]
    reason: str | None
    """Why it is not marked."""
    key_id: str | None
    stream: int | None
    """Which of the keys derived from that one marks it: detection with as many streams and one finds it."""


@closed
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    """The stop token id or stop string that ended it; null for the end of sequence."""
    prompt_logprobs: NotRequired[PromptLogprobs]
    watermark: NotRequired[Watermark]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


@closed
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    truncated_prompt_tokens: NotRequired[int]
    """How many tokens ``truncate_prompt_tokens`` dropped, of all prompts together."""


@closed
class CompletionPiece(TypedDict):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[int | str | None]
    prompt_logprobs: NotRequired[PromptLogprobs]
    watermark: NotRequired[Watermark]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


@closed
class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionPiece]
    usage: NotRequired[Usage | None]
    truncated_prompt_tokens: NotRequired[int]


@closed
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@closed
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@closed
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


@closed
class FunctionCall(TypedDict):
    name: str
    arguments: str
    """A JSON object, as text."""


@closed
class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


@closed
class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall]]


type ChatFinish = Literal["stop", "length", "tool_calls"]


@closed
class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    stop_reason: int | str | None
    watermark: NotRequired[Watermark]
    token_ids: NotRequired[list[int]]


@closed
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    truncated_prompt_tokens: NotRequired[int]


@closed
class FunctionCallPiece(TypedDict):
    name: NotRequired[str]
    arguments: NotRequired[str]


@closed
class ToolCallPiece(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallPiece


@closed
class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallPiece]]


@closed
class ChatPiece(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    stop_reason: NotRequired[int | str | None]
    watermark: NotRequired[Watermark]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@closed
class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPiece]
    usage: NotRequired[Usage | None]
    truncated_prompt_tokens: NotRequired[int]


@closed
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """What was loaded."""
    parent: None
    max_model_len: int


@closed
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


@closed
class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@closed
class Detokenized(TypedDict):
    prompt: str


@closed
class Health(TypedDict):
    status: Literal["ok", "starting", "stalled", "dead"]
    running: NotRequired[int]
    waiting: NotRequired[int]
    seconds_since_progress: NotRequired[float]


@closed
class Ready(TypedDict):
    status: Literal["ready", "loading", "shutting down", "dead"]
    phase: NotRequired[str]
    """What the start is at."""


@closed
class Load(TypedDict):
    server_load: int
    """Requests that the server works on."""
    running: int
    waiting: int


@closed
class Version(TypedDict):
    version: str


type Report = dict[str, Any]
"""The start-up report: what was loaded, chosen and measured."""
