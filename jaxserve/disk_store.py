"""A folder for KV records: one subfolder for each identity, locked by the engine that uses it, and room for all.

``kv-<identity>/records`` and ``index`` are what ``record_store`` makes of them. A second engine of the same identity
takes ``kv-<identity>.2``, and so on.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
from pathlib import Path

from jaxserve.record_store import STRIDE, RecordStore, capacity

log = logging.getLogger(__name__)

ENGINES = 8
"""Engines of one identity that may share a folder, or have pools in one sidecar."""
PATIENCE_SECONDS = 1.0
"""For an engine that has just been killed to let go of its lock, and for the sidecar to notice."""


class DiskError(OSError):
    """The folder cannot be used; the message says why."""


def open_store(folder: Path, identity: str, record_bytes: int, budget_bytes: int) -> RecordStore:
    """Records of one ``identity`` under ``folder``, for this process alone. Raises ``DiskError``.

    ``budget_bytes`` is for all subfolders: those that nobody uses go when there is no room. Where the disk has less, so
    has the store, which is said.
    """
    records = capacity(budget_bytes, record_bytes)
    mine = folder / f"kv-{identity[:32]}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine, index = _lock(mine)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, index)
            have = _make_room(folder, mine, budget_bytes, records * (record_bytes + STRIDE))
            if (fit := min(records, capacity(have, record_bytes))) < max(records, 1):
                text = "%s has room for %d KV pages (%.1f MiB each), %d were asked for: it keeps no more than that"
                log.warning(text, folder, fit, record_bytes / 2**20, records)
                records = fit
            file = _open(mine / "records")
            undo.callback(os.close, file)
            store = RecordStore(
                "disk", index, file, identity=identity, record_bytes=record_bytes, capacity=records, place=str(mine)
            )
            undo.pop_all()
        return store
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(f"{mine}: {error}") from error


def _open(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(file, 0o600)
    return file


def _lock(first: Path) -> tuple[Path, int]:
    """The first of an identity's subfolders that no process uses, and its index, locked.

    A process that is killed holds its lock until the last of its writes has ended, and its memory has been given back:
    the subfolder that has been in use is waited for a moment.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    for number in range(1, ENGINES + 1):
        mine = first if number == 1 else first.with_name(f"{first.name}.{number}")
        while (index := _try(mine)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if index is not None:
            if number > 1:
                log.warning("%s is in use by another engine; the KV pages of this one go to %s", first, mine)
            return mine, index
    raise DiskError(f"{first} is in use, and so are those of {ENGINES - 1} more engines: give this one another folder")


def _try(mine: Path) -> int | None:
    """Make a subfolder and lock its index; None where another process has it, or is just removing it."""
    mine.mkdir(exist_ok=True, mode=0o700)
    mine.chmod(0o700)
    index = _open(mine / "index")
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(index), (mine / "index").stat()):
            return index
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(index)
    return None


def _make_room(folder: Path, mine: Path, budget: int, wanted: int) -> int:
    """Remove other subfolders that nobody uses, the longest unused first, until ``wanted`` bytes are left.

    Returns the bytes that the file system has for ``mine``, with what it holds already. Raises ``DiskError`` where it
    could not have them if it were empty.
    """
    whole = shutil.disk_usage(folder)
    if wanted > whole.total:
        size, asked = whole.total / 2**30, wanted / 2**30
        raise DiskError(f"{folder} has room for {size:.3g} GiB in all, {asked:.3g} were asked for KV pages")
    others = []
    for other in folder.iterdir():
        ours = re.fullmatch(r"kv-[0-9a-f]{32}(\.\d)?", other.name)
        if other != mine and ours and other.is_dir() and not other.is_symlink():
            used = sum(file.stat().st_blocks * 512 for file in other.iterdir())
            others.append((max((file.stat().st_mtime for file in other.iterdir()), default=0.0), used, other))
    left = budget - sum(used for _, used, _ in others)
    for _, used, other in sorted(others):
        if left >= wanted:
            break
        if _remove(other):
            log.warning("removing %s, KV pages that no engine uses, for want of room: %d bytes", other, used)
            left += used
    return shutil.disk_usage(folder).free + sum(file.stat().st_blocks * 512 for file in mine.iterdir())


def _remove(folder: Path) -> bool:
    """Remove a subfolder unless a process holds it."""
    try:
        index = os.open(folder / "index", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
