"""litellm against a running server: ``python -m tests.clients.try_litellm URL MODEL``."""

import json
from importlib.metadata import version
from typing import Literal

import litellm
from pydantic import BaseModel, Field

from tests.clients.common import QUESTION, WEATHER, arguments, check_weather, run

litellm.suppress_debug_info = True
MESSAGES = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": QUESTION}]
ONE_CALL = {
    "tools": [{"type": "function", "function": WEATHER}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
}


class City(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]


def completion(given):
    answer = litellm.completion(messages=MESSAGES, max_tokens=24, **given)
    assert answer.usage.completion_tokens <= 24
    return answer.choices[0].message.content


def completion_by_other_providers(given):
    """The peer's own provider name, and OpenAI's with a user and metadata."""
    name = given["model"].partition("/")[2]
    hosted = litellm.completion(messages=MESSAGES, max_tokens=8, **(given | {"model": f"hosted_vllm/{name}"}))
    litellm.completion(messages=MESSAGES, max_tokens=8, user="ann", metadata={"trace": "1"}, **given)
    return hosted.choices[0].message.content


def streaming(given):
    chunks = list(
        litellm.completion(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, max_tokens=24, **given
        )
    )
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert whole.choices[0].message.content == completion(given)
    assert whole.usage.completion_tokens > 0
    return whole.choices[0].message.content


def tools(given):
    answer = litellm.completion(messages=MESSAGES, **ONE_CALL, **given)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    check_weather(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "Rain"}
    litellm.completion(
        messages=[*MESSAGES, message, result], **(ONE_CALL | given | {"max_tokens": 8, "tool_choice": "none"})
    )
    return call.function.arguments


def tools_while_streamed(given):
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **ONE_CALL, **given))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    check_weather(json.loads(call.function.arguments))
    return call.function.arguments


def response_format(given):
    answer = litellm.completion(messages=MESSAGES, response_format=City, max_tokens=200, **given)
    return City.model_validate_json(answer.choices[0].message.content)


def text_completion(given):
    return litellm.text_completion(prompt="The sky is", max_tokens=8, **given).choices[0].text


def responses(given):
    answer = litellm.responses(input=QUESTION, max_output_tokens=24, **given)
    return answer.output_text


def refusals(given):
    for fields, error in (
        ({"temperature": -1}, litellm.BadRequestError),
        ({"model": "openai/no-such-model"}, litellm.NotFoundError),
    ):
        said = ""
        try:
            litellm.completion(messages=MESSAGES, max_tokens=1, **(given | fields))
        except error as refused:
            said = str(refused)
        assert "temperature" in said or "no-such-model" in said, (fields, said)
    return "400, 404"


CHECKS = (
    *(completion, completion_by_other_providers, streaming, tools, tools_while_streamed, response_format),
    *(text_completion, responses, refusals),
)

if __name__ == "__main__":
    url, model = arguments()
    given = {"model": f"openai/{model}", "api_base": url + "/v1", "api_key": "none", "temperature": 0}
    run(f"litellm {version('litellm')}", CHECKS, given)
