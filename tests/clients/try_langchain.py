"""langchain-openai against a running server: ``python -m tests.clients.try_langchain URL MODEL``."""

from importlib.metadata import version
from typing import Literal

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.common import QUESTION, arguments, check_weather, run

MESSAGES = [SystemMessage("You are helpful."), HumanMessage(QUESTION)]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


class Weather(BaseModel):
    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


@tool(args_schema=Weather)
def get_weather(city: str, unit: str) -> str:
    """The weather in a city, today."""
    return f"Rain in {city}, 12 {unit}"


def other(llm, **fields):
    return ChatOpenAI(base_url=llm.openai_api_base, api_key="none", model=llm.model_name, temperature=0, **fields)


def invoke(llm):
    answer = llm.invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata["output_tokens"] <= 24
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    return answer.content


def stream(llm):
    whole = None
    for chunk in llm.stream(MESSAGES):
        whole = chunk if whole is None else whole + chunk
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == llm.invoke(MESSAGES).content
    return whole.content


def batch(llm):
    return [answer.content for answer in llm.batch(["Say one.", "Say two."])]


def log_probabilities(llm):
    answer = llm.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    return answer.response_metadata["logprobs"]["content"][0]["token"]


def bind_tools(llm):
    bound = llm.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False).bind(max_tokens=200)
    answer = bound.invoke(MESSAGES)
    (call,) = answer.tool_calls
    check_weather(call["args"])
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    llm.bind_tools([get_weather], tool_choice="none").invoke([*MESSAGES, answer, result])
    return call["args"]


def bind_tools_while_streamed(llm):
    bound = llm.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False).bind(max_tokens=200)
    whole = None
    for chunk in bound.stream(MESSAGES):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    check_weather(call["args"])
    return call["args"]


def bind_tools_and_let_it_choose(llm):
    """The model may call or speak, as often as it likes; what comes is well formed."""
    answer = llm.bind_tools([get_weather]).bind(max_tokens=60).invoke(MESSAGES)
    return answer.content or answer.tool_calls or answer.invalid_tool_calls


def with_structured_output(llm):
    found, longer = {}, other(llm, max_tokens=200)
    for method in ("json_schema", "function_calling", "json_mode"):
        messages = [*MESSAGES[:1], HumanMessage(f"{QUESTION} Answer as JSON with the keys name and size.")]
        answer = longer.with_structured_output(City, method=method, include_raw=True).invoke(messages)
        if method != "json_mode":  # there only the form of JSON is enforced, not the schema
            assert isinstance(answer["parsed"], City), answer
        found[method] = answer["parsed"]
    return found


def responses_api(llm):
    return other(llm, use_responses_api=True, max_tokens=24).invoke(MESSAGES).text


def completions(llm):
    old = OpenAI(base_url=llm.openai_api_base, api_key="none", model=llm.model_name, max_tokens=8, temperature=0)
    return old.invoke("The sky is")


CHECKS = (
    *(invoke, stream, batch, log_probabilities, bind_tools, bind_tools_while_streamed, bind_tools_and_let_it_choose),
    *(with_structured_output, responses_api, completions),
)

if __name__ == "__main__":
    url, model = arguments()
    llm = ChatOpenAI(base_url=url + "/v1", api_key="none", model=model, max_tokens=24, temperature=0)
    run(f"langchain-openai {version('langchain-openai')}", CHECKS, llm)
