"""Server-sent events, as OpenAI clients read them: ``data: {json}`` and a blank line each, at the end ``[DONE]``."""

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from serve.errors import as_api_error

DONE = b"data: [DONE]\n\n"


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


async def send_events(request: web.Request, events: AsyncGenerator[Iterable[bytes]]) -> web.StreamResponse:
    """Answer with ``events``, each batch in one write, then ``[DONE]``.

    A slow reader holds up only itself. An error becomes an event with the error object: the status is long gone. Where
    the client has gone, the rest is dropped; the caller's context managers then abort what runs.
    """
    response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
    response.content_type, response.charset = "text/event-stream", "utf-8"
    await response.prepare(request)
    try:
        try:
            async with aclosing(events):
                async for batch in events:
                    if data := b"".join(batch):
                        await response.write(data)
        except ConnectionError:
            raise
        except Exception as error:
            await response.write(f"data: {dumps(as_api_error(error).body())}\n\n".encode())
        await response.write(DONE)
        await response.write_eof()
    except ConnectionError:
        pass
    return response
