"""Server-sent events, as OpenAI clients read them: ``data: {json}`` and a blank line each, at the end ``[DONE]``."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from typing import Any

from aiohttp import web

from serve.errors import as_api_error
from serve.record import CURRENT, Record
from serve.state import STATE

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def dumps(value: Any) -> str:
    """Compact and in ASCII, so that no client takes an exotic line separator within a string for the end of a line."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


class Chunks:
    """Prints chunks that share their first fields, which are rendered once."""

    def __init__(self, common: dict[str, Any], *, include_usage: bool):
        self._head = "data: " + dumps(common)[:-1] + ',"choices":['
        self._tail = '],"usage":null}\n\n' if include_usage else "]}\n\n"

    def choice(self, choice: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """A chunk of one choice; ``usage`` is what ``stream_options.continuous_usage_stats`` asks for."""
        tail = self._tail if usage is None else f'],"usage":{dumps(usage)}}}\n\n'
        return f"{self._head}{dumps(choice)}{tail}".encode()

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk that ``stream_options.include_usage`` asks for: no choices."""
        return f'{self._head}],"usage":{dumps(usage)}}}\n\n'.encode()


async def send_events(
    request: web.Request, events: AsyncGenerator[Iterable[bytes]], end: bytes = DONE
) -> web.StreamResponse:
    """Answer with ``events``, each batch in one write, then ``end``; with comments where nothing comes for long.

    A slow reader holds up only itself, and its connection is cut when it stops (``Connection``). An error becomes an
    event with the error object: the status is long gone. Where the client has gone, the rest is dropped; the caller's
    context managers then abort what runs.
    """
    response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    response.content_type, response.charset = "text/event-stream", "utf-8"
    record = CURRENT.get() or Record("")
    await response.prepare(request)
    pulse = _Pulse(request, response, request.app[STATE].options.sse_keep_alive)
    try:
        try:
            async with aclosing(events):
                async for batch in events:
                    if data := b"".join(batch):
                        record.bytes += len(data)
                        pulse.last = pulse.now()
                        await response.write(data)
        except ConnectionError:
            raise
        except Exception as error:
            await response.write(error_event(error))
        await response.write(end)
        await response.write_eof()
    except ConnectionError:
        record.disconnected = True
    finally:
        pulse.stop()
    return response


def error_event(error: Exception) -> bytes:
    """The event that ends a stream that failed."""
    return f"data: {dumps(as_api_error(error).body())}\n\n".encode()


class _Pulse:
    """Writes a comment whenever a stream has been silent for ``seconds`` (0: never)."""

    def __init__(self, request: web.Request, response: web.StreamResponse, seconds: float):
        self._request, self._response, self._seconds = request, response, seconds
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.last = self.now()
        self._timer = self._loop.call_later(seconds, self._beat) if seconds else None
        self._task: asyncio.Task[None] | None = None

    def _beat(self) -> None:
        if self.now() >= self.last + self._seconds * 0.99:
            self.last = self.now()
            if not self._request.protocol.writing_paused:  # it reads too slowly as it is
                self._task = self._loop.create_task(self._comment())
        self._timer = self._loop.call_at(self.last + self._seconds, self._beat)

    async def _comment(self) -> None:
        with suppress(ConnectionError):
            await self._response.write(KEEP_ALIVE)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
