"""The request bodies: what fields there are and what types they have. Ranges are ``SamplingParams``' business.

Types are strict: ``"5"``, ``5.0`` and ``true`` are no integers. A field that is null counts as absent, save
``max_tokens``, where null means "to the end of the context". Unknown fields are refused by name.
"""

import dataclasses
from typing import Annotated, Any

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, SkipValidation, ValidationError

from jaxserve.request import SamplingParams
from serve.errors import ApiError, bad_request

MAX_PROMPTS = 1024
"""Most prompts in one completion request."""
MAX_MESSAGES = 4096


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


def _check_content(value: object) -> str | None:
    """Message content: a string, or a list of text parts, which are joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f'[{index}] must be an object with a "type"')
        if part["type"] != "text":
            raise ValueError(f"[{index}]: parts of type {part['type'][:40]!r} are not supported; only text is")
        if not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
            raise ValueError(f'[{index}] must hold "type" and "text" (a string) and nothing else')
        texts.append(part["text"])
    return "\n".join(texts)


def _check_role(value: object) -> str:
    if value == "tool" or value == "function":
        raise ValueError(f"{value!r} is not supported: this server does not take tools")
    if value not in ("system", "developer", "user", "assistant"):
        raise ValueError("must be system, developer, user or assistant")
    return "system" if value == "developer" else str(value)


type Prompt = str | list[str] | list[int] | list[list[int]]


class Body(BaseModel):
    """Any JSON object sent to the server."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Body):
    include_usage: bool = False


class Message(Body):
    role: Annotated[str, PlainValidator(_check_role, json_schema_input_type=str)]
    content: Annotated[str | None, PlainValidator(_check_content, json_schema_input_type=str | list[Any])] = None
    name: str | None = None
    tool_calls: SkipValidation[Any] = None


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
        _refuse(self, {"suffix": ("",)})
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            order = "smaller" if self.best_of < n else "greater"
            raise bad_request(f"best_of ({self.best_of}) {order} than n ({n}) is not supported", param="best_of")
        if self.stream and self.echo and self.logprobs is not None and n > 1:
            raise bad_request("echo with logprobs and n > 1 cannot be streamed", param="echo")


class ChatTemplateFields(Body):
    """What the chat template is given."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def template_messages(self) -> list[dict[str, str]]:
        """The messages as the template wants them. Raises ApiError that names the message at fault."""
        if not self.messages:
            raise bad_request("messages must not be empty", param="messages")
        for index, message in enumerate(self.messages):
            if message.tool_calls not in (None, []):
                param = f"messages[{index}].tool_calls"
                raise bad_request(f"{param} is not supported: this server does not take tools", param=param)
            if message.content is None:
                raise bad_request(f"messages[{index}].content is missing", param=f"messages[{index}].content")
        return [m.model_dump(include={"role", "content", "name"}, exclude_none=True) for m in self.messages]

    def template_options(self) -> dict[str, Any]:
        """Keywords for ``Tokenizer.apply_chat_template``. Raises ApiError."""
        opening = self.add_generation_prompt
        if self.continue_final_message and opening:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise bad_request(message, param="continue_final_message")
        kwargs = self.chat_template_kwargs or {}
        for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"):
            if name in kwargs:
                raise bad_request(f"chat_template_kwargs must not set {name}", param=f"chat_template_kwargs.{name}")
        opening = not self.continue_final_message if opening is None else opening
        return kwargs | {"add_generation_prompt": opening, "continue_final_message": self.continue_final_message}


class ChatRequest(ChatTemplateFields, SamplingFields):
    """``POST /v1/chat/completions``."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: SkipValidation[Any] = None
    tool_choice: SkipValidation[Any] = None
    parallel_tool_calls: bool | None = None
    functions: SkipValidation[Any] = None
    function_call: SkipValidation[Any] = None
    response_format: SkipValidation[Any] = None
    modalities: SkipValidation[Any] = None
    reasoning_effort: SkipValidation[Any] = None

    def check(self) -> None:
        super().check()
        harmless = {
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "functions": ([],),
            "function_call": ("none", "auto"),
            "response_format": ({"type": "text"},),
            "modalities": (["text"],),
            "reasoning_effort": (),
        }
        _refuse(self, harmless)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs may only be given with logprobs true", param="top_logprobs")
        if None not in (both := (self.max_tokens, self.max_completion_tokens)) and both[0] != both[1]:
            message = f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ; give one"
            raise bad_request(message, param="max_completion_tokens")


class TokenizeRequest(Body):
    """``POST /tokenize`` with a prompt; with ``messages`` see ``TokenizeChatRequest``."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatTemplateFields):
    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


def _refuse(body: BaseModel, harmless: dict[str, tuple[Any, ...]]) -> None:
    """Refuse fields the server knows and cannot honour, unless their value asks for nothing."""
    for name, values in harmless.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            param, shown = name, ""
            if isinstance(value, dict) and isinstance(value.get("type"), str):
                param, shown = f"{name}.type", f" ({value['type'][:40]!r})"
            raise bad_request(
                f"{name}{shown} is not supported by this server", param=param, code="unsupported_parameter"
            )


def load_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw`` without its null fields (but ``max_tokens``). NaN and lone surrogates are no JSON."""
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad_request(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the request body must be a JSON object", code="invalid_json")
    if isinstance(messages := value.get("messages"), list):
        value["messages"] = [_without_nulls(m) if isinstance(m, dict) else m for m in messages]
    return _without_nulls(value)


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None or key == "max_tokens"}


def validate[B: Body](kind: type[B], value: dict[str, Any], *, ignore_unknown: bool) -> B:
    """``value`` as a ``kind``. Raises ApiError that names the first few fields at fault."""
    try:
        return kind.model_validate(value, extra="ignore" if ignore_unknown else "forbid")
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    """One line for the first three faults; ``param`` and ``code`` tell of the first."""
    faults = error.errors(include_url=False, include_input=False)
    lines = []
    for fault in faults[:3]:
        name = _path(fault["loc"])
        if fault["type"] == "extra_forbidden":
            lines.append(f"unknown field {name!r}")
        elif fault["type"] == "missing":
            lines.append(f"{name} is required")
        elif fault["type"] == "value_error":
            lines.append(f"{name} {fault['ctx']['error']}")
        else:
            text = fault["msg"].removeprefix("Input should be ")
            lines.append(f"{name} must be {text}" if text != fault["msg"] else f"{name}: {text}")
    if len(faults) > 3:
        lines.append(f"and {len(faults) - 3} more")
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}.get(faults[0]["type"])
    return bad_request("; ".join(lines), param=_path(faults[0]["loc"]), code=code or "invalid_type")


def _path(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in loc)
    return text.removeprefix(".") or "body"
