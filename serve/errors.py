"""Errors as OpenAI clients expect them: ``{"error": {message, type, param, code}}``, and small whatever was sent."""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from jaxserve.request import EngineDeadError, QueueFullError, RequestError

log = logging.getLogger(__name__)

MAX_MESSAGE = 480
"""Characters of a message that are sent; the input may be quoted in it, and the input may be megabytes. A character is
at most twelve bytes of JSON, so that a body stays below 8 KiB."""
MAX_PARAM = 120

TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
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
        answer = web.Response(status=self.status, text=text, content_type="application/json", headers=self.headers)
        if self.status in (408, 413):  # the rest of the body is not wanted
            answer.force_close()
        return answer


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str, seconds: int = 1) -> ApiError:
    """``seconds`` is when to try again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(seconds)})


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
            reason = str(error).rpartition("message:")[2].strip()
            return bad_request(f"the request body cannot be read: {reason}", code="unreadable_body")
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the request body is too large", code="request_too_large")
        case web.HTTPException():
            headers = {k: v for k, v in error.headers.items() if k in ("Allow", "Location")}
            return ApiError(error.status, (error.reason or "HTTP error").lower(), headers=headers)
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log says more", code="internal_error")
