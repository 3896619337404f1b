"""Which files weights came from: their SHA-256, and a cheap way to see that a file has not been touched since."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.sidecar.errors import SidecarError

SETTLED_NS = 2_000_000_000
"""A file that was changed less than this before it was looked at might be changed again with the same times."""
Stat = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was read. ``name`` is relative to the checkpoint.

    ``stat`` is device, inode, size, mtime_ns and ctime_ns. ``settled`` says whether an equal one means that nobody has
    written to it since.
    """

    name: str
    sha256: str
    stat: Stat
    settled: bool

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "stat": list(self.stat), "settled": self.settled}

    @classmethod
    def from_json(cls, value: Any) -> "SourceFile":
        """Raises ``SidecarError`` for what a sidecar should not have sent."""
        try:
            found = cls(value["name"], value["sha256"], tuple(value["stat"]), value["settled"])
        except (KeyError, TypeError) as error:
            raise SidecarError(f"the sidecar's record of a file is wrong: {error!r}") from None
        if not (isinstance(found.name, str) and isinstance(found.sha256, str) and len(found.stat) == 5):
            raise SidecarError("the sidecar's record of a file is wrong")
        return found


def look(path: Path) -> Stat:
    """Raises ``SidecarError`` where the file is not there."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise SidecarError(f"{path}: {error.strerror}") from None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def settled(stat: Stat) -> bool:
    return time.time_ns() - max(stat[3], stat[4]) > SETTLED_NS


def sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """The file's hash; ``progress`` is told of bytes as they are read. Raises ``SidecarError``."""
    state = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(8 << 20)
            view = memoryview(buffer)
            while count := file.readinto(buffer):
                state.update(view[:count])
                if progress:
                    progress(count)
    except OSError as error:
        raise SidecarError(f"{path}: {error.strerror}") from None
    return state.hexdigest()


def relative(path: Path, root: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()


def unchanged(theirs: Sequence[SourceFile], paths: Iterable[Path], root: Path) -> bool:
    """Whether the files are sure to be the same, without reading one."""
    known = {file.name: file for file in theirs}
    mine = {relative(path, root): path for path in paths}
    return known.keys() == mine.keys() and all(known[n].settled and look(p) == known[n].stat for n, p in mine.items())


def differences(theirs: Sequence[SourceFile], paths: Iterable[Path], root: Path) -> list[str]:
    """What of the files here is not what the sidecar has read, in words; empty where they are the same, byte for byte.

    A file whose ``stat`` is the settled one is taken for unchanged; any other is read and hashed. Raises
    ``SidecarError`` where one cannot be read.
    """
    mine = {relative(path, root): path for path in paths}
    known = {file.name: file for file in theirs}
    out = [f"file {name}: not in the sidecar" for name in mine if name not in known]
    out += [f"file {name}: only in the sidecar" for name in known if name not in mine]
    for name, path in mine.items():
        file = known.get(name)
        if file is None or (file.settled and look(path) == file.stat):
            continue
        found = sha256(path)
        if found != file.sha256:
            out.append(f"file {name}: sha256 {file.sha256[:16]}... in the sidecar, {found[:16]}... here")
    return out
