"""Where an owner is found: a private folder with a socket, a lock and a log for each group of devices."""

import contextlib
import fcntl
import os
import re
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path

from jaxserve.sidecar import wire
from jaxserve.sidecar.errors import SidecarError

_GROUP = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
PATIENCE_SECONDS = 3.0
"""How long a living owner may be without a socket: it is about to start or to end, or has to make a new one."""


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"jaxserve-{os.geteuid()}"


class Place:
    """The folder of one user and the files of one device group in it. A context manager: it holds the folder open.

    Names are looked up in the folder that was checked, so that nobody can put another in its place, and a long path
    does not matter to the socket. Raises ``SidecarError`` (``refused``) where the folder is not this user's alone, and
    where it is not there unless ``create``.
    """

    def __init__(self, folder: str | Path | None, group: str, *, create: bool = False):
        if not _GROUP.fullmatch(group):
            raise SidecarError(f"{group!r:.80} is no name of a device group", "invalid")
        self.folder = default_folder() if folder is None else Path(folder).expanduser().absolute()
        self.group = group
        self.socket_path = self.folder / f"sidecar-{group}.sock"
        self.log_path = self.folder / f"sidecar-{group}.log"
        if create:
            with contextlib.suppress(FileExistsError):
                try:
                    self.folder.parent.mkdir(parents=True, exist_ok=True)
                    self.folder.mkdir(mode=0o700)
                except FileExistsError:
                    raise
                except OSError as error:
                    raise SidecarError(f"{self.folder}: {error.strerror}", "refused") from None
        try:
            self._folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SidecarError(f"no sidecar runs here: {self.folder} does not exist", "gone") from None
        except OSError as error:
            raise SidecarError(f"{self.folder} is no folder of its own: {error.strerror}", "refused") from None
        found = os.fstat(self._folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(self._folder)
            raise SidecarError(
                f"{self.folder} must belong to user {os.geteuid()} alone (mode 0700); it is user {found.st_uid}'s, "
                f"mode {stat.S_IMODE(found.st_mode):04o}",
                "refused",
            )

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    @property
    def _address(self) -> str:
        return f"/proc/self/fd/{self._folder}/{self.socket_path.name}"

    def connect(self, seconds: float = 5.0) -> socket.socket:
        """A connection to the owner.

        Raises ``SidecarError``: ``gone``, ``silent`` where an owner lives and cannot be reached, or ``refused`` where
        it is another user's.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self._connect(seconds)
            except SidecarError as error:
                pid = self.holder()
                if error.code != "gone" or pid is None:
                    raise
                if time.monotonic() > deadline:
                    raise SidecarError(
                        f"process {pid} holds the lock of the sidecar {self.group}, but its socket {self.socket_path} "
                        "is gone; `jaxserve sidecar stop --kill` ends it",
                        "silent",
                    ) from None
            time.sleep(0.05)

    def _connect(self, seconds: float) -> socket.socket:
        try:
            found = os.stat(self.socket_path.name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            raise SidecarError(f"no sidecar runs here: {self.socket_path} does not exist", "gone") from None
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise SidecarError(f"{self.socket_path} is not a socket of user {os.geteuid()}", "refused")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds)
            sock.connect(self._address)
            _, uid = wire.peer(sock)
            if uid != os.geteuid():
                raise SidecarError(f"the sidecar at {self.socket_path} is run by user {uid}", "refused")
            return sock
        except TimeoutError:
            sock.close()
            raise SidecarError(f"{silent(self.holder())} in {seconds:g} s", "silent") from None
        except OSError as error:
            sock.close()
            raise SidecarError(
                f"no sidecar answers at {self.socket_path} ({error.strerror or error}): it has died", "gone"
            ) from None
        except BaseException:
            sock.close()
            raise

    def lock(self) -> int | None:
        """The group's lock, held by the descriptor until ``unlock``; None where another process holds it.

        Who holds it is written in it: a number may be used again, so that the process's start belongs to it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._lock_name, flags, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} {_started(os.getpid())}\n".encode(), 0)
        return fd

    @staticmethod
    def unlock(fd: int) -> None:
        os.ftruncate(fd, 0)
        os.close(fd)

    @property
    def _lock_name(self) -> str:
        return f"sidecar-{self.group}.lock"

    def holder(self) -> int | None:
        """The living process of this user that has written itself into the lock."""
        try:
            fd = os.open(self._lock_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError:
            return None
        with open(fd, "rb") as file:
            words = file.read(64).split()
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return None
        pid, started = (int(word) for word in words)
        return pid if pid > 0 and started > 0 and _started(pid) == started else None

    def kill(self) -> int:
        """End the owner by force, as it does not listen; its pid. Raises ``SidecarError``."""
        pid = self.holder()
        if pid is None:
            raise SidecarError(f"no living process holds the lock of the sidecar {self.group} in {self.folder}", "gone")
        fd = os.pidfd_open(pid)
        try:
            if self.holder() != pid:  # the descriptor is of that process and of no later one
                raise SidecarError(f"process {pid} has ended", "gone")
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
        return pid

    def visible(self) -> bool:
        """Whether there is a socket in the folder."""
        try:
            return stat.S_ISSOCK(os.stat(self.socket_path.name, dir_fd=self._folder, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def listen(self) -> socket.socket:
        """A listening socket, in the place of a dead owner's; for the holder of the lock alone."""
        self.forget()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)
        try:
            sock.bind(self._address)
        except BaseException:
            sock.close()
            raise
        finally:
            os.umask(before)
        sock.listen(128)
        return sock

    def forget(self) -> None:
        """Remove the socket's file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path.name, dir_fd=self._folder)

    def log(self) -> int:
        """A descriptor to append to the log; a log beyond 8 MiB begins anew."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.log_path.name, flags, 0o600, dir_fd=self._folder)
        if os.fstat(fd).st_size > 8 << 20:
            os.ftruncate(fd, 0)
        return fd


def groups(folder: str | Path | None) -> list[str]:
    """Device groups that have, or had, an owner in the folder."""
    path = default_folder() if folder is None else Path(folder).expanduser()
    names = {
        found.stem.removeprefix("sidecar-") for kind in ("sock", "lock") for found in path.glob(f"sidecar-*.{kind}")
    }
    return sorted(name for name in names if _GROUP.fullmatch(name))


def silent(pid: int | None) -> str:
    """The beginning of a sentence about an owner that lives, or seems to, and gives no answer."""
    return f"the sidecar, process {'of an unknown number' if pid is None else pid}, does not answer"


def _started(pid: int) -> int:
    """When a process of this user started, in ticks since the machine did; 0 where there is none, or it has ended."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return 0
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
