"""Where an owner is found: a private folder with a socket, a lock and a log for each group of devices."""

import contextlib
import fcntl
import os
import re
import socket
import stat
import tempfile
from pathlib import Path

from jaxserve.sidecar import wire
from jaxserve.sidecar.errors import SidecarError

_GROUP = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


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
        """A connection to the owner. Raises ``SidecarError``: ``gone``, or ``refused`` where it is another user's."""
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
        except OSError as error:
            sock.close()
            raise SidecarError(
                f"no sidecar answers at {self.socket_path} ({error.strerror or error}): it has died", "gone"
            ) from None
        except BaseException:
            sock.close()
            raise

    def lock(self) -> int | None:
        """The group's lock, held by the descriptor until it is closed; None where another process holds it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(f"sidecar-{self.group}.lock", flags, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd

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
    return sorted(found.name.removeprefix("sidecar-").removesuffix(".sock") for found in path.glob("sidecar-*.sock"))
