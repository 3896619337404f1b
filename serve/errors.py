"""Errors as OpenAI clients expect them: ``{"error": {message, type, param, code}}``, and small whatever was sent."""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from jaxserve.request import EngineDeadError, QueueFullError, RequestError

log = logging.getLogger(__name__)

MAX_MESSAGE = 800
"""Characters of a message that are sent; the input may be quoted in it, and the input may be megabytes."""
MAX_PARAM = 120

TYPES = {401: "authentication_error", 500: "server_error", 503: "service_unavailable_error"}
"""Error types by status; all others are the client's: ``invalid_request_error``."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _short(text: str, most: int) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: most - 30]}... ({len(text)} characters)"


class ApiError(Exception):
    """An answer other than 200. ``param`` names the offending field, ``code`` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        return {
            "error": {
                "message": _short(self.message, MAX_MESSAGE),
                "type": TYPES.get(self.status, "invalid_request_error"),
                "param": None if self.param is None else _short(self.param, MAX_PARAM),
                "code": self.code,
            }
        }

    def response(self) -> web.Response:
        text = json.dumps(self.body())
        return web.Response(status=self.status, text=text, content_type="application/json", headers=self.headers)


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": "1"})


def as_api_error(error: Exception) -> ApiError:
    """The answer for any error of the engine's border; what nobody foresaw is logged and becomes an opaque 500."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(str(error), param=error.param, code=error.code)
        case QueueFullError():
            return unavailable(str(error), code="queue_full")
        case EngineDeadError():
            return ApiError(500, str(error), code="engine_dead")
        case web.RequestPayloadError():
            return bad_request(f"the request body cannot be read: {error}", code="unreadable_body")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the request body is too large", code="request_too_large")
        case web.HTTPException():
            headers = {k: v for k, v in error.headers.items() if k in ("Allow", "Location")}
            return ApiError(error.status, (error.reason or "HTTP error").lower(), headers=headers)
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log says more", code="internal_error")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every exception into an error object."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return ApiError(404, f"no such path: {request.path}", code="not_found").response()
    except web.HTTPMethodNotAllowed as error:
        message = f"{request.method} is not allowed on {request.path}"
        headers = {"Allow": ",".join(sorted(error.allowed_methods))}
        return ApiError(405, message, code="method_not_allowed", headers=headers).response()
    except Exception as error:
        return as_api_error(error).response()
