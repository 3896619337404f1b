"""The life of a server process: bind, listen, load, serve, drain on the first signal, stop at once on the second."""

import asyncio
import contextlib
import gc
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from serve.connection import Connection
from serve.errors import unavailable
from serve.options import ServerOptions
from serve.routes import create_app
from serve.sockets import Bound, bind
from serve.state import STATE, State
from serve.watchdog import Watchdog

log = logging.getLogger(__name__)

BACKLOG = 1024
CLOSE_SECONDS = 30.0
"""How long an engine may take to close: with a disk tier it first writes what it keeps."""

type Load = Callable[[Callable[[str], None]], Any]
"""Makes the engine; it is given a function that takes the name of each phase of the start."""


@dataclass(frozen=True)
class Ended:
    """How a server ended. ``clean``: its engine is closed, and nothing runs any more. Otherwise threads are left that
    may never come back, and the process should not wait for them."""

    status: int
    clean: bool


def run(load: Load, options: ServerOptions | None = None, *, bound: Bound | None = None) -> Ended:
    """Listen, load, and serve until a signal. Status 0: drained, or told to stop before it was ready; 1: cut short, or
    the engine died.

    ``bound`` comes from ``bind``; it is made here where absent. Raises what ``load`` raises.
    """
    options = options or ServerOptions()
    with bound or bind(options) as door:
        return asyncio.run(_serve(load, options, door))


async def _serve(load: Load, options: ServerOptions, bound: Bound) -> Ended:
    app = create_app(None, options)
    state = app[STATE]
    runner = make_runner(app)
    await runner.setup()
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    handled = [signal.SIGTERM, signal.SIGINT]
    for number in handled:
        loop.add_signal_handler(number, signals.put_nowait, number)
    if options.api_key_file is not None or options.tls_cert is not None:
        handled.append(signal.SIGHUP)
        loop.add_signal_handler(signal.SIGHUP, _reload, state, bound)
    try:
        server = await listen(runner, options, bound)
        log.info("listening on %s", bound.url)
        try:
            return await _live(state, load, signals, bound)
        finally:
            server.close()
    finally:
        await runner.cleanup()
        for number in handled:
            loop.remove_signal_handler(number)


def make_runner(app: web.Application) -> web.AppRunner:
    """The runner that ``create_app`` expects: handlers are cancelled when their client goes away."""
    return web.AppRunner(app, handle_signals=False, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)


async def listen(runner: web.AppRunner, options: ServerOptions, bound: Bound) -> asyncio.Server:
    """Take connections for a runner that is set up; the caller closes the server before the runner."""
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None, "the runner is not set up"
    more: dict[str, Any] = {"backlog": BACKLOG}
    if bound.tls is not None:
        more |= {"ssl": bound.tls, "ssl_handshake_timeout": options.header_timeout}
    make = loop.create_unix_server if bound.path is not None else loop.create_server
    return await make(lambda: Connection(server, options, loop), sock=bound.socket, **more)


def _reload(state: State, bound: Bound) -> None:
    """Read keys and certificate again; what cannot be read stays as it was."""
    try:
        state.load_keys()
        bound.load_certificate()
    except ValueError as error:
        log.error("SIGHUP: %s; going on as before", error)
    else:
        log.info("SIGHUP: keys and certificate read again")


async def _live(state: State, load: Load, signals: asyncio.Queue[int], bound: Bound) -> Ended:
    stop = asyncio.ensure_future(signals.get())
    loaded = _in_thread(lambda: load(lambda phase: setattr(state, "phase", phase)))
    await asyncio.wait((loaded, stop), return_when=asyncio.FIRST_COMPLETED)
    if not loaded.done():
        log.info("%s while the model was loading: stopping", signal.Signals(stop.result()).name)
        return Ended(0, clean=False)
    llm = await loaded
    gc.freeze()  # a full collection would look at all that was loaded, and hold everybody up for 150 ms
    state.attach(llm)
    await _in_thread(llm.print_report)  # requests come in already
    log.info("serving %s on %s", state.model_name, bound.url)
    log.info("tool parser %(tool_parser)s, reasoning parser %(reasoning_parser)s", state.formats.report())
    with Watchdog(llm, state.options.watchdog_timeout):
        status, hurry = await _until_stopped(state, stop, signals)
    if hurry:
        return Ended(status, clean=False)
    closed, again = _in_thread(llm.close), asyncio.ensure_future(signals.get())
    await asyncio.wait((closed, again), timeout=CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    return Ended(status, clean=closed.done())


def _in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """``call`` in a thread of its own, which the interpreter does not wait for at its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended: the process is leaving
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="jaxserve-load", daemon=True).start()
    return done


async def _until_stopped(state: State, first: "asyncio.Future[int]", signals: asyncio.Queue[int]) -> tuple[int, bool]:
    """The exit status, and whether to leave the engine as it is: it has died, or a second signal came."""
    died = asyncio.ensure_future(state.engine_died.wait())
    await asyncio.wait((died, first), return_when=asyncio.FIRST_COMPLETED)
    if died.done():
        first.cancel()
        log.critical("the engine has stopped; the server ends")
        return 1, True
    state.draining = True
    timeout = state.options.shutdown_timeout
    log.info("%s: draining for at most %g s", signal.Signals(first.result()).name, timeout)
    drained, second = asyncio.ensure_future(state.idle.wait()), asyncio.ensure_future(signals.get())
    await asyncio.wait((drained, second, died), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    status = 0 if drained.done() and not died.done() else 1
    hurry = died.done() or second.done()
    if not drained.done():
        log.warning("stopping with requests unfinished")
        state.fail_all(unavailable("the server is shutting down", code="shutting_down"))
        await asyncio.wait((drained,), timeout=0.5)
    for task in (drained, second, died):
        task.cancel()
    return status, hurry
