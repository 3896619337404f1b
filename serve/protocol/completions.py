"""``/v1/completions``, ``/tokenize`` with a prompt, ``/detokenize``."""

from typing import Annotated, Any

from pydantic import PlainValidator, SkipValidation

from serve.errors import bad_request
from serve.protocol.base import Body, refuse
from serve.protocol.sampling import SamplingFields

MAX_PROMPTS = 1024
"""Most prompts in one completion request."""

type Prompt = str | list[str] | list[int] | list[list[int]]


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

    prompt: Annotated[Prompt, PlainValidator(_check_prompt, json_schema_input_type=Prompt)]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True
    suffix: SkipValidation[Any] = None

    def check(self) -> None:
        super().check()
        refuse(self, {"suffix": ("",)})
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            order = "smaller" if self.best_of < n else "greater"
            raise bad_request(f"best_of ({self.best_of}) {order} than n ({n}) is not supported", param="best_of")
        if self.stream and self.echo and self.logprobs is not None and n > 1:
            raise bad_request("echo with logprobs and n > 1 cannot be streamed", param="echo")


class TokenizeRequest(Body):
    """``POST /tokenize`` with a prompt; with ``messages`` see ``TokenizeChatRequest``."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
