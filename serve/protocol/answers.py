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
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    """The stop token id or stop string that ended it; null for the end of sequence."""
    prompt_logprobs: NotRequired[PromptLogprobs]
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


type Report = dict[str, Any]
"""The start-up report: what was loaded, chosen and measured."""
