"""The fields that every generating endpoint shares.

Ranges are checked by ``SamplingParams``; here they are written down for the API's description only.
"""

import dataclasses
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from jaxserve.request import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
    SamplingParams,
    StructuredOutputs,
)
from serve.errors import bad_request
from serve.protocol.base import Body
from serve.protocol.structured import JsonSchemaFormat, ResponseFormat, StructuredFields, chosen, one_of

MAX_PRIORITY = 2**31 - 1


def said(**schema: Any) -> Any:
    """What the API's description says of a field beside its type."""
    return Field(json_schema_extra=schema)


TOKEN_IDS: Any = {"type": "array", "items": {"type": "integer", "minimum": 0}}
STRING: Any = {"type": "string", "minLength": 1}


class StreamOptions(Body):
    include_usage: bool = False
    """End with a chunk that has no choices and all usage."""
    continuous_usage_stats: bool = False
    """Tell in every chunk the usage so far."""


class EngineFields(Body):
    """The fields that all generating endpoints share."""

    model: str | None = None
    temperature: Annotated[float | None, said(minimum=0, maximum=100)] = None
    top_k: Annotated[int | None, said(minimum=-1)] = None
    top_p: Annotated[float | None, said(exclusiveMinimum=0, maximum=1)] = None
    min_p: Annotated[float | None, said(minimum=0, maximum=1)] = None
    seed: Annotated[int | None, said(minimum=-(2**63), maximum=2**63 - 1)] = None
    presence_penalty: Annotated[float | None, said(minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, said(minimum=-2, maximum=2)] = None
    repetition_penalty: Annotated[float | None, said(exclusiveMinimum=0, maximum=100)] = None
    logit_bias: Annotated[
        SkipValidation[dict[str, float] | None],
        said(
            anyOf=[
                {
                    "type": "object",
                    "maxProperties": MAX_LOGIT_BIAS,
                    "propertyNames": {"pattern": "^[0-9]+$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "null"},
            ]
        ),
    ] = None
    allowed_token_ids: Annotated[
        SkipValidation[list[int] | None], said(anyOf=[TOKEN_IDS | {"minItems": 1}, {"type": "null"}])
    ] = None
    bad_words: Annotated[
        SkipValidation[list[str] | None],
        said(anyOf=[{"type": "array", "items": STRING, "maxItems": MAX_BAD_WORDS}, STRING, {"type": "null"}]),
    ] = None
    min_tokens: Annotated[int | None, said(minimum=0)] = None
    ignore_eos: bool | None = None
    stop: Annotated[
        SkipValidation[str | list[str] | None],
        said(anyOf=[STRING, {"type": "array", "items": STRING, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]),
    ] = None
    stop_token_ids: Annotated[SkipValidation[list[int] | None], said(anyOf=[TOKEN_IDS, {"type": "null"}])] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredFields | None = None
    stream: bool = False
    priority: Annotated[int, said(minimum=-MAX_PRIORITY - 1, maximum=MAX_PRIORITY)] = 0
    """Lower goes first."""
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """Prompts share cached tokens only where their salts are equal."""
    watermarking: bool | None = None
    """Whether to mark the text; as far as the operator leaves that to the request, whose wish it is where absent."""
    user: str | None = None
    """Accepted and not used."""

    def params(self, **more: Any) -> SamplingParams:
        """The sampling parameters: every field of that name that was given, then ``more``. Raises RequestError."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name, None) is not None}
        try:
            return SamplingParams(**(given | more))
        except OverflowError:
            raise bad_request("a number is too large for a float", code="invalid_value") from None

    def check(self) -> None:
        """Refuse combinations that make no sense."""
        if not -MAX_PRIORITY - 1 <= self.priority <= MAX_PRIORITY:
            raise bad_request("priority must fit in 32 bits", param="priority")


class SamplingFields(EngineFields):
    """The fields that both completion endpoints share."""

    n: Annotated[int | None, said(minimum=1, maximum=MAX_N)] = None
    max_tokens: Annotated[int | None, said(minimum=0)] = None
    prompt_logprobs: Annotated[int | None, said(minimum=0, maximum=MAX_LOGPROBS)] = None
    response_format: ResponseFormat | None = None
    truncate_prompt_tokens: Annotated[int | None, said(minimum=-1, **{"not": {"const": 0}})] = None
    """Keep the last so many tokens of the prompt; -1 as many as fit. The answer tells how many were dropped."""
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    def language(self) -> StructuredOutputs | None:
        """What the answer must belong to, where anything was asked for. Raises RequestError."""
        given = self.response_format
        wanted = chosen(given.json_schema if isinstance(given, JsonSchemaFormat) else given)
        return one_of(wanted, self.structured_outputs, "response_format")

    def language_field(self) -> str:
        """The field that ``language`` came from, for errors to name."""
        if self.structured_outputs is not None:
            return self.structured_outputs.field()
        return (
            "response_format.json_schema.schema"
            if isinstance(self.response_format, JsonSchemaFormat)
            else "response_format"
        )

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options may only be given with stream", param="stream_options")
        if (keep := self.truncate_prompt_tokens) is not None and (keep < -1 or keep == 0):
            message = f"truncate_prompt_tokens must be positive, or -1 for what fits; got {keep}"
            raise bad_request(message, param="truncate_prompt_tokens")


_SAMPLING = {f.name for f in dataclasses.fields(SamplingParams)} - {
    *("max_tokens", "logprobs", "echo", "structured_outputs", "keep_special_ids")
}
