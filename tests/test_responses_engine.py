"""Grammars through the HTTP API on a real engine whose tokens are bytes: enforced, or refused by the client's name."""

import json
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from tiny import idle

from tests.serving import Server, serving

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
IMPOSSIBLE = {"type": "string", "pattern": "("}


@pytest.fixture(scope="module")
def server(llm: Any) -> Iterator[Server]:
    with serving(llm, close_llm=False) as found:
        yield found
    idle(llm)


def ask(server: Server, path: str, **fields: Any) -> tuple[int, Any]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    said: dict[str, Any] = {"/v1/completions": {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}.get(
        path, {"messages": [{"role": "user", "content": "Hi"}]}
    )
    status, answer, _ = server.send(path, said | {limit: 100, "temperature": 1.5, "seed": 3} | fields)
    return status, answer


def text(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return answer["output"][0]["content"][0]["text"]
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


FORMATS = {
    "/v1/completions": lambda schema: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    },
    "/v1/chat/completions": lambda schema: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    },
    "/v1/responses": lambda schema: {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
}


@pytest.mark.parametrize("path", FORMATS)
def test_schemas_are_kept(server, path):
    for seed in range(3):
        status, answer = ask(server, path, seed=seed, **FORMATS[path](SCHEMA))
        assert status == 200, answer
        found = json.loads(text(answer))
        assert found["a"] in ("x", "y")
        assert isinstance(found["b"], bool)


@pytest.mark.parametrize("path", FORMATS)
def test_other_languages_are_kept(server, path):
    status, answer = ask(server, path, structured_outputs={"choice": ["one", "two"]})
    assert (status, text(answer) in ("one", "two")) == (200, True)
    status, answer = ask(server, path, structured_outputs={"regex": "[a-c]{3}"})
    assert (status, len(text(answer)), set(text(answer)) <= set("abc")) == (200, 3, True)
    status, answer = ask(server, path, structured_outputs={"json": json.dumps(SCHEMA)})
    assert (status, set(json.loads(text(answer)))) == (200, {"a", "b"})


@pytest.mark.parametrize("path", FORMATS)
def test_what_cannot_be_kept_is_refused_by_its_name(server, path):
    name = "text.format.schema" if path == "/v1/responses" else "response_format.json_schema.schema"
    for fields, param in [
        (FORMATS[path]({"type": "object", "properties": {"p": IMPOSSIBLE}}), name),
        ({"structured_outputs": {"json": {"properties": {"p": IMPOSSIBLE}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ]:
        status, answer = ask(server, path, **fields)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert len(json.dumps(answer)) < 2048
    assert ask(server, path)[0] == 200


class Found(pydantic.BaseModel):
    a: bool


def test_parse_by_the_official_client(server):
    with server.client() as client:
        answer = client.responses.parse(
            model=server.state.model_name, input="Hi", text_format=Found, max_output_tokens=100, temperature=1.5
        )
        assert isinstance(answer.output_parsed, Found)
