"""The application: which path is answered by what, and who may call it."""

import hashlib
import hmac
from typing import Any

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from serve.chat import chat_completions
from serve.completions import completions
from serve.errors import ApiError, Handler, error_middleware
from serve.options import ServerOptions
from serve.state import STATE, State
from serve.tokens import detokenize, tokenize

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""What needs no key: probes carry none."""


def create_app(llm: Any, options: ServerOptions | None = None) -> web.Application:
    """The server over ``llm`` (a ``jaxserve.LLM``, which stays the caller's to close)."""
    options = options or ServerOptions()
    app = web.Application(middlewares=[error_middleware, _auth_middleware], client_max_size=options.max_body_bytes)
    app[STATE] = State(llm, options)
    app.cleanup_ctx.append(app[STATE].lifespan)
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.get("/v1/models", _models),
            web.get("/v1/models/{name:.+}", _model),
            web.get("/v1/engine/report", _report),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", _health),
            web.get("/ready", _ready),
            web.get("/ping", _health),
            web.post("/ping", _health),
            web.get("/version", _version),
            web.get("/metrics", _metrics),
        ]
    )
    return app


@web.middleware
async def _auth_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse whoever sends none of the keys. All keys are compared, in constant time."""
    digests = request.app[STATE].key_digests
    if digests and request.path not in OPEN_PATHS:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        sent = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(sent, digest) for digest in digests]
        if scheme.lower() != "bearer" or not any(matches):
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "a valid API key is required", code="invalid_api_key", headers=headers)
    return await handler(request)


def _model_card(state: State) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxserve",
        "max_model_len": state.llm.max_model_len,
    }


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_model_card(request.app[STATE])]})


async def _model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    state.check_model(request.match_info["name"])
    return web.json_response(_model_card(state))


async def _report(request: web.Request) -> web.Response:
    return web.json_response(request.app[STATE].llm.report())


async def _health(request: web.Request) -> web.Response:
    """Liveness by forward progress: 503 where the engine is dead, or has work and has finished no step for long."""
    state = request.app[STATE]
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


async def _ready(request: web.Request) -> web.Response:
    """Readiness: 503 while the server drains and where the engine is dead."""
    state = request.app[STATE]
    status = "shutting down" if state.draining else "ready" if state.llm.health().alive else "dead"
    return web.json_response({"status": status}, status=200 if status == "ready" else 503)


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": request.app[STATE].version})


async def _metrics(request: web.Request) -> web.Response:
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    body = encode(request.app[STATE].llm.metrics)
    return web.Response(body=body, headers={"Content-Type": content_type})
