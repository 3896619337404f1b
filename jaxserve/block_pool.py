"""Memory of blocks that are gone, for the next ones: new memory costs as much as the copying. Imports no jax."""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxserve.host_tier import SIZES, Block

KEPT = 2
"""Unused blocks of each size; a tier that is full drops one for each that comes."""


class BlockPool:
    """Data of blocks by their number of records. ``make`` makes new data. Blocks may end on any thread."""

    def __init__(self, make: Callable[[int], Any]):
        self._make = make
        self._free: dict[int, deque[Any]] = {size: deque(maxlen=KEPT) for size in SIZES}

    def take(self, records: int) -> Any:
        """Data that nobody uses, to be overwritten."""
        try:
            return self._free[records].pop()
        except IndexError:
            return self._make(records)

    def watch(self, block: Block) -> None:
        """When nobody knows the block any more, its data are free. Whoever looks at them has to keep it until then."""
        end = weakref.finalize(block, self._free[len(block.keys)].append, block.data)
        end.atexit = False
