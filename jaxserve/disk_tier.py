"""The third tier: records on disk, read and written by a thread of its own. Imports no jax.

Records go down when their block leaves the host tier, and come up into it: whoever waits for them is admitted when they
are there. The engine's thread only asks (``in``, ``fetch``, ``save``) and collects (``arrived``).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.disk_store import DiskStore
from jaxserve.host_tier import Block, sizes
from jaxserve.records import rows

log = logging.getLogger(__name__)

QUEUED_BYTES = 256 << 20
"""Host memory that blocks on their way to the disk may take beyond the host tier's."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Records that were asked for: ``blocks`` of keys and data. ``asked`` are all keys of the request."""

    asked: tuple[bytes, ...]
    blocks: list[tuple[list[bytes], Any]]


class DiskTier:
    """A store and its thread. ``place`` makes a block's data of bytes ``[records, record_bytes]``; ``notify`` is called
    on the thread when something has arrived."""

    def __init__(self, store: DiskStore, place: Callable[[np.ndarray], Any]):
        self.store, self.place = store, place
        self.notify: Callable[[], None] = lambda: None
        self.reading: set[bytes] = set()
        """Keys that have been asked for and not been collected."""
        self.read_seconds = 0.0
        self._reads: deque[tuple[bytes, ...]] = deque()
        self._writes: deque[tuple[Block, list[int]]] = deque()
        self._arrived: deque[Arrival] = deque()
        self._queued = self._pending = 0
        """Bytes, and blocks, that wait to be written or are being written."""
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="jaxserve-disk", daemon=True)
        self._thread.start()

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self.store

    @property
    def pending(self) -> int:
        """Blocks that are not written yet."""
        return self._pending

    @property
    def usage(self) -> float:
        return len(self.store) / self.store.capacity if self.store.capacity else 0.0

    def fetch(self, keys: Sequence[bytes]) -> None:
        """Have records read; ``arrived`` will have them, or as many as are sound."""
        self.reading.update(keys)
        with self._wake:
            self._reads.append(tuple(keys))
            self._wake.notify()

    def arrived(self) -> list[Arrival]:
        """What has been read since the last call."""
        found = []
        while self._arrived:
            found.append(self._arrived.popleft())
            self.reading.difference_update(found[-1].asked)
        return found

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    def save(self, block: Block, numbers: list[int]) -> bool:
        """Write some of a block's records, if not too many wait. False where they are lost."""
        numbers = [number for number in numbers if block.keys[number] not in self.store]
        if not numbers:
            return True
        with self._wake:
            if block.data is None or self._closing or self._queued + block.nbytes > max(QUEUED_BYTES, block.nbytes):
                self.store.counts.refused += len(numbers)
                return False
            self._queued += block.nbytes
            self._pending += 1
            self._writes.append((block, numbers))
            self._wake.notify()
        return True

    def stop(self) -> None:
        """Write what waits; afterwards the store is the caller's, to write to and to close."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    # -- the disk's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._reads or self._writes or self._closing)
                keys = self._reads.popleft() if self._reads else None
                job = self._writes.popleft() if keys is None and self._writes else None
                if keys is None and job is None:
                    return
            if keys is not None:
                self._answer(keys)
            elif job is not None:
                self._write(*job)

    def _answer(self, keys: tuple[bytes, ...]) -> None:
        """Whatever happens, whoever waits for the keys must hear of it."""
        begun, blocks = time.monotonic(), []
        try:
            blocks = self._read(keys)
        except Exception:
            log.exception("KV pages could not be brought from the disk")
        self.read_seconds += time.monotonic() - begun
        self._arrived.append(Arrival(keys, blocks))
        self.notify()

    def _read(self, keys: tuple[bytes, ...]) -> list[tuple[list[bytes], Any]]:
        found = []
        for key in keys:
            if (record := self.store.read(key)) is None:
                break  # what follows is of no use without it
            found.append(record)
        blocks, start = [], 0
        for size in sizes(len(found)):
            blocks.append((list(keys[start : start + size]), self.place(np.stack(found[start : start + size]))))
            start += size
        return blocks

    def _write(self, block: Block, numbers: list[int]) -> None:
        try:
            write(self.store, block, numbers)
        except Exception:
            log.exception("KV pages could not be brought to the disk")
        with self._wake:
            self._queued -= block.nbytes
            self._pending -= 1


def write(store: DiskStore, block: Block, numbers: Sequence[int]) -> None:
    """Put records of a block into the store; waits for its data."""
    data = rows(block.data)
    for number in numbers:
        store.write(block.keys[number], data[number])
