"""``/openapi.json`` against what is served: the same routes, the same fields, the same limits, the same locks."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from serve.routes import create_app
from tests.fake_llm import FakeLLM
from tests.serving import Server, chat, complete, events, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def document(server) -> dict[str, Any]:
    status, found, _ = server.send("/openapi.json")
    assert status == 200
    return found


def validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema | {"components": document["components"]})


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, verb, said) for path, item in document["paths"].items() for verb, said in item.items()]


def test_the_document_names_exactly_the_routes_of_the_application(document):
    llm = FakeLLM()
    routes = {(route.resource.canonical, route.method.lower()) for route in create_app(llm).router.routes()}
    llm.close()
    assert {(path, verb) for path, verb, _ in operations(document)} == {r for r in routes if r[1] != "head"}


def test_every_schema_is_one_and_every_reference_leads_somewhere(document):
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    kinds = document["components"]
    for part in json.dumps(document).split('"#/components/')[1:]:
        kind, name = part[: part.index('"')].split("/")
        assert name in kinds[kind]
    for _, _, said in operations(document):
        assert said["summary"].endswith(".") or said["summary"]
        assert "200" in said["responses"]
    ids = [said["operationId"] for _, _, said in operations(document)]
    assert len(set(ids)) == len(ids)


def test_locks_are_as_described():
    """With keys, whatever the document does not call open is refused without one; the document itself included."""
    with serving(api_key=("secret",)) as server:
        assert server.send("/openapi.json")[0] == 401
        document = server.send("/openapi.json", headers={"Authorization": "Bearer secret"})[1]
        assert document["security"] == [{"key": []}]
        for path, verb, said in operations(document):
            status = server.send(path.replace("{name}", "x"), method=verb.upper())[0]
            assert (status == 401) == (said.get("security") != []), path
            assert (status == 401) == ("401" in said["responses"]), path


def test_without_keys_no_lock_is_described(document):
    assert "security" not in document
    assert not any("401" in said["responses"] for _, _, said in operations(document))


def fields(document: dict[str, Any], name: str) -> dict[str, Any]:
    return document["components"]["schemas"][name]["properties"]


def limits(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """(value, whether it is allowed) around the limits of a number."""
    whole = any(option.get("type") == "integer" for option in schema.get("anyOf", [schema]))
    step = 1 if whole else 1e-3
    for low in ("minimum", "exclusiveMinimum"):
        if low in schema:
            yield schema[low], low == "minimum"
            yield schema[low] - step, False
    if "maximum" in schema:
        yield schema["maximum"], True
        yield schema["maximum"] + step, False


@pytest.mark.parametrize("name", ["CompletionRequest", "ChatRequest"])
def test_limits_of_numbers_are_as_described(server, document, name):
    """Both sides of every limit that is written down. The fake engine, too, refuses what asks for too much."""
    send = complete if name == "CompletionRequest" else chat
    tried = 0
    for field, schema in fields(document, name).items():
        flat = schema | next((o for o in schema.get("anyOf", ()) if o.get("type") != "null"), {})
        for value, fine in limits(flat):
            extra: dict[str, Any] = {"max_tokens": 4}
            if field in ("max_tokens", "max_completion_tokens"):
                extra = {"echo": True} if name == "CompletionRequest" else {}
                fine = fine and (bool(value) or "echo" in extra)
            elif field == "best_of" and value == flat["minimum"]:
                extra["n"] = 1
            elif field == "top_logprobs":
                extra["logprobs"] = True
            elif field == "truncate_prompt_tokens" and not value:
                continue
            status, answer, _ = send(server, **(extra | {field: value}))
            assert status == (200 if fine else 400), (field, value, answer)
            tried += 1
    assert tried > 30


@pytest.mark.parametrize(("path", "send"), [("/v1/completions", complete), ("/v1/chat/completions", chat)])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 1, "n": 2, "return_token_ids": True, "prompt_logprobs": 1}])
def test_events_are_as_described(server, document, path, send, extra):
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    check = validator(document, content["text/event-stream"]["schema"]["properties"]["data"]["contentSchema"])
    if path.endswith("chat/completions") and extra:
        extra = extra | {"logprobs": True, "top_logprobs": 1}
    status, text, _ = send(server, stream=True, stream_options={"include_usage": True}, **extra)
    assert status == 200, text
    for event in events(text):
        check.validate(event)


def test_lenient_servers_describe_themselves_so():
    with serving(ignore_unknown_fields=True) as server:
        document = server.send("/openapi.json")[1]
        assert "additionalProperties" not in document["components"]["schemas"]["CompletionRequest"]
