"""``/openapi.json``: an OpenAPI 3.1 document made of what the application really serves.

Every handler says with ``api`` what it takes and answers; paths and methods come from the router, sentences from
docstrings, schemas from the bodies' and answers' types.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from serve.protocol.answers import Error
from serve.sse import dumps
from serve.state import STATE

BODY_ERRORS = (400, 404, 408, 413, 500, 503)
"""What every route with a body may answer: bad fields, another model, slow, large, failed, and full or stopping."""
RUN_ERRORS = (*BODY_ERRORS, 504)
"""The same of routes that run the engine, which may take too long."""


@dataclass(frozen=True, kw_only=True)
class Api:
    """What a route takes and answers. A type stands for JSON of that type, a tuple for one of those media types."""

    answer: Any
    body: Any = None
    events: Any = None
    """The type of the JSON in each event, where the route streams if asked to."""
    answers: Mapping[int, Any] = field(default_factory=dict)
    """Statuses that have a body of their own."""
    errors: tuple[int, ...] = ()
    """Statuses that come with the error object, beside 401."""
    open: bool = False
    """Needs no key."""


def api[F: Callable[..., Any]](answer: Any, **more: Any) -> Callable[[F], F]:
    """A decorator for handlers; its keywords are the fields of ``Api``."""
    said = Api(answer=answer, **more)

    def mark(handler: F) -> F:
        vars(handler)["api"] = said
        return handler

    return mark


def api_of(handler: Any) -> Api | None:
    """What ``api`` said of a handler."""
    return getattr(handler, "api", None)


def route() -> web.RouteDef:
    """The route of the document, which is made when first asked for."""
    made: dict[bool, str] = {}

    @api(dict[str, Any], errors=(500,))
    async def openapi(request: web.Request) -> web.Response:
        """This document."""
        keys = bool(request.app[STATE].key_digests)
        if keys not in made:
            made[keys] = dumps(document(request.app))
        return web.json_response(text=made[keys])

    return web.get("/openapi.json", openapi)


class _Schemas(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def document(app: web.Application) -> dict[str, Any]:
    """The document of ``app``. Raises KeyError where a handler says nothing of itself."""
    state = app[STATE]
    routes = [(str(r.resource.canonical), r.method.lower(), r.handler) for r in app.router.routes() if r.resource]
    routes = [found for found in routes if found[1] != "head"]
    kinds = [Error, *(kind for _, _, handler in routes for kind in _types(_said(handler)))]
    inputs: Any = [(number, "validation", TypeAdapter(kind)) for number, kind in enumerate(kinds)]
    references, definitions = TypeAdapter.json_schemas(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=_Schemas
    )
    schemas = [(kind, references[number, "validation"]) for number, kind in enumerate(kinds)]
    components = definitions.get("$defs", {})
    if state.options.ignore_unknown_fields:
        components = {name: _open(schema) for name, schema in components.items()}
    keys = bool(state.key_digests)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, handler in routes:
        paths.setdefault(path, {})[method] = _operation(path, method, handler, schemas, keys)
    errors = sorted({401, *(status for _, _, handler in routes for status in _said(handler).errors)})
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": state.version},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {str(status): _response(status, _content(Error, schemas)) for status in errors},
        },
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _said(handler: Any) -> Api:
    if (found := api_of(handler)) is None:
        raise KeyError(f"{handler} is not described: use serve.openapi.api")
    return found


def _types(said: Api) -> list[Any]:
    found = (said.answer, said.body, said.events, *said.answers.values())
    return [kind for kind in found if kind is not None and not isinstance(kind, tuple)]


def _open(schema: Any) -> Any:
    return {key: item for key, item in schema.items() if (key, item) != ("additionalProperties", {"type": "null"})}


def _content(kind: Any, schemas: list[tuple[Any, Any]]) -> dict[str, Any]:
    if kind is None:
        return {}
    if isinstance(kind, tuple):
        return {media: {"schema": {"type": "string"}} for media in kind}
    return {"application/json": {"schema": next(schema for known, schema in schemas if known == kind)}}


def _event(schema: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream: its data is JSON of this schema, or at the end [DONE]."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}


def _response(status: int, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": HTTPStatus(status).phrase} | ({"content": content} if content else {})


def _operation(path: str, method: str, handler: Any, schemas: list[tuple[Any, Any]], keys: bool) -> dict[str, Any]:
    said = _said(handler)
    summary, _, more = (handler.__doc__ or "").strip().partition("\n")
    found: dict[str, Any] = {"summary": summary, "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_")}
    if more.strip():
        found["description"] = " ".join(more.split())
    if names := re.findall(r"{(\w+)}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if said.body is not None:
        found["requestBody"] = {"required": True, "content": _content(said.body, schemas)}
    answer = _content(said.answer, schemas)
    if said.events is not None:
        events = _content(said.events, schemas)["application/json"]["schema"]
        answer["text/event-stream"] = {"schema": _event(events)}
    errors = {*said.errors, *({401} if keys and not said.open else ())}
    answers = {status: {"$ref": f"#/components/responses/{status}"} for status in errors}
    answers |= {status: _response(status, _content(kind, schemas)) for status, kind in said.answers.items()}
    answers[200] = _response(200, answer)
    found["responses"] = {str(status): answers[status] for status in sorted(answers)}
    if keys and said.open:
        found["security"] = []
    return found
