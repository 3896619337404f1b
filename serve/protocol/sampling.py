"""The fields that every generating endpoint shares. Ranges are ``SamplingParams``' business."""

import dataclasses
from typing import Any

from pydantic import SkipValidation

from jaxserve.request import SamplingParams
from serve.errors import bad_request
from serve.protocol.base import Body


class StreamOptions(Body):
    include_usage: bool = False


class SamplingFields(Body):
    """The fields that both completion endpoints share."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: SkipValidation[dict[str, float] | None] = None
    allowed_token_ids: SkipValidation[list[int] | None] = None
    bad_words: SkipValidation[list[str] | None] = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: SkipValidation[str | list[str] | None] = None
    stop_token_ids: SkipValidation[list[int] | None] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    return_token_ids: bool = False
    user: str | None = None
    """Accepted and not used."""

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters: every field of that name that was given, then ``more``. Raises RequestError."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name, None) is not None}
        try:
            return SamplingParams(**(given | more))
        except OverflowError:
            raise bad_request("a number is too large for a float", code="invalid_value") from None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Refuse combinations that make no sense."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options may only be given with stream", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if not -(2**31) <= self.priority < 2**31:
            raise bad_request("priority must fit in 32 bits", param="priority")


_SAMPLING = tuple(
    f.name for f in dataclasses.fields(SamplingParams) if f.name not in ("max_tokens", "logprobs", "echo")
)
