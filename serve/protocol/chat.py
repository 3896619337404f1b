"""``/v1/chat/completions`` and ``/tokenize`` with messages."""

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, SkipValidation, Tag

from serve.errors import bad_request
from serve.protocol.base import BY_TYPE, Body, refuse
from serve.protocol.messages import Message
from serve.protocol.sampling import MAX_LOGPROBS, SamplingFields, said

MAX_MESSAGES = 4096
_RESERVED = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


class FunctionDefinition(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; without it the function takes no arguments."""
    strict: bool | None = None
    """Refuse the request where the schema cannot be enforced as a whole."""


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


type ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedTool, Tag("<function>")], BY_TYPE
]


class ChatTemplateFields(Body):
    """What the chat template is given."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    """auto where there are tools; required and a function's name are enforced."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """For models whose template has a switch: none turns reasoning off, the others on."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as the template wants them. Raises ApiError that names the message at fault."""
        if not self.messages:
            raise bad_request("messages must not be empty", param="messages")
        return [message.for_template(f"messages[{index}]") for index, message in enumerate(self.messages)]

    def tool_definitions(self) -> list[dict[str, Any]]:
        """The tools as the template wants them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def chosen_tool(self) -> str:
        """none, auto, required, or a function's name."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            if choice.function.name in ("none", "auto", "required"):
                raise bad_request("tool_choice names a function that is not among the tools", param="tool_choice")
            return choice.function.name
        return choice or "auto"

    def template_options(self) -> dict[str, Any]:
        """Keywords for ``Tokenizer.apply_chat_template``. Raises ApiError."""
        opening = self.add_generation_prompt
        if self.continue_final_message and opening:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise bad_request(message, param="continue_final_message")
        kwargs = self.chat_template_kwargs or {}
        for name in _RESERVED:
            if name in kwargs:
                raise bad_request(f"chat_template_kwargs must not set {name}", param=f"chat_template_kwargs.{name}")
        opening = not self.continue_final_message if opening is None else opening
        return kwargs | {"add_generation_prompt": opening, "continue_final_message": self.continue_final_message}


def _metadata(value: object) -> object:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError("must be an object of strings")
    return value


class ChatRequest(ChatTemplateFields, SamplingFields):
    """``POST /v1/chat/completions``."""

    max_completion_tokens: Annotated[int | None, said(minimum=0)] = None
    """The same as ``max_tokens``, which it replaces."""
    logprobs: bool = False
    top_logprobs: Annotated[int | None, said(minimum=0, maximum=MAX_LOGPROBS)] = None
    parallel_tool_calls: bool | None = None
    """False allows one call only."""
    metadata: Annotated[dict[str, str], PlainValidator(_metadata, json_schema_input_type=dict[str, str])] | None = None
    """Accepted and not used, as are the next two."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: SkipValidation[Any] = None
    service_tier: SkipValidation[Any] = None
    modalities: SkipValidation[Any] = None
    verbosity: SkipValidation[Any] = None
    functions: SkipValidation[Any] = None
    function_call: SkipValidation[Any] = None

    def check(self) -> None:
        super().check()
        if self.functions or self.function_call not in (None, "none", "auto"):
            name = "functions" if self.functions else "function_call"
            message = f"{name} is not supported: it was replaced by {'tools' if self.functions else 'tool_choice'}"
            raise bad_request(message, param=name, code="unsupported_parameter")
        harmless = {
            "functions": ([],),
            "store": (False,),
            "service_tier": ("auto", "default"),
            "modalities": (["text"],),
            "verbosity": ("medium",),
        }
        refuse(self, harmless)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs may only be given with logprobs true", param="top_logprobs")
        if None not in (both := (self.max_tokens, self.max_completion_tokens)) and both[0] != both[1]:
            message = f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ; give one"
            raise bad_request(message, param="max_completion_tokens")


class TokenizeChatRequest(ChatTemplateFields):
    """``POST /tokenize`` with a conversation."""

    model: str | None = None
    return_token_strs: bool = False
