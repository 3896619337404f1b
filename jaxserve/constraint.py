"""What a grammar lets a sequence say next, and the threads that work it out beside the engine's loop. Imports no jax.

After every token the matcher must take it in and say which tokens may follow. That happens on a small pool of threads:
the loop leaves a sequence out of its steps until its mask is there, and nobody else waits for it.
"""

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

log = logging.getLogger(__name__)

THREADS = 4
"""Most threads that compute masks (fewer where there are fewer CPUs)."""
GRACE_SECONDS = 0.001
"""How long a step is held back so that masks which are nearly ready go along: sequences then stay in step."""


class Mask(NamedTuple):
    """What may follow. ``words``: uint32 ``[ceil(V / 32)]``, bit v % 32 of word v // 32 is token v."""

    words: np.ndarray
    complete: bool = False
    """The text is whole and nothing can follow it: the sequence ends here."""
    error: str | None = None
    """The matcher has failed, and the sequence cannot go on."""


class Matcher(Protocol):
    """One sequence's place in its language. Used by one thread at a time."""

    def advance(self, token: int) -> Mask:
        """Take in a token that the last mask allowed; what may follow it."""
        ...


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar side of a sequence. Belongs to the engine's thread; the matcher to whoever advances it."""

    matcher: Matcher
    mask: Mask | None
    """Of the next token; None while it is being computed."""
    slow: bool = False
    """The last mask took longer than the grace: no step is held back for the next one."""


class MaskPool:
    """Advances constraints on its threads and hands every mask to ``done``, on one of them."""

    def __init__(self, done: Callable[[object, Mask], None]):
        self._done = done
        self._threads = ThreadPoolExecutor(max(1, min(THREADS, os.cpu_count() or 1)), "jaxserve-mask")

    def advance(self, owner: object, constraint: Constraint, token: int) -> None:
        """Take the constraint's mask away and compute the next one; ``done(owner, mask)`` follows."""
        constraint.mask = None
        try:
            self._threads.submit(self._advance, owner, constraint, token)
        except RuntimeError as error:  # the process is ending
            self._done(owner, Mask(np.zeros(0, np.uint32), error=str(error)))

    def _advance(self, owner: object, constraint: Constraint, token: int) -> None:
        start = time.monotonic()
        try:
            mask = constraint.matcher.advance(token)
        except Exception as error:
            log.exception("a grammar's matcher has failed")
            mask = Mask(np.zeros(0, np.uint32), error=f"the grammar's matcher failed: {error}")
        constraint.slow = time.monotonic() - start > GRACE_SECONDS
        self._done(owner, mask)

    def close(self) -> None:
        """Start nothing more; what runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
