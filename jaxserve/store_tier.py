"""The tiers that outlive the process, read and written by a thread of their own. Imports no jax.

There may be several stores, the fastest first: a sidecar's memory, a folder on disk. A record is written to all of them
and read from the first that has it. Records go down as soon as their copy has left the device, and come up into the
host tier: whoever waits for them is admitted when they are there. The engine's thread only asks (``in``, ``fetch``,
``save``) and collects (``arrived``).
"""

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from jaxserve.host_tier import Block, sizes
from jaxserve.record_store import RecordStore
from jaxserve.records import rows

log = logging.getLogger(__name__)

QUEUED_BYTES = 256 << 20
"""Host memory that blocks on their way to the stores may take beyond the host tier's."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Records that were asked for: ``blocks`` of keys, data, and the store they come from. ``asked`` are all keys of
    the request."""

    asked: tuple[bytes, ...]
    blocks: list[tuple[list[bytes], Any, str]]


class StoreTier:
    """Stores and their thread. ``place`` makes a block's data of bytes ``[records, record_bytes]``; ``notify`` is
    called on the thread when something has arrived."""

    def __init__(self, stores: Sequence[RecordStore], place: Callable[[np.ndarray], Any]):
        self.stores, self.place = tuple(stores), place
        self.notify: Callable[[], None] = lambda: None
        self.reading: set[bytes] = set()
        """Keys that have been asked for and not been collected."""
        self.wait_seconds = 0.0
        """From asking for records to having them."""
        self._reads: deque[tuple[tuple[bytes, ...], float]] = deque()
        self._writes: deque[tuple[Block, list[int]]] = deque()
        self._saving: set[bytes] = set()
        """Keys of records that wait to be written or are being written."""
        self._used: dict[bytes, None] = {}
        self._arrived: deque[Arrival] = deque()
        self._queued = self._pending = 0
        """Bytes, and blocks, that wait to be written or are being written."""
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="jaxserve-stores", daemon=True)
        self._thread.start()

    @property
    def identity(self) -> str:
        return self.stores[0].identity

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return any(key in store for store in self.stores)

    def keeps(self, key: bytes) -> bool:
        """Whether the record is there or will be in a moment."""
        return key in self or key in self._saving

    def near(self, key: bytes) -> bool:
        """Whether the record is where reading is as quick as from the host tier."""
        return any(store.near and key in store for store in self.stores)

    @property
    def pending(self) -> int:
        """Blocks that are not written yet."""
        return self._pending

    @property
    def busy(self) -> bool:
        """Whether so much waits that copies that could be made later had better be."""
        return self._queued > QUEUED_BYTES // 2

    def fetch(self, keys: Sequence[bytes]) -> None:
        """Have records read; ``arrived`` will have them, or as many as are sound."""
        self.reading.update(keys)
        with self._wake:
            self._reads.append((tuple(keys), time.monotonic()))
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

    def used(self, keys: Iterable[bytes]) -> None:
        """The texts of these records were of use, in this order: the last one goes last."""
        with self._wake:
            for key in keys:
                self._used.pop(key, None)
                self._used[key] = None
            self._wake.notify()

    def save(self, block: Block, numbers: Iterable[int]) -> bool:
        """Write some of a block's records where they are not yet, if not too many wait. False where they are lost."""
        numbers = [n for n in numbers if any(block.keys[n] not in store for store in self.stores)]
        if not numbers:
            return True
        with self._wake:
            if block.data is None or self._closing or self._queued + block.nbytes > max(QUEUED_BYTES, block.nbytes):
                for store in self.stores:
                    store.counts.refused += len(numbers)
                return False
            self._queued += block.nbytes
            self._pending += 1
            self._saving.update(block.keys[n] for n in numbers)
            self._writes.append((block, numbers))
            self._wake.notify()
        return True

    def stop(self) -> None:
        """Write what waits; afterwards the stores are the caller's, to write to and to close."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def write(self, block: Block, numbers: Iterable[int]) -> None:
        """Put records of a block into the stores; waits for its data. For the thread, or after ``stop``."""
        data = rows(block.data)
        for number in numbers:
            value = zlib.crc32(data[number])
            for store in self.stores:
                store.write(block.keys[number], data[number], value)

    def close(self) -> None:
        """After ``stop``."""
        for store in self.stores:
            store.close()

    # -- the stores' thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._reads or self._writes or self._used or self._closing)
                asked = self._reads.popleft() if self._reads else None
                job = self._writes.popleft() if asked is None and self._writes else None
                used: dict[bytes, None] = {}
                if asked is None and job is None:
                    used, self._used = self._used, used
            if asked is not None:
                self._answer(*asked)
            elif job is not None:
                self._write(*job)
            elif used:
                self._touch(used)
            else:
                return

    def _answer(self, keys: tuple[bytes, ...], asked_at: float) -> None:
        """Whatever happens, whoever waits for the keys must hear of it."""
        blocks: list[tuple[list[bytes], Any, str]] = []
        try:
            blocks = self._read(keys)
        except Exception:
            log.exception("KV pages could not be read")
        self.wait_seconds += time.monotonic() - asked_at
        self._arrived.append(Arrival(keys, blocks))
        self.notify()

    def _read(self, keys: tuple[bytes, ...]) -> list[tuple[list[bytes], Any, str]]:
        found: list[tuple[bytes, np.ndarray, str]] = []
        for key in keys:
            if (record := self._record(key)) is None:
                break  # what follows is of no use without it
            found.append((key, *record))
        blocks = []
        for source, group in groupby(found, key=lambda one: one[2]):
            some = list(group)
            for size in sizes(len(some)):
                part, some = some[:size], some[size:]
                data = self.place(np.stack([record for _, record, _ in part]))
                blocks.append(([key for key, _, _ in part], data, source))
        return blocks

    def _record(self, key: bytes) -> tuple[np.ndarray, str] | None:
        """A record and the store that has it; a faster store without it gets it back."""
        for number, store in enumerate(self.stores):
            if (record := store.read(key)) is not None:
                for faster in self.stores[:number]:
                    faster.write(key, record)
                return record, store.name
        return None

    def _write(self, block: Block, numbers: list[int]) -> None:
        try:
            self.write(block, numbers)
        except Exception:
            log.exception("KV pages could not be written")
        with self._wake:
            self._queued -= block.nbytes
            self._pending -= 1
            self._saving.difference_update(block.keys[n] for n in numbers)

    def _touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for store in self.stores:
                store.touch(key)
