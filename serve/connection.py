"""One client's connection: how long it may be slow, and what it is told when it speaks no proper HTTP."""

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from serve.errors import ApiError, as_api_error
from serve.options import ServerOptions
from serve.record import request_id

log = logging.getLogger(__name__)

MAX_HEADERS = 128


class Connection(web.RequestHandler):
    """A connection that is closed where its client is too slow.

    Headers must be complete ``header_timeout`` after their first byte. A client that takes nothing of an answer for
    ``write_timeout`` is cut off, and its handler cancelled: until then at most two buffers of 64 KiB wait here.
    """

    def __init__(self, server: web.Server, options: ServerOptions, loop: asyncio.AbstractEventLoop):
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=options.keep_alive_timeout,
            lingering_time=options.header_timeout,  # for the rest of a body that was refused
            access_log=None,  # type: ignore[arg-type]
            max_line_size=options.max_header_bytes,
            max_field_size=options.max_header_bytes,
            max_headers=MAX_HEADERS,
        )
        self._options = options
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._busy = False
        self._unsent = 0

    def begin(self) -> None:
        """A request's headers are complete."""
        self._busy = True
        self._stop("headers")

    def end(self) -> None:
        """Its handler has ended."""
        self._busy = False

    def _start(self, name: str, seconds: float, call: Any) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, call)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if data and not self._busy and "headers" not in self._timers:
            self._start("headers", self._options.header_timeout, self.force_close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("write")

    def _watch_writing(self) -> None:
        if self.transport is not None:
            self._unsent = self.transport.get_write_buffer_size()
            self._start("write", self._options.write_timeout, self._check_writing)

    def _check_writing(self) -> None:
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() == self._unsent:
            self.transport.abort()
        else:
            self._watch_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An error object for what never reached the application."""
        self.begin()
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; no other can be sent")
        if not isinstance(exc, HttpProcessingError):
            error = as_api_error(exc if isinstance(exc, Exception) else RuntimeError(message))
        elif isinstance(exc, LineTooLong) or "oo many headers" in str(exc):
            most = f"{self._options.max_header_bytes} bytes or {MAX_HEADERS} headers"
            error = ApiError(431, f"the request line or the headers exceed {most}", code="headers_too_large")
        else:
            error = ApiError(400, f"this is no proper HTTP: {type(exc).__name__}", code="malformed_request")
        if isinstance(exc, HttpProcessingError):
            log.info("%s: refused what is no proper HTTP (%s)", request.remote, type(exc).__name__)
        response = error.response()
        response.headers["X-Request-Id"] = request_id(None)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """A body that cannot be read has been answered; it is the client's fault, and no error of ours."""
        if isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            log.info("refused what could not be decoded")
        else:
            super().log_exception(*args, **kwargs)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """As usual, save that plain-text errors of the library become error objects."""
        if isinstance(resp, web.HTTPException):
            resp = as_api_error(resp).response()
            resp.headers["X-Request-Id"] = request_id(None)
            resp.force_close()
        return await super().finish_response(request, resp, start_time)
