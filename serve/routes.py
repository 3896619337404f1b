"""The application: which path is answered by what, and who may call it."""

from typing import Any

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from serve import openapi, page, watermark
from serve.chat import chat_completions
from serve.completions import completions
from serve.guards import access_middleware, add_headers, error_middleware, record_middleware
from serve.httpmetrics import Together
from serve.openapi import api
from serve.options import ServerOptions
from serve.protocol.answers import Health, Load, Model, ModelList, Ready, Report, Version
from serve.responses import responses
from serve.state import STATE, State
from serve.tokens import detokenize, tokenize


def create_app(llm: Any, options: ServerOptions | None = None) -> web.Application:
    """The server over ``llm`` (a ``jaxserve.LLM``, the caller's to close), or over one that ``State.attach`` brings."""
    options = options or ServerOptions()
    middlewares = [record_middleware, error_middleware, access_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=options.max_body_bytes)
    app[STATE] = State(llm, options)
    app.cleanup_ctx.append(app[STATE].lifespan)
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/responses", responses),
            web.get("/v1/models", _models),
            web.get("/v1/models/{name:.+}", _model),
            web.get("/v1/engine/report", _report),
            web.post("/v1/watermark/detect", watermark.detect),
            web.get("/v1/watermark/keys", watermark.keys),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", _health),
            web.get("/ready", _ready),
            web.get("/ping", _health),
            web.post("/ping", _health),
            web.get("/load", _load),
            web.get("/version", _version),
            web.get("/metrics", _metrics),
            openapi.route(),
            *page.routes(),
        ]
    )
    return app


def _model_card(state: State) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxserve",
        "root": state.model_name,
        "parent": None,
        "max_model_len": state.llm.max_model_len,
    }


@api(ModelList, errors=(500, 503))
async def _models(request: web.Request) -> web.Response:
    """The model that is served."""
    return web.json_response({"object": "list", "data": [_model_card(request.app[STATE])]})


@api(Model, errors=(404, 500, 503))
async def _model(request: web.Request) -> web.Response:
    """The model of this name."""
    state = request.app[STATE]
    state.check_model(request.match_info["name"])
    return web.json_response(_model_card(state))


@api(Report, errors=(500, 503))
async def _report(request: web.Request) -> web.Response:
    """How the engine was set up."""
    state = request.app[STATE]
    return web.json_response(state.llm.report() | state.formats.report())


@api(Health, answers={503: Health}, errors=(500,), open=True)
async def _health(request: web.Request) -> web.Response:
    """Liveness by forward progress: 503 where the engine is dead, or has work and has finished no step for long."""
    state = request.app[STATE]
    if not state.loaded:
        return web.json_response({"status": "starting"})
    health = state.llm.health()
    stalled = not health.idle and health.seconds_since_progress > state.options.stall_seconds
    status = "dead" if not health.alive else "stalled" if stalled else "ok"
    answer = {
        "status": status,
        "running": health.running,
        "waiting": health.waiting,
        "seconds_since_progress": round(health.seconds_since_progress, 3),
    }
    return web.json_response(answer, status=200 if status == "ok" else 503)


@api(Ready, answers={503: Ready}, errors=(500,), open=True)
async def _ready(request: web.Request) -> web.Response:
    """Readiness: 503 while the model loads, while the server drains, and where the engine is dead."""
    state = request.app[STATE]
    if state.draining:
        status = "shutting down"
    elif not state.loaded:
        return web.json_response({"status": "loading", "phase": state.phase}, status=503, headers={"Retry-After": "5"})
    else:
        status = "ready" if state.llm.health().alive else "dead"
    return web.json_response({"status": status}, status=200 if status == "ready" else 503)


@api(Load, errors=(500,))
async def _load(request: web.Request) -> web.Response:
    """Requests in flight: all that the server works on, and the engine's sequences that run and that wait."""
    state = request.app[STATE]
    health = state.llm.health() if state.loaded else None
    answer = {
        "server_load": state.active,
        "running": health.running if health else 0,
        "waiting": health.waiting if health else 0,
    }
    return web.json_response(answer)


@api(Version, errors=(500,))
async def _version(request: web.Request) -> web.Response:
    """The server's version."""
    return web.json_response({"version": request.app[STATE].version})


@api(("text/plain", "application/openmetrics-text"), errors=(500,))
async def _metrics(request: web.Request) -> web.Response:
    """What the engine counts, once there is one, and what the server counts."""
    state = request.app[STATE]
    try:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    except (ValueError, TypeError):  # it asks for a version that is no number
        encode, content_type = choose_encoder("")
    body = encode(Together([state.llm.metrics, state.http] if state.loaded else [state.http]))
    return web.Response(body=body, headers={"Content-Type": content_type})
