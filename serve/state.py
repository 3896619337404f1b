"""What all handlers share: the engine, the options, the way deltas cross from the engine's thread to the event loop."""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from jaxserve import __version__
from jaxserve.request import Delta
from serve.errors import ApiError, unavailable
from serve.httpmetrics import HttpMetrics
from serve.options import ServerOptions
from serve.parsers.choose import choose_formats

TOKENIZER_THREADS = 2
SLOW_THREADS = 2
"""Grammars are compiled there."""
INLINE_CHARACTERS = 4096
"""Texts up to this length are tokenized (or parsed) on the event loop: a hop to a thread would cost more."""
WATCH_SECONDS = 0.5
"""How often the engine is asked whether it still lives."""
MAX_BACKLOG = 16_384
"""Most deltas that wait for a handler whose client does not read."""
SHRINK = 4
"""Normalizers may make a text shorter before it is cut into tokens (composed accents), by no more than this."""


class Channel:
    """The deltas of one HTTP request, waiting on the event loop for its handler. Never blocks the engine."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Delta]] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, prompt: int, delta: Delta) -> None:
        if self._error is not None:
            return
        self._items.append((prompt, delta))
        if len(self._items) > MAX_BACKLOG:
            self.fail(ApiError(408, "the client reads too slowly", code="slow_client"))
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End the request: ``get`` raises ``error`` once it has handed out what came before."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[tuple[int, Delta]]:
        """All (prompt index, delta) that arrived since the last call; waits for the first. Raises ApiError."""
        if not self._items and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items


class Mailbox:
    """Carries deltas from the engine's thread to the event loop, waking the loop once for all that came in a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._box: deque[tuple[Channel, int, Delta]] = deque()
        self._scheduled = False

    def post(self, channel: Channel, prompt: int, delta: Delta) -> None:
        """Called on any thread; quick, and raises nothing (a closed loop has no more readers)."""
        self._box.append((channel, prompt, delta))
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:
                self._box.clear()

    def _empty(self) -> None:
        self._scheduled = False  # before emptying: a later post then schedules anew, at worst once too often
        while self._box:
            channel, prompt, delta = self._box.popleft()
            channel.deliver(prompt, delta)


class State:
    """One server over one engine, which comes later where the server listens before the model is loaded.

    Lives on the event loop of its application.
    """

    def __init__(self, llm: Any, options: ServerOptions):
        self.options = options
        self.version = __version__
        self.created = int(time.time())
        self.model_name = ""
        self.phase = "starting"
        """What the start is at."""
        self.draining = False
        self.http = HttpMetrics()
        self.engine_died = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.channels: set[Channel] = set()
        self.load_keys()
        self._active = 0
        self._llm: Any = None
        self._watcher: asyncio.Task[None] | None = None
        self._mailbox: Mailbox | None = None
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, "jaxserve-tokenize")
        self._slow_pool = ThreadPoolExecutor(SLOW_THREADS, "jaxserve-slow")
        self.detection_pool = ThreadPoolExecutor(1, "jaxserve-detect")
        self._token_texts: dict[int, tuple[str, bytes]] = {}
        if llm is not None:
            self.attach(llm)

    def attach(self, llm: Any) -> None:
        """The engine is ready."""
        self._llm = llm
        self.model_name = llm.config.served_name or llm.config.model
        self.longest_text = _longest_text(llm)
        self.formats = choose_formats(llm.tokenizer, self.options.tool_parser, self.options.reasoning_parser)
        if self._mailbox is not None:
            self._watcher = asyncio.create_task(self._watch())

    @property
    def llm(self) -> Any:
        """The engine. Raises a 503 while it loads."""
        if self._llm is None:
            raise unavailable(f"the model is still loading ({self.phase})", code="loading", seconds=5)
        return self._llm

    @property
    def loaded(self) -> bool:
        return self._llm is not None

    @property
    def active(self) -> int:
        """Requests in flight that cost something."""
        return self._active

    def load_keys(self) -> None:
        """Take over the API keys, those of the file read anew. Raises ValueError, and keeps what there was."""
        self.key_digests = [hashlib.sha256(key.encode()).digest() for key in self.options.all_keys()]

    def count_rejection(self, reason: str) -> None:
        """Count a request that was refused before the engine saw it."""
        if self._llm is not None:
            self._llm.count_rejection(reason)

    async def lifespan(self, app: web.Application) -> Any:
        """For ``Application.cleanup_ctx``."""
        self._mailbox = Mailbox(asyncio.get_running_loop())
        if self._llm is not None:
            self._watcher = asyncio.create_task(self._watch())
        yield
        if self._watcher is not None:
            self._watcher.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._slow_pool.shutdown(wait=False, cancel_futures=True)
        self.detection_pool.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        while self.llm.health().alive:
            await asyncio.sleep(WATCH_SECONDS)
        self.engine_died.set()
        self.fail_all(ApiError(500, "the engine has stopped", code="engine_dead"))

    def fail_all(self, error: ApiError) -> None:
        """End every running request with ``error``."""
        for channel in tuple(self.channels):
            channel.fail(error)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around every request that costs something: refused while loading or draining, waited for at shutdown."""
        if self.draining:
            raise unavailable("the server is shutting down", code="shutting_down")
        _ = self.llm  # raises while it loads
        self._active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if self._active == 0:
                self.idle.set()

    def poster(self, channel: Channel, prompt: int) -> Callable[[Delta], None]:
        """The callback that the engine gets."""
        assert self._mailbox is not None, "the application has not started"
        return partial(self._mailbox.post, channel, prompt)

    async def offload[T](self, size: int, function: Callable[[], T]) -> T:
        """Run ``function`` here where its input is small, else in the pool, so that the event loop stays free."""
        if size <= INLINE_CHARACTERS:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def in_thread[T](
        self,
        function: Callable[[], T],
        undo: Callable[[T], None] = lambda _: None,
        pool: ThreadPoolExecutor | None = None,
    ) -> T:
        """Run ``function``, which may take seconds, beside the loop, and beside what ``offload`` runs.

        Where whoever waits is cancelled, its result goes to ``undo`` instead.
        """
        work = (pool or self._slow_pool).submit(function)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if not work.cancel():
                work.add_done_callback(lambda done: None if done.exception() else undo(done.result()))
            raise

    def check_model(self, name: str | None) -> None:
        """Raise a 404 for a model that is not served here; None means whatever is served."""
        if self.loaded and name is not None and name != self.model_name:
            message = f"the model {name[:200]!r} does not exist; this server serves {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def tokenizer(self) -> Any:
        """The tokenizer. Raises a 400 where the model came without one."""
        if self.llm.tokenizer is None:
            raise ApiError(400, "this model came without a tokenizer: send and expect token ids", code="no_tokenizer")
        return self.llm.tokenizer

    def check_text(self, text: str, param: str = "prompt") -> None:
        """Refuse a text that cannot possibly fit before it costs the time to tokenize it. Raises a 400."""
        if len(text) > self.longest_text:
            most = self.llm.max_model_len
            message = f"the prompt has {len(text)} characters, too many for a context of {most} tokens"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def token_text(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of one token, remembered."""
        if token not in self._token_texts:
            if self.llm.tokenizer is None:
                return f"token_id:{token}", b""
            self._token_texts[token] = (self.llm.tokenizer.token_str(token), self.llm.tokenizer.token_bytes(token))
        return self._token_texts[token]


def _longest_text(llm: Any) -> float:
    """Characters beyond which no text fits the context: a character is a byte at least, and tokens have so many."""
    tokenizer = llm.tokenizer
    if tokenizer is None or getattr(tokenizer, "kind", "bytes") == "other":
        return float("inf")
    longest = max((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), default=1)
    return llm.max_model_len * max(1, longest) * SHRINK


STATE = web.AppKey("state", State)
