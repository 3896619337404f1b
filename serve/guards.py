"""What every request passes before its handler: a record, errors as objects, origins, keys."""

import asyncio
import hashlib
import hmac
import re

from aiohttp import web

from serve import page
from serve.connection import Connection
from serve.errors import ApiError, Handler, as_api_error
from serve.record import CURRENT, Record, request_id, write_line
from serve.state import STATE, State

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"}) | page.PATHS
"""What needs no key: probes carry none."""

REJECTIONS = {
    "shutting_down": "draining",
    "context_length_exceeded": "too_long",
    "request_too_large": "too_large",
}
"""Reasons of ``admission_rejections`` by error code; the engine itself counts its full queue."""

_HEADER_NAMES = re.compile(r"[A-Za-z0-9\-, ]{1,1024}")
PREFLIGHT_SECONDS = "600"


@web.middleware
async def record_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, count it, and log its end."""
    state = request.app[STATE]
    record = Record(request_id(request.headers.get("X-Request-Id")))
    CURRENT.set(record)
    connection = request.protocol if isinstance(request.protocol, Connection) else None
    if connection is not None:
        connection.begin()
    try:
        response = await handler(request)
        record.status = response.status
        record.bytes = record.bytes or response.content_length or 0
        return response
    except asyncio.CancelledError:
        record.disconnected = True
        raise
    finally:
        if connection is not None:
            connection.end()
        resource = request.match_info.route.resource
        path = "none" if resource is None else resource.canonical
        state.http.count(path, request.method, record.status, record.seconds)
        write_line(state.options.access_log, request, record)


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an error object."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        error = ApiError(404, f"no such path: {request.path}", code="not_found")
    except web.HTTPMethodNotAllowed as refused:
        message = f"{request.method} is not allowed on {request.path}"
        headers = {"Allow": ",".join(sorted(refused.allowed_methods))}
        error = ApiError(405, message, code="method_not_allowed", headers=headers)
    except Exception as raised:
        error = as_api_error(raised)
    if (reason := REJECTIONS.get(error.code or "")) is not None:
        request.app[STATE].count_rejection(reason)
    return error.response()


@web.middleware
async def access_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer preflights of allowed origins, and refuse whoever sends none of the keys."""
    state = request.app[STATE]
    wanted = request.headers.get("Access-Control-Request-Method")
    if request.method == "OPTIONS" and wanted is not None and allowed_origin(request, state) is not None:
        return _preflight(request)
    if state.key_digests and request.path not in OPEN_PATHS and not _has_key(request, state):
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, "a valid API key is required", code="invalid_api_key", headers=headers)
    return await handler(request)


def _has_key(request: web.Request, state: State) -> bool:
    """All keys are compared, in constant time."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    sent = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
    matches = [hmac.compare_digest(sent, digest) for digest in state.key_digests]
    if scheme.lower() != "bearer" or not any(matches):
        return False
    if (record := CURRENT.get()) is not None:
        record.tenant = sent.hex()
    return True


def allowed_origin(request: web.Request, state: State) -> str | None:
    """The value of ``Access-Control-Allow-Origin``; None where the request has no origin or one that is not allowed."""
    origin, allowed = request.headers.get("Origin"), state.options.cors_origin
    if origin is None or not allowed:
        return None
    return "*" if "*" in allowed else origin if origin in allowed else None


def _preflight(request: web.Request) -> web.Response:
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": asked if _HEADER_NAMES.fullmatch(asked) else "Authorization, Content-Type",
        "Access-Control-Max-Age": PREFLIGHT_SECONDS,
    }
    return web.Response(status=204, headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """For ``Application.on_response_prepare``: the request's id, and what browsers need of allowed origins."""
    state, record = request.app[STATE], CURRENT.get()
    if record is not None:
        record.status = response.status
        response.headers["X-Request-Id"] = record.request_id
        if record.watermark and response.status == 200:
            response.headers["X-Jaxserve-Watermark"] = record.watermark
    if state.options.cors_origin:
        response.headers["Vary"] = "Origin"
        if (origin := allowed_origin(request, state)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, X-Jaxserve-Watermark, Retry-After"
    if state.draining:
        response.force_close()
