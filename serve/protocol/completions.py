"""``/v1/completions``, ``/tokenize`` with a prompt, ``/detokenize``."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from jaxserve.request import MAX_LOGPROBS, MAX_N
from serve.errors import bad_request
from serve.protocol.base import Body, refuse
from serve.protocol.sampling import TOKEN_IDS, SamplingFields, said

MAX_PROMPTS = 1024
"""Most prompts in one completion request."""

type Prompt = str | list[str] | list[int] | list[list[int]]

_PROMPTS = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_SOME_IDS = TOKEN_IDS | {"minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [{"type": "string"}, _PROMPTS | {"items": {"type": "string"}}, _SOME_IDS, _PROMPTS | {"items": _SOME_IDS}]
}


def _check_prompt(value: object) -> str | list[str] | list[int] | list[list[int]]:
    """Tell the four forms of a prompt apart with a few passes at C speed: it may hold a million ids."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise ValueError("must not be empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        return value
    if kinds in ({str}, {list}) and len(value) > MAX_PROMPTS:
        raise ValueError(f"holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if kinds == {str}:
        return value
    if kinds == {list}:
        for index, ids in enumerate(value):
            if set(map(type, ids)) != {int}:
                raise ValueError(f"[{index}] must be a list of token ids that is not empty")
        return value
    raise ValueError("must not mix types: strings, token ids, or lists of token ids")


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    prompt: Annotated[Prompt, PlainValidator(_check_prompt), WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: Annotated[int | None, said(minimum=0)] = 16
    """null goes on to the end of the context, and so does a number beyond it; 0 needs echo or prompt_logprobs."""
    logprobs: Annotated[int | None, said(minimum=0, maximum=MAX_LOGPROBS)] = None
    echo: bool = False
    best_of: Annotated[int | None, said(minimum=1, maximum=MAX_N)] = None
    """Make so many completions, and answer with the ``n`` of the highest log-probability a token."""
    add_special_tokens: bool = True
    suffix: Annotated[Any, WithJsonSchema({"const": ""})] = None
    """Refused: no model here fills in."""

    def check(self) -> None:
        super().check()
        refuse(self, {"suffix": ("",)})
        if self.best_of is not None:
            n = 1 if self.n is None else self.n
            if self.best_of < n:
                raise bad_request(f"best_of ({self.best_of}) must not be smaller than n ({n})", param="best_of")
            if self.stream and self.best_of > n:
                message = (
                    f"best_of ({self.best_of}) greater than n ({n}) cannot be streamed: the best is known at the end"
                )
                raise bad_request(message, param="best_of")


class TokenizeRequest(Body):
    """``POST /tokenize`` with a prompt; with ``messages`` see ``TokenizeChatRequest``."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, said(minimum=0)]], Field(fail_fast=True)]
    skip_special_tokens: bool = False
