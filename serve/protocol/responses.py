"""``/v1/responses``: items in, as a conversation. Nothing is stored, so whatever refers to stored things is refused."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from jaxserve.request import MAX_LOGPROBS, RequestError, SamplingParams, StructuredOutputs
from serve.errors import ApiError, bad_request
from serve.protocol.base import BY_TYPE, Body, refuse
from serve.protocol.sampling import EngineFields, said
from serve.protocol.structured import JsonObjectFormat, NamedSchema, TextFormat, chosen, one_of

MAX_ITEMS = 4096
MAX_TOOLS = 128
MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

type Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ReasoningPart(Body):
    type: Literal["reasoning_text", "summary_text"]
    text: str


type Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("<list>")], BY_TYPE
]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    output: Content
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    id: str | None = None
    encrypted_content: Annotated[None, WithJsonSchema({"type": "null"})] = None
    status: Status | None = None


def _item_tag(value: Any) -> str | None:
    """An item's type; a message need not say so."""
    if isinstance(value, MessageItem):
        return "<message>"
    name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if name is None and isinstance(value, dict) and value.get("role") is not None:
        return "<message>"
    return f"<{name}>" if isinstance(name, str) else None


type Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_item_tag),
]

type Input = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS), Tag("<list>")],
    BY_TYPE,
]


class SchemaFormat(NamedSchema):
    type: Literal["json_schema"]


type Format = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    BY_TYPE,
]


class TextOptions(Body):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; null for a function that takes nothing."""
    strict: bool | None = None

    def chat_form(self) -> dict[str, Any]:
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


type Tool = Annotated[Annotated[FunctionTool, Tag("<function>")], BY_TYPE]


class NamedTool(Body):
    type: Literal["function"]
    name: str


type ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedTool, Tag("<function>")], BY_TYPE
]


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    """Accepted and not used: what the model thinks is told whole."""


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(EngineFields):
    """``POST /v1/responses``."""

    input: Input
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int | None, said(minimum=1)] = None
    top_logprobs: Annotated[int | None, said(minimum=0, maximum=MAX_LOGPROBS)] = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Log-probabilities come where asked for here; reasoning is never encrypted."""
    text: TextOptions | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None
    """Comes back as it is."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """Accepted and not used, as are safety_identifier and prompt_cache_retention."""
    prompt_cache_retention: str | None = None
    store: Annotated[Any, WithJsonSchema({"const": False})] = None
    """Refused if true, as is whatever refers to stored responses: nothing is stored."""
    background: Annotated[Any, WithJsonSchema({"const": False})] = None
    truncation: Annotated[Any, WithJsonSchema({"const": "disabled"})] = None
    service_tier: Annotated[Any, WithJsonSchema({"enum": ["auto", "default"]})] = None
    previous_response_id: Annotated[Any, WithJsonSchema({"type": "null"})] = None
    conversation: Annotated[Any, WithJsonSchema({"type": "null"})] = None
    prompt: Annotated[Any, WithJsonSchema({"type": "null"})] = None
    max_tool_calls: Annotated[Any, WithJsonSchema({"type": "null"})] = None

    def check(self) -> None:
        super().check()
        harmless: dict[str, tuple[Any, ...]] = {
            "store": (False,),
            "background": (False,),
            "truncation": ("disabled",),
            "service_tier": ("auto", "default"),
        }
        refuse(self, harmless | dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls"), ()))
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options may only be given with stream", param="stream_options")
        if self.top_logprobs and not self.with_logprobs:
            message = f"top_logprobs may only be given with include [{LOGPROBS!r}]"
            raise bad_request(message, param="top_logprobs")
        if self.metadata is not None and len(self.metadata) > MAX_METADATA:
            raise bad_request(f"metadata holds more than {MAX_METADATA} entries", param="metadata")

    def sampling(self) -> SamplingParams:
        """The engine's parameters. Raises ApiError that names fields as they are called here."""
        logprobs = (self.top_logprobs or 0) if self.with_logprobs else None
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise bad_request("max_output_tokens must be at least 1", param="max_output_tokens")
        try:
            return self.params(max_tokens=self.max_output_tokens, logprobs=logprobs)
        except RequestError as error:
            raise renamed(error) from None

    def language(self) -> StructuredOutputs | None:
        """What the text must belong to. Raises RequestError."""
        format = None if self.text is None else self.text.format
        return one_of(chosen(format), self.structured_outputs, "text.format")

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def choice(self) -> str:
        """none, auto, required, or the name of a tool."""
        return self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.name


NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "prompt": "input",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
}
"""What fields of the engine and of chats are called here."""


def renamed(error: RequestError | ApiError) -> ApiError:
    """The error with the name of its field as it is called here."""
    name, _, rest = (error.param or "").partition("[")
    here = NAMES.get(name)
    if here is None:
        return error if isinstance(error, ApiError) else bad_request(str(error), param=error.param, code=error.code)
    param = here if name in ("prompt", "messages") else here + ("[" + rest if rest else "")
    message = str(error)
    if name != "prompt":
        message = message.replace(error.param or name, param, 1)
    return bad_request(message, param=param, code=error.code)
