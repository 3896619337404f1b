"""The application: which path is answered by what, and who may call it."""

import hashlib
import hmac
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from jaxserve.request import RequestError
from serve.chat import chat_completions, encode_messages
from serve.completions import completions
from serve.errors import ApiError, Handler, bad_request, error_middleware
from serve.generation import parse, read_json
from serve.options import ServerOptions
from serve.protocol.chat import TokenizeChatRequest
from serve.protocol.completions import DetokenizeRequest, TokenizeRequest
from serve.state import STATE, State

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
            web.post("/tokenize", _tokenize),
            web.post("/detokenize", _detokenize),
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


async def _tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt, or of a conversation by the chat template."""
    state = request.app[STATE]
    with state.work():
        value = await read_json(request, state)
        if "messages" in value:
            if "prompt" in value:
                raise bad_request("give prompt or messages, not both", param="messages")
            chat = await parse(value, TokenizeChatRequest, state)
            ids, strings = (await encode_messages(chat, state)).ids, chat.return_token_strs
        else:
            text = await parse(value, TokenizeRequest, state)
            encode = partial(state.tokenizer.encode, text.prompt, add_special_tokens=text.add_special_tokens)
            ids, strings = await state.offload(len(text.prompt), encode), text.return_token_strs
        most = state.llm.max_model_len
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": most, "tokens": ids}
        if strings:
            answer["token_strs"] = [state.token_text(token)[0] for token in ids]
        return web.json_response(answer)


async def _detokenize(request: web.Request) -> web.Response:
    state = request.app[STATE]
    with state.work():
        body = await parse(await read_json(request, state), DetokenizeRequest, state)
        tokenizer = state.tokenizer
        for token in body.tokens:
            if not 0 <= token < tokenizer.vocab_size:
                message = f"tokens: id {token} is out of range; the vocabulary holds {tokenizer.vocab_size} tokens"
                raise RequestError(message, param="tokens")
        text = await state.offload(
            len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        )
        return web.json_response({"prompt": text})
