"""``/v1/chat/completions`` and ``/tokenize`` with messages."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator, SkipValidation

from serve.errors import bad_request
from serve.protocol.base import Body, refuse
from serve.protocol.sampling import SamplingFields

MAX_MESSAGES = 4096


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


class Message(Body):
    role: Annotated[str, PlainValidator(_check_role, json_schema_input_type=str)]
    content: Annotated[str | None, PlainValidator(_check_content, json_schema_input_type=str | list[Any])] = None
    name: str | None = None
    tool_calls: SkipValidation[Any] = None


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
        refuse(self, harmless)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs may only be given with logprobs true", param="top_logprobs")
        if None not in (both := (self.max_tokens, self.max_completion_tokens)) and both[0] != both[1]:
            message = f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ; give one"
            raise bad_request(message, param="max_completion_tokens")


class TokenizeChatRequest(ChatTemplateFields):
    model: str | None = None
    return_token_strs: bool = False
