"""A folder for KV records: one subfolder for each identity, locked by the engine that uses it, and room for all.

``kv-<identity>/records`` and ``index`` are what ``record_store`` makes of them. A second engine of the same identity
takes ``kv-<identity>.2``, and so on.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path

from jaxserve.record_store import HEADER, RecordStore, capacity

log = logging.getLogger(__name__)

ENGINES = 8
"""Engines of one identity that may share a folder, or have pools in one sidecar."""
PATIENCE_SECONDS = 1.0
"""For an engine that has just been killed to let go of its lock, and for the sidecar to notice."""


class DiskError(OSError):
    """The folder cannot be used; the message says why."""


def check_folder(folder: Path, budget_bytes: int) -> None:
    """Make the folder, and see that it can be used at all. Raises ``DiskError``."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        total = shutil.disk_usage(folder).total
    except OSError as error:
        raise DiskError(f"{folder}: {error.strerror}") from error
    if budget_bytes > total:
        size, asked = total / 2**30, budget_bytes / 2**30
        raise DiskError(f"{folder} has room for {size:.3g} GiB in all, {asked:.3g} were asked for KV pages")


def open_store(folder: Path, identity: str, record_bytes: int, budget_bytes: int) -> RecordStore:
    """Records of one ``identity`` under ``folder``, for this process alone. Raises ``DiskError``.

    ``budget_bytes`` is for what all subfolders really hold. As this one grows, those that nobody uses go when there is
    no room. Where the disk has less, so has the store, which is said.
    """
    records = capacity(budget_bytes, record_bytes)
    check_folder(folder, budget_bytes)
    mine = folder / f"kv-{identity[:32]}"
    try:
        mine, index = _lock(mine)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, index)
            _make_room(folder, mine, budget_bytes, min(_used(mine), budget_bytes))
            have = shutil.disk_usage(folder).free + sum(_used(path) for path in (mine, *_others(folder, mine)))
            if (fit := min(records, capacity(have, record_bytes))) < max(records, 1):
                text = "%s has room for %d KV pages (%.1f MiB each), %d were asked for: it keeps no more than that"
                log.warning(text, folder, fit, record_bytes / 2**20, records)
                records = fit
            file = _open(mine / "records")
            undo.callback(os.close, file)
            store = RecordStore(
                "disk",
                index,
                file,
                identity=identity,
                record_bytes=record_bytes,
                capacity=records,
                place=str(mine),
                room=partial(_make_room, folder, mine, budget_bytes),
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
    try:
        mine.mkdir(exist_ok=True, mode=0o700)
        mine.chmod(0o700)
        index = _open(mine / "index")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(index), (mine / "index").stat()):
            return index
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(index)
    return None


def _make_room(folder: Path, mine: Path, budget: int, wanted: int) -> bool:
    """Whether ``mine`` may take ``wanted`` bytes in all: of the budget for all subfolders, and of the disk.

    Others that nobody uses are removed for it, the longest unused first, and no more of them than it takes.
    """
    others = _others(folder, mine)

    def fits() -> bool:
        held = sum(_used(other) for other in others)
        return held + wanted <= budget and wanted <= shutil.disk_usage(folder).free + _used(mine)

    if fits():
        return True
    for other in sorted(others, key=_last_used):
        used = _used(other)
        if _remove(other):
            log.warning("removing %s, KV pages that no engine uses, for want of room: %d bytes", other, used)
            if fits():
                return True
    return False


def _others(folder: Path, mine: Path) -> list[Path]:
    """The subfolders of other identities, and of other engines."""
    ours = re.compile(r"kv-[0-9a-f]{32}(\.\d)?")
    found = [path for path in folder.iterdir() if path != mine and ours.fullmatch(path.name)]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def _used(folder: Path) -> int:
    """Bytes that a store takes, as ``capacity`` counts them; 0 where it has gone."""
    size = 0
    for name, aside in (("index", HEADER), ("records", 0)):
        with contextlib.suppress(FileNotFoundError):
            size += max(0, (folder / name).stat().st_size - aside)
    return size


def _last_used(folder: Path) -> float:
    try:
        return max((file.stat().st_mtime for file in folder.iterdir()), default=0.0)
    except FileNotFoundError:
        return 0.0


def _remove(folder: Path) -> bool:
    """Remove a subfolder unless a process holds it."""
    try:
        index = _open(folder / "index")  # made where a removal has been cut short
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
