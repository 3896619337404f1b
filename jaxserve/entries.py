"""Files of stored executables: a folder of ours alone, a file an entry, with readable facts before the machine code.

An entry is code that will be run: folders and files of other users, and links, are refused. While an entry is made,
its draft (``NAME.new``) is locked; the lock of a process that died is gone with it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"jaxserve-exe-2\n"
_HEAD = struct.Struct("<I32sQ")
"""Bytes of facts, SHA-256 of facts and code, bytes of code."""
_DRAFT = ".new"
MAX_FACTS = 1 << 16
OLD_DRAFT_SECONDS = 86400


class EntryError(ValueError):
    """An entry that cannot be used; the message says why."""


class FolderError(ValueError):
    """A folder that cannot be trusted with code; the message says why."""


@dataclass(frozen=True)
class Entry:
    """A stored executable, without its code."""

    path: Path
    size: int
    used: float
    """When it was last used, seconds since the epoch."""
    facts: dict[str, str]
    """Empty where the file cannot be read or is of another format."""
    strange: str = ""
    """What it is, where it is no file."""


def prepare(folder: Path) -> None:
    """Make the folder, or make sure that it is ours. Raises ``FolderError``, or OSError where it cannot be made."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise FolderError(f"{folder} holds code that will be run, and {_kind(found.st_mode)}: give the folder itself")
    if found.st_uid != os.geteuid():
        raise FolderError(f"{folder} holds code that will be run, and belongs to user {found.st_uid}, not to us")
    if stat.S_IMODE(found.st_mode) != 0o700:
        try:
            folder.chmod(0o700)
        except OSError as error:
            if found.st_mode & 0o022:
                raise FolderError(
                    f"{folder} may be written by others, which cannot be ended: {error.strerror}"
                ) from None


def _kind(mode: int) -> str:
    """What something is by its mode, for people."""
    kinds = {
        stat.S_IFREG: "is a file",
        stat.S_IFDIR: "is a folder",
        stat.S_IFLNK: "is a link",
        stat.S_IFIFO: "is a pipe",
    }
    return {**kinds, stat.S_IFSOCK: "is a socket"}.get(stat.S_IFMT(mode), "is a device")


def remove(path: Path) -> None:
    """Remove whatever is there, but no folder with something in it. Raises OSError where that cannot be done."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        path.rmdir()


def encode(facts: dict[str, str], code: bytes) -> bytes:
    text = json.dumps(facts, sort_keys=True).encode()
    return b"".join((_MAGIC, _HEAD.pack(len(text), hashlib.sha256(text + code).digest(), len(code)), text, code))


def read(path: Path) -> tuple[dict[str, str], memoryview] | None:
    """Facts and code of an entry; None where there is none. Raises ``EntryError``."""
    with contextlib.suppress(FileNotFoundError), _opened(path) as fd:
        data = memoryview(_read_all(fd, os.fstat(fd).st_size))
        size, digest, length = _head(data)
        start = len(_MAGIC) + _HEAD.size
        if len(data) != start + size + length or hashlib.sha256(data[start:]).digest() != digest:
            raise EntryError("damaged file")
        return json.loads(bytes(data[start : start + size])), data[start + size :]
    return None


def whole(path: Path) -> bool:
    """Whether there is an entry of ours with all its bytes: quickly, without a look at them."""
    try:
        with _opened(path) as fd:
            size, _, length = _head(os.pread(fd, len(_MAGIC) + _HEAD.size, 0))
            return os.fstat(fd).st_size == len(_MAGIC) + _HEAD.size + size + length
    except (OSError, EntryError):
        return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise EntryError(_kind(mode))
    try:  # should it become a pipe just now, nothing waits for its other end
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EntryError(str(error.strerror)) from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise EntryError(_kind(found.st_mode))
        if found.st_uid != os.geteuid():
            raise EntryError(f"belongs to user {found.st_uid}, not to us")
        if found.st_mode & 0o022:
            raise EntryError("may be written by others")
        yield fd
    finally:
        os.close(fd)


def _read_all(fd: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(fd, size)):
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _head(data: bytes | memoryview) -> tuple[int, bytes, int]:
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise EntryError("another format, or damaged" if len(data) else "damaged file")
    if len(data) < len(_MAGIC) + _HEAD.size:
        raise EntryError("damaged file")
    size, digest, length = _HEAD.unpack_from(data, len(_MAGIC))
    if size > MAX_FACTS:
        raise EntryError("damaged file")
    return size, digest, length


def scan(folder: Path, name: str = "") -> list[Entry]:
    """What is in the folder under names that begin with ``name``, without the code; drafts are left out."""
    found = []
    try:
        listed = [item for item in os.scandir(folder) if item.name.startswith(name)]
    except OSError:
        return []
    for item in listed:
        path = Path(item.path)
        try:
            about = item.stat(follow_symlinks=False)
        except OSError:
            continue  # gone in the meantime
        if not item.name.endswith(_DRAFT):
            strange = "" if stat.S_ISREG(about.st_mode) else _kind(about.st_mode)
            found.append(Entry(path, about.st_size, about.st_mtime, facts(path), strange))
    return found


def facts(path: Path) -> dict[str, str]:
    """What an entry is, without its code; empty where it cannot be read or is of another format."""
    start = len(_MAGIC) + _HEAD.size
    try:
        with _opened(path) as fd:
            data = os.pread(fd, 4096, 0)
            size, _, _ = _head(data)
            if start + size > len(data):
                data = os.pread(fd, start + size, 0)
            found = json.loads(data[start : start + size])
            return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def touch(path: Path) -> None:
    """Note that an entry is used."""
    with contextlib.suppress(OSError):
        os.utime(path, follow_symlinks=False)


@contextlib.contextmanager
def making(path: Path, wait: float) -> Iterator["Draft | Refused | None"]:
    """Hold the right to make an entry; None where another process holds it, after ``wait`` seconds.

    Where the file system knows no locks, everybody may; where nothing can be written, writing says why.
    """
    draft: Draft | Refused | None
    try:
        draft = _lock(Path(f"{path}{_DRAFT}"), path, time.monotonic() + wait)
    except OSError as error:
        draft = Refused(error)
    try:
        yield draft
    finally:
        if draft is not None:
            draft.close()


def _lock(place: Path, path: Path, until: float) -> "Draft | None":
    while True:
        with contextlib.suppress(FileNotFoundError):
            found = place.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                remove(place)
        fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)
            continue
        except OSError:  # no locks here: a draft of our own
            os.close(fd)
            place = place.with_name(f"{place.name}.{os.getpid()}.{time.monotonic_ns()}{_DRAFT}")
            fd = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            return Draft(fd, place, path)
        with contextlib.suppress(OSError):
            if os.fstat(fd).st_ino == place.lstat().st_ino and os.fstat(fd).st_uid == os.geteuid():
                return Draft(fd, place, path)
        os.close(fd)  # it was renamed or removed by the one who had it before


@dataclass(frozen=True)
class Refused:
    """An entry that may be made and cannot be written."""

    error: OSError

    def write(self, data: bytes) -> None:
        raise self.error

    def close(self) -> None:
        pass


class Draft:
    """An entry in the making, locked."""

    def __init__(self, fd: int, place: Path, path: Path):
        self.fd, self.place, self.path = fd, place, path

    def write(self, data: bytes) -> None:
        """Put the entry in its place, whole or not at all. Raises OSError."""
        os.ftruncate(self.fd, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(self.fd, view) :]
        os.fchmod(self.fd, 0o600)
        os.replace(self.place, self.path)
        self.place = self.path

    def close(self) -> None:
        """Remove what was not finished, and let others try."""
        if self.place != self.path:
            with contextlib.suppress(OSError):
                self.place.unlink()
        os.close(self.fd)


def remove_drafts(folder: Path) -> list[Entry]:
    """Remove the drafts that nobody is at; without locks, those that are a day old."""
    gone = []
    for place in folder.glob(f"*{_DRAFT}"):
        with contextlib.suppress(OSError, EntryError):
            about = place.lstat()
            if stat.S_ISREG(about.st_mode):
                with _opened(place) as fd:
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    except OSError:
                        if about.st_mtime > time.time() - OLD_DRAFT_SECONDS:
                            continue
                    remove(place)
            else:
                remove(place)
            gone.append(Entry(place, about.st_size, about.st_mtime, {}))
    return gone


def evict(folder: Path, most: int, keep: Iterable[Path]) -> list[Path]:
    """Remove the entries that were used longest ago until the rest takes at most ``most`` bytes; none of ``keep``."""
    sizes = []
    for item in os.scandir(folder):
        with contextlib.suppress(OSError):
            about = item.stat(follow_symlinks=False)
            if not item.is_dir(follow_symlinks=False):
                sizes.append((about.st_mtime, about.st_size, Path(item.path)))
    total, kept, gone = sum(size for _, size, _ in sizes), set(keep), []
    for used, size, path in sorted(sizes):
        if total <= most:
            break
        if path in kept or (path.name.endswith(_DRAFT) and used > time.time() - OLD_DRAFT_SECONDS):
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            gone.append(path)
            total -= size
    return gone
