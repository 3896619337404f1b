"""KV records that outlive the process: fixed places, an index beside them, every record with a checksum.

A store is two file descriptors: a disk's files, or memory that a sidecar lends. ``index`` says which key lies where in
``records``. An index entry is cleared before its place is overwritten and written after it, and the kernel carries out
one process's writes in that order. So a process may be killed at any moment: what it leaves is whole or unknown. After
a loss of power a disk may have kept the later write and not the earlier one; then the checksum tells.

Records are read and written, not mapped: a full or failing disk is then an error, where a mapped page would be a signal
that ends the process.
"""

import contextlib
import logging
import os
import struct
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

log = logging.getLogger(__name__)

HEADER = 4096
ENTRY = struct.Struct("<32sIQ")
"""Key, the record's checksum, when it was last used; a checksum of these follows."""
STRIDE = 64
MAGIC = b"jaxserve-kv-1\n"
EMPTY = bytes(STRIDE)


@dataclass(slots=True)
class StoreCounts:
    """What has happened, in records and in seconds that it took."""

    read: int = 0
    written: int = 0
    evicted: int = 0
    damaged: int = 0
    """Records whose checksum was wrong."""
    refused: int = 0
    """Records that were not written: too many were waiting, or the disk failed."""
    read_seconds: float = 0.0
    write_seconds: float = 0.0


class RecordStore:
    """At most ``capacity`` records of one ``identity`` in the files ``index`` and ``records``, which it closes.

    ``name`` is what metrics call it, ``place`` what messages call it; ``near`` says that reading it is as quick as
    reading memory. Before the store grows to so many bytes it asks ``room``; where that says no, the longest unused
    record makes room. One process at a time; one thread at a time but for ``in``. Raises ``OSError``.
    """

    def __init__(
        self,
        name: str,
        index: int,
        records: int,
        *,
        identity: str,
        record_bytes: int,
        capacity: int,
        place: str,
        near: bool = False,
        room: Callable[[int], bool] = lambda size: True,
    ):
        self.name, self.identity, self.place, self.near = name, identity, place, near
        self.record_bytes, self.capacity = record_bytes, capacity
        self.counts = StoreCounts()
        self._room = room
        self._index, self._records = index, records
        self._slots: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Place and checksum by key, the longest unused first."""
        self._stamp = 0
        self._read_index(MAGIC + f"{identity} {record_bytes}\n".encode())
        taken = {slot for slot, _ in self._slots.values()}
        self._end = max(taken, default=-1) + 1
        """Places from here on have not been used yet."""
        self._free = [slot for slot in range(self._end - 1, -1, -1) if slot not in taken]

    def _read_index(self, title: bytes) -> None:
        header = title.ljust(HEADER, b"\0")
        found = os.pread(self._index, HEADER, 0)
        if found != header:
            if found:
                log.warning("discarding the KV pages in %s: its index was written by something else", self.place)
            os.ftruncate(self._index, 0)
            os.ftruncate(self._records, 0)
            os.pwrite(self._index, header, 0)
            return
        table = os.pread(self._index, self.capacity * STRIDE, HEADER)
        whole = os.fstat(self._records).st_size // self.record_bytes
        entries, torn = [], 0
        for slot in range(len(table) // STRIDE):
            entry = table[slot * STRIDE : (slot + 1) * STRIDE]
            if entry == EMPTY:
                continue
            key, value, stamp = ENTRY.unpack_from(entry)
            if slot >= whole or entry != _entry(key, value, stamp):
                torn += 1
                continue
            entries.append((stamp, key, slot, value))
        if torn:
            log.warning("discarding %d KV pages in %s: they were not written to their end", torn, self.place)
        for stamp, key, slot, value in sorted(entries):
            self._slots[key] = (slot, value)
            self._stamp = stamp
        # A smaller budget than last time: what lies beyond it goes.
        os.ftruncate(self._index, min(os.fstat(self._index).st_size, HEADER + self.capacity * STRIDE))
        os.ftruncate(self._records, min(os.fstat(self._records).st_size, self.capacity * self.record_bytes))

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def usage(self) -> float:
        """Share of the room that is taken."""
        return len(self) / self.capacity if self.capacity else 0.0

    def read(self, key: bytes) -> np.ndarray | None:
        """The record's bytes; None where it is not there, or damaged: then it is forgotten."""
        place = self._slots.get(key)
        if place is None:
            return None
        slot, value = place
        begun = time.monotonic()
        record = np.empty(self.record_bytes, np.uint8)
        try:
            size = os.preadv(self._records, [record], slot * self.record_bytes)
        except OSError as error:
            log.warning("a KV page cannot be read from %s: %s", self.place, error)
            size = 0
        if size != self.record_bytes or zlib.crc32(record) != value:
            self.counts.damaged += 1
            log.warning("discarding a KV page in %s: it is damaged", self.place)
            self._drop(key)
            return None
        self.counts.read += 1
        self.counts.read_seconds += time.monotonic() - begun
        self.touch(key)
        return record

    def touch(self, key: bytes) -> None:
        """If the record is there, let it go after all others."""
        place = self._slots.get(key)
        if place is not None:
            self._slots.move_to_end(key)
            with contextlib.suppress(OSError):
                self._note(place[0], key, place[1])

    def write(self, key: bytes, record: np.ndarray, checksum: int | None = None) -> None:
        """Keep a record, uint8 ``[record_bytes]``; a disk that is full or fails is counted and logged once.

        ``checksum`` is its CRC-32, where that is known already.
        """
        if key in self._slots or not self.capacity:
            return
        begun = time.monotonic()
        value = zlib.crc32(record) if checksum is None else checksum
        try:
            slot = self._free[-1] if self._free else self._make_place()
            if os.pwrite(self._records, record, slot * self.record_bytes) != self.record_bytes:
                raise OSError("there is no room")
            self._note(slot, key, value)
        except OSError as error:
            if not self.counts.refused:
                log.warning("KV pages cannot be written to %s: %s", self.place, error)
            self.counts.refused += 1
            return
        self._free.pop()
        self.counts.written += 1
        self.counts.write_seconds += time.monotonic() - begun
        self._slots[key] = (slot, value)

    def _make_place(self) -> int:
        """One more place, which is free then: a new one, or the longest unused record's. Raises ``OSError``."""
        if self._end < self.capacity and self._room((self._end + 1) * (self.record_bytes + STRIDE)):
            self._free.append(self._end)
            self._end += 1
        elif self._slots:
            self._drop(next(iter(self._slots)))
            self.counts.evicted += 1
        else:
            raise OSError("there is no room beside what other engines keep there")
        return self._free[-1]

    def _note(self, slot: int, key: bytes, value: int) -> None:
        self._stamp += 1
        os.pwrite(self._index, _entry(key, value, self._stamp), HEADER + slot * STRIDE)

    def _drop(self, key: bytes) -> None:
        slot, _ = self._slots.pop(key)
        with contextlib.suppress(OSError):  # then the checksum will tell
            os.pwrite(self._index, EMPTY, HEADER + slot * STRIDE)
        self._free.append(slot)

    def close(self) -> None:
        os.close(self._records)
        os.close(self._index)


def capacity(budget_bytes: int, record_bytes: int) -> int:
    """Records that fit into so many bytes, with what the index takes for them."""
    return budget_bytes // (record_bytes + STRIDE)


def _entry(key: bytes, value: int, stamp: int) -> bytes:
    body = ENTRY.pack(key, value, stamp)
    return (body + struct.pack("<I", zlib.crc32(body))).ljust(STRIDE, b"\0")
