"""KV records in a file that outlives the process: fixed places, an index beside them, every record with a checksum.

``kv-<identity>/records`` holds the records, ``index`` says which key lies where. An index entry is cleared before its
record is overwritten and written after it, so a process may die at any moment: what it leaves is whole or unknown.
Records are read and written, not mapped: a full or failing disk is then an error, where a mapped page would be a signal
that ends the process.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

log = logging.getLogger(__name__)

HEADER = 4096
ENTRY = struct.Struct("<32sIQ")
"""Key, the record's checksum, when it was last used; a checksum of these follows."""
STRIDE = 64
MAGIC = b"jaxserve-kv-1\n"
EMPTY = bytes(STRIDE)


class DiskError(OSError):
    """The folder cannot be used; the message says why."""


@dataclass(slots=True)
class DiskCounts:
    """What has happened, in records."""

    read: int = 0
    written: int = 0
    evicted: int = 0
    damaged: int = 0
    """Records whose checksum was wrong."""
    refused: int = 0
    """Records that were not written: too many were waiting, or the disk failed."""


class DiskStore:
    """Records of one ``identity`` under ``folder``. One process at a time; one thread at a time but for ``in``.

    ``budget_bytes`` is for all identities in the folder: others that nobody uses go when there is no room. Raises
    ``DiskError``.
    """

    def __init__(self, folder: Path, identity: str, record_bytes: int, budget_bytes: int):
        self.identity = identity
        self.record_bytes, self.capacity = record_bytes, budget_bytes // (record_bytes + STRIDE)
        self.counts = DiskCounts()
        self.folder = folder / f"kv-{identity[:32]}"
        self._slots: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Place and checksum by key, the longest unused first."""
        self._stamp = 0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.mkdir(exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            self._index = self._open("index")
            try:
                fcntl.flock(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._index)
                raise DiskError(f"{self.folder} is in use by another process") from None
            self._records = self._open("records")
            self._read_index(MAGIC + f"{identity} {record_bytes}\n".encode())
            _make_room(folder, self.folder, budget_bytes, self.capacity * (record_bytes + STRIDE))
        except DiskError:
            raise
        except OSError as error:
            raise DiskError(f"{self.folder}: {error}") from error
        taken = {slot for slot, _ in self._slots.values()}
        self._free = [slot for slot in range(self.capacity - 1, -1, -1) if slot not in taken]

    def _open(self, name: str) -> int:
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(file, 0o600)
        return file

    def _read_index(self, title: bytes) -> None:
        header = title.ljust(HEADER, b"\0")
        found = os.pread(self._index, HEADER, 0)
        if found != header:
            if found:
                log.warning("discarding the KV pages in %s: its index was written by something else", self.folder)
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
            log.warning("discarding %d KV pages in %s: they were not written to their end", torn, self.folder)
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

    def read(self, key: bytes) -> np.ndarray | None:
        """The record's bytes; None where it is not there, or damaged: then it is forgotten."""
        place = self._slots.get(key)
        if place is None:
            return None
        slot, value = place
        record = np.empty(self.record_bytes, np.uint8)
        try:
            size = os.preadv(self._records, [record], slot * self.record_bytes)
        except OSError as error:
            log.warning("a KV page cannot be read from %s: %s", self.folder, error)
            size = 0
        if size != self.record_bytes or zlib.crc32(record) != value:
            self.counts.damaged += 1
            log.warning("discarding a KV page in %s: it is damaged", self.folder)
            self._drop(key)
            return None
        self.counts.read += 1
        self._slots.move_to_end(key)
        with contextlib.suppress(OSError):
            self._note(slot, key, value)
        return record

    def write(self, key: bytes, record: np.ndarray) -> None:
        """Keep a record, uint8 ``[record_bytes]``; a disk that is full or fails is counted and logged once."""
        if key in self._slots or not self.capacity:
            return
        if not self._free:
            self._drop(next(iter(self._slots)))
            self.counts.evicted += 1
        slot, value = self._free.pop(), zlib.crc32(record)
        try:
            if os.pwrite(self._records, record, slot * self.record_bytes) != self.record_bytes:
                raise OSError("the disk is full")
            self._note(slot, key, value)
        except OSError as error:
            if not self.counts.refused:
                log.warning("KV pages cannot be written to %s: %s", self.folder, error)
            self.counts.refused += 1
            self._free.append(slot)
            return
        self.counts.written += 1
        self._slots[key] = (slot, value)

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


def _entry(key: bytes, value: int, stamp: int) -> bytes:
    body = ENTRY.pack(key, value, stamp)
    return (body + struct.pack("<I", zlib.crc32(body))).ljust(STRIDE, b"\0")


def _make_room(folder: Path, mine: Path, budget: int, wanted: int) -> None:
    """Remove other identities' folders that nobody uses, the longest unused first, until ``wanted`` bytes are left.

    Raises ``DiskError`` where the file system has not got them.
    """
    others = []
    for other in folder.iterdir():
        if other != mine and re.fullmatch("kv-[0-9a-f]{32}", other.name) and other.is_dir() and not other.is_symlink():
            used = sum(file.stat().st_blocks * 512 for file in other.iterdir())
            others.append((max((file.stat().st_mtime for file in other.iterdir()), default=0.0), used, other))
    left = budget - sum(used for _, used, _ in others)
    for _, used, other in sorted(others):
        if left >= wanted:
            break
        if _remove(other):
            log.warning("removing %s, the KV pages of a model or an engine that has gone: %d bytes", other, used)
            left += used
    have = shutil.disk_usage(folder).free + sum(file.stat().st_blocks * 512 for file in mine.iterdir())
    if have < wanted:
        raise DiskError(
            f"{folder} has room for {have / 2**30:.1f} GiB of KV pages, {wanted / 2**30:.1f} were asked for"
        )


def _remove(folder: Path) -> bool:
    """Remove the folder of an identity unless a process holds it."""
    try:
        index = os.open(folder / "index", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except OSError:
        return False
    finally:
        os.close(index)
    return True
