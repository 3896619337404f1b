"""What ``/v1/responses`` answers, as types: the response, its items, and the events of a stream."""

from typing import Any, Literal, NotRequired, TypedDict

from serve.protocol.answers import TokenLogprob, Watermark, closed

type Status = Literal["in_progress", "completed", "incomplete"]


@closed
class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


@closed
class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@closed
class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


@closed
class OutputReasoning(TypedDict):
    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


@closed
class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""


type OutputItem = OutputMessage | OutputReasoning | OutputCall


@closed
class ResponseError(TypedDict):
    code: str
    message: str


@closed
class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


@closed
class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


@closed
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


@closed
class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


@closed
class EchoedReasoning(TypedDict):
    effort: str | None
    summary: None


@closed
class EchoedText(TypedDict):
    format: dict[str, Any]
    verbosity: Literal["medium"]


@closed
class EchoedTool(TypedDict):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


@closed
class EchoedToolChoice(TypedDict):
    type: Literal["function"]
    name: str


@closed
class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: EchoedText
    tool_choice: Literal["none", "auto", "required"] | EchoedToolChoice
    tools: list[EchoedTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    watermark: NotRequired[Watermark]
    """In the end."""


@closed
class LifeEvent(TypedDict):
    """The first two, and the last."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject


@closed
class ItemEvent(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


@closed
class PartEvent(TypedDict):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


@closed
class DeltaEvent(TypedDict):
    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: NotRequired[list[TokenLogprob]]
    """Of text; tokens whose characters were not whole come with those that complete them."""


@closed
class DoneEvent(TypedDict):
    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: NotRequired[list[TokenLogprob]]


@closed
class ArgumentsDeltaEvent(TypedDict):
    type: Literal["response.function_call_arguments.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


@closed
class ArgumentsDoneEvent(TypedDict):
    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


type ResponseEvent = (
    LifeEvent | ItemEvent | PartEvent | DeltaEvent | DoneEvent | ArgumentsDeltaEvent | ArgumentsDoneEvent
)
