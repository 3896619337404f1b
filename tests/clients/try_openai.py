"""The official Python client against a running server: ``python -m tests.clients.try_openai URL MODEL``."""

import json
from typing import Literal

import openai
from pydantic import BaseModel, Field

from tests.clients.common import QUESTION, TIME, WEATHER, arguments, check_weather, run

MESSAGES = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]
SHORT = {"max_tokens": 24, "temperature": 0}
ENDS = {"structured_outputs": {"choice": ["It is Paris.", "It is Lyon."]}}
"""The client's helpers take an answer that was cut for a failure, and not every model stops by itself."""
LONG = {"max_tokens": 200, "temperature": 0}
ONE_CALL = LONG | {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
"""A small model that may call once more never stops doing so."""


class City(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]


class get_weather(BaseModel):
    """The weather in a city, today."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def models(client, model):
    assert model in [one.id for one in client.models.list()]
    return client.models.retrieve(model).id


def chat(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **SHORT)
    assert answer.usage.completion_tokens <= 24
    assert answer.choices[0].finish_reason in ("stop", "length")
    return answer.choices[0].message.content


def chat_with_fields_of_no_effect(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "name": "ann", "content": QUESTION}],
        max_completion_tokens=8,
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        modalities=["text"],
        parallel_tool_calls=True,
        response_format={"type": "text"},
        safety_identifier="x",
        prompt_cache_key="y",
        user="z",
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0,
        n=1,
        stop=None,
        seed=1,
        verbosity="medium",
        extra_headers={"X-Title": "t"},
    )
    return answer.choices[0].message.content


def chat_streamed(client, model):
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **SHORT)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SHORT
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice.finish_reason for choice in choices][-1] == whole.choices[0].finish_reason
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == whole.choices[0].message.content
    return text


def chat_by_the_stream_helper(client, model):
    with client.chat.completions.stream(model=model, messages=MESSAGES, extra_body=ENDS, **SHORT) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    return final.choices[0].message.content


def log_probabilities(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0
    )
    entries = answer.choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    return [entry.token for entry in entries]


def chat_parsed(client, model):
    answer = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=City, **LONG)
    assert isinstance(answer.choices[0].message.parsed, City)
    return answer.choices[0].message.parsed


def chat_parsed_while_streamed(client, model):
    with client.chat.completions.stream(model=model, messages=MESSAGES, response_format=City, **LONG) as stream:
        for _ in stream:
            pass
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, City)
    return parsed


def tool_called(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **ONE_CALL)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    check_weather(json.loads(call.function.arguments))
    return call.function


def tool_called_while_streamed(client, model):
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **ONE_CALL)
    name, text, ids = "", "", set()
    for chunk in client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **ONE_CALL):
        for piece in chunk.choices[0].delta.tool_calls or ():
            if piece.index == 0:
                name += piece.function.name or ""
                text += piece.function.arguments or ""
                ids |= {piece.id} - {None}
    assert len(ids) == 1
    assert (name, text) == ("get_weather", whole.choices[0].message.tool_calls[0].function.arguments)
    return text


def tool_without_arguments_by_name(client, model):
    choice = {"type": "function", "function": {"name": "get_time"}}
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, **(ONE_CALL | {"tools": TOOLS, "tool_choice": choice})
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_time"
    return json.loads(call.function.arguments)


def tool_parsed(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, **(ONE_CALL | {"tools": [openai.pydantic_function_tool(get_weather)]})
    )
    parsed = answer.choices[0].message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, get_weather)
    return parsed


def tool_result_sent_back(client, model):
    first = client.chat.completions.create(model=model, messages=MESSAGES, **ONE_CALL)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain, 12 degrees"} for call in message.tool_calls]
    second = client.chat.completions.create(
        model=model, messages=[*MESSAGES, message, *results], tools=TOOLS, tool_choice="none", **SHORT
    )
    return second.choices[0].message.content


def completions(client, model):
    answer = client.completions.create(model=model, prompt=["The sky is", "Grass is"], n=2, max_tokens=4, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    chunks = list(client.completions.create(model=model, prompt="The sky is", stream=True, max_tokens=4, temperature=0))
    return "".join(chunk.choices[0].text for chunk in chunks)


def responses(client, model):
    answer = client.responses.create(
        model=model, instructions="Be brief.", input=QUESTION, max_output_tokens=24, temperature=0
    )
    assert answer.output_text
    return answer.output_text


def responses_streamed(client, model):
    with client.responses.stream(model=model, input=QUESTION, max_output_tokens=24, extra_body=ENDS) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text
    return text


def responses_as_plain_events(client, model):
    events = list(client.responses.create(model=model, input=QUESTION, max_output_tokens=8, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type in ("response.completed", "response.incomplete")
    return events[-1].type


def responses_parsed(client, model):
    answer = client.responses.parse(model=model, input=QUESTION, text_format=City, max_output_tokens=200, temperature=0)
    assert isinstance(answer.output_parsed, City)
    return answer.output_parsed


def responses_with_a_tool(client, model):
    tool = {"type": "function", "strict": True} | WEATHER
    answer = client.responses.create(
        model=model,
        input=QUESTION,
        tools=[tool],
        tool_choice="required",
        max_output_tokens=200,
        temperature=0,
        parallel_tool_calls=False,
    )
    call = next(item for item in answer.output if item.type == "function_call")
    check_weather(json.loads(call.arguments))
    said = [{"role": "user", "content": QUESTION}, *answer.output]
    said.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain"})
    again = client.responses.create(model=model, input=said, max_output_tokens=16, temperature=0)
    assert again.status in ("completed", "incomplete")
    return call.arguments


def refusals(client, model):
    """What is not served is refused by the client's own exceptions."""
    found = {}
    for name, error, call in (
        ("embeddings", openai.NotFoundError, lambda: client.embeddings.create(model=model, input="Hi")),
        ("moderations", openai.NotFoundError, lambda: client.moderations.create(input="Hi")),
        ("another model", openai.NotFoundError, lambda: client.completions.create(model="no", prompt="Hi")),
        (
            "store",
            openai.BadRequestError,
            lambda: client.chat.completions.create(model=model, messages=MESSAGES, store=True, max_tokens=1),
        ),
        (
            "temperature",
            openai.BadRequestError,
            lambda: client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1),
        ),
    ):
        try:
            call()
            body = None
        except error as refused:
            found[name], body = refused.status_code, refused.body
        assert isinstance(body, dict), (name, body)
        assert body["message"], (name, body)
    return found


def an_abandoned_stream(client, model):
    stream = client.chat.completions.create(model=model, messages=MESSAGES, stream=True, max_tokens=500)
    next(iter(stream))
    stream.close()
    return chat(client, model)


CHECKS = (
    *(models, chat, chat_with_fields_of_no_effect, chat_streamed, chat_by_the_stream_helper, log_probabilities),
    *(chat_parsed, chat_parsed_while_streamed, tool_called, tool_called_while_streamed),
    *(tool_without_arguments_by_name, tool_parsed, tool_result_sent_back, completions, responses, responses_streamed),
    *(responses_as_plain_events, responses_parsed, responses_with_a_tool, refusals, an_abandoned_stream),
)


if __name__ == "__main__":
    url, model = arguments()
    run(f"openai {openai.__version__} (Python)", CHECKS, openai.OpenAI(base_url=url + "/v1", api_key="none"), model)
