"""Ends a process whose engine has hung: a step that never finishes, or native code that never lets Python go on."""

import asyncio
import faulthandler
import logging
import os
import sys
from typing import Any, Self

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0


class Watchdog:
    """Watches ``llm`` on the running event loop, as a context; ``seconds`` of 0 watches nothing.

    Two ways lead to the same end, all threads' stacks on standard error and exit status 1. The event loop asks for the
    engine's progress. Where the loop itself cannot run, a timer of ``faulthandler`` runs out, which needs no
    interpreter: it is wound up at every tick.
    """

    def __init__(self, llm: Any, seconds: float):
        self._llm, self._seconds = llm, seconds
        self._to = 2 if sys.__stderr__ is None else sys.__stderr__.fileno()
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._seconds:
            self._task = asyncio.create_task(self._watch())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            faulthandler.cancel_dump_traceback_later()

    async def _watch(self) -> None:
        tick = min(TICK_SECONDS, self._seconds / 4)
        while True:
            faulthandler.dump_traceback_later(self._seconds + tick, exit=True, file=self._to)
            health = self._llm.health()
            if not health.idle and health.seconds_since_progress > self._seconds:
                self._end(health.seconds_since_progress)
            await asyncio.sleep(tick)

    def _end(self, seconds: float) -> None:
        log.critical("the engine has finished no step for %.0f s; the process ends. All threads' stacks:", seconds)
        faulthandler.dump_traceback(file=self._to, all_threads=True)
        logging.shutdown()
        os._exit(1)
