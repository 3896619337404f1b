"""A server on a thread of its own for tests, and plain requests to it."""

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai

from serve import ServerOptions, bind, create_app, listen, make_runner
from serve.state import STATE
from tests.fake_llm import FakeLLM


class Server:
    """A server on a thread of its own, and plain requests to it."""

    def __init__(self, llm: Any, **options):
        self.llm = llm
        self.options = ServerOptions(**{"port": 0, "access_log": "off"} | options)
        self.bound = bind(self.options)
        self.url = self.bound.url
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stop = asyncio.Event()
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        app = create_app(self.llm, self.options)
        self.app, self.state = app, app[STATE]
        runner = make_runner(app)
        await runner.setup()
        server = await listen(runner, self.options, self.bound)
        self._ready.set()
        await self._stop.wait()
        server.close()
        await runner.cleanup()
        if self.bound.tls is not None:
            await asyncio.sleep(0.2)  # both sides say goodbye before their transports are closed
        self.bound.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def send(self, path: str, body=None, *, raw: bytes | None = None, headers=None, method: str | None = None):
        """(status, parsed body or text, headers)."""

        async def go():
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            verb = method or ("GET" if data is None else "POST")
            async with (
                aiohttp.ClientSession() as session,
                session.request(verb, self.url + path, data=data and io.BytesIO(data), headers=headers) as reply,
            ):
                text = await reply.text()
                kind = reply.headers.get("Content-Type", "")
                return reply.status, json.loads(text) if "json" in kind and text else text, reply.headers

        return asyncio.run(go())

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0)


@contextlib.contextmanager
def serving(llm: Any = None, *, close_llm: bool = True, **options) -> Iterator[Server]:
    """A server over ``llm``, a fake one by default, which is closed with it."""
    llm = llm or FakeLLM()
    server = Server(llm, **options)
    try:
        yield server
    finally:
        server.close()
        if close_llm:
            llm.close()


def events(text: str) -> list[dict]:
    """The JSON of every event of a stream, which must be well formed and end with [DONE]."""
    assert text.endswith("\n\n")
    parts = text[:-2].split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def complete(server: Server, **fields):
    return server.send("/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 100} | fields)


def chat(server: Server, **fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return server.send("/v1/chat/completions", body)


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """Usage but for what was cached, which depends on what came before."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
