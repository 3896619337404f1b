"""The life of a server process: bind, serve, drain on the first signal, stop at once on the second."""

import asyncio
import logging
import signal
import socket
from typing import Any

from aiohttp import web

from serve.errors import unavailable
from serve.options import ServerOptions
from serve.routes import create_app
from serve.state import STATE, State

log = logging.getLogger(__name__)

BACKLOG = 1024
ACCESS_FORMAT = '%a "%r" %s %b bytes %Tf s'


def bind(options: ServerOptions) -> socket.socket:
    """A socket bound to host and port, so that a port in use is known before a model is loaded. Raises OSError."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((options.host, options.port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
    return bound


def run(llm: Any, options: ServerOptions | None = None, *, bound: socket.socket | None = None) -> int:
    """Serve ``llm`` until a signal. Returns the exit status: 0 drained, 1 cut short or the engine died.

    ``bound`` comes from ``bind``; it is made here where absent. ``llm`` stays the caller's to close.
    """
    options = options or ServerOptions()
    return asyncio.run(_serve(llm, options, bound or bind(options)))


async def _serve(llm: Any, options: ServerOptions, bound: socket.socket) -> int:
    app = create_app(llm, options)
    state = app[STATE]
    runner = make_runner(app, options)
    await runner.setup()
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        await web.SockSite(runner, bound, backlog=BACKLOG).start()
        host, port = bound.getsockname()[:2]
        log.info("serving %s on http://%s:%d", state.model_name, f"[{host}]" if ":" in host else host, port)
        return await _until_stopped(state, signals)
    finally:
        await runner.cleanup()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def make_runner(app: web.Application, options: ServerOptions) -> web.AppRunner:
    """The runner that ``create_app`` expects: handlers are cancelled when their client goes away."""
    return web.AppRunner(
        app,
        handle_signals=False,
        handler_cancellation=True,
        shutdown_timeout=1.0,
        access_log=logging.getLogger("serve.access") if options.access_log else None,
        access_log_format=ACCESS_FORMAT,
    )


async def _until_stopped(state: State, signals: asyncio.Queue[int]) -> int:
    died = asyncio.ensure_future(state.engine_died.wait())
    first = asyncio.ensure_future(signals.get())
    await asyncio.wait((died, first), return_when=asyncio.FIRST_COMPLETED)
    if died.done():
        first.cancel()
        log.critical("the engine has stopped; the server ends")
        return 1
    state.draining = True
    timeout = state.options.shutdown_timeout
    log.info("%s: draining for at most %g s", signal.Signals(first.result()).name, timeout)
    drained, second = asyncio.ensure_future(state.idle.wait()), asyncio.ensure_future(signals.get())
    await asyncio.wait((drained, second, died), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    status = 0 if drained.done() and not died.done() else 1
    if not drained.done():
        log.warning("stopping with requests unfinished")
        state.fail_all(unavailable("the server is shutting down", code="shutting_down"))
        await asyncio.wait((drained,), timeout=0.5)
    for task in (drained, second, died):
        task.cancel()
    return status
