"""What an engine, or a person, says to an owner: one connection, whose end tells each of the other's."""

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

from jaxserve.sidecar import wire
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.layout import Layout
from jaxserve.sidecar.place import Place, silent

ANSWER_SECONDS = 30.0
HELLO_SECONDS = 5.0
"""What the first answer may take: an owner that hangs is not worth a longer wait."""


class Sidecar:
    """A connection to an owner; a context manager. Every method may be called from any thread.

    Raises ``SidecarError`` everywhere: ``gone`` where nobody is there, ``silent`` where an owner does not answer,
    else what the owner says.
    """

    def __init__(self, place: Place, what: str):
        self._what, self._lock = what, threading.Lock()
        self._watcher: threading.Thread | None = None
        self.gone = self._closed = False
        self.socket_path = place.socket_path
        self._socket = place.connect()
        try:
            self.about = self._hello(HELLO_SECONDS)
        except SidecarError as error:
            pid, _ = wire.peer(self._socket)
            self._socket.close()
            if error.code == "silent":
                text = f"{silent(pid or None)} in {HELLO_SECONDS:g} s; `jaxserve sidecar stop --kill` ends it"
                raise SidecarError(text, "silent") from None
            raise
        except BaseException:
            self._socket.close()
            raise

    def _call(self, op: str, seconds: float = ANSWER_SECONDS, **fields: Any) -> tuple[wire.Message, list[int]]:
        with self._lock:
            if self.gone:
                raise SidecarError("the sidecar is gone", "gone")
            try:
                return wire.call(self._socket, {"op": op, **fields}, seconds)
            except SidecarError as error:
                if error.code in ("gone", "silent"):  # half a conversation cannot be gone on with
                    with contextlib.suppress(OSError):
                        self._socket.shutdown(socket.SHUT_RDWR)
                raise

    def _ask(self, op: str, seconds: float = ANSWER_SECONDS, **fields: Any) -> wire.Message:
        reply, descriptors = self._call(op, seconds, **fields)
        for fd in descriptors:
            os.close(fd)
        return reply

    def _hello(self, seconds: float = ANSWER_SECONDS) -> wire.Message:
        about = self._ask("hello", seconds, protocol=wire.PROTOCOL, what=self._what)
        if about.get("protocol") != wire.PROTOCOL or not isinstance(about.get("models"), list):
            raise SidecarError(f"the sidecar speaks another protocol than {wire.PROTOCOL}", "unsupported")
        return about

    @property
    def pid(self) -> int:
        return self.about["pid"]

    def offers(self) -> list[dict[str, Any]]:
        """The models there are: id, name, role, path, state, done, total, error, key, files, arenas."""
        return self._hello()["models"]

    def status(self) -> dict[str, Any]:
        return self._ask("status")

    def load(self, path: str, dtype: str, tensor_parallel: int, role: str = "target", name: str = "") -> dict[str, Any]:
        """Have the owner load a checkpoint, unless it has it; returns at once: id, name, state, done, total."""
        return self._ask("load", path=path, dtype=dtype, tensor_parallel=tensor_parallel, role=role, name=name)

    def attach(self, model_id: str) -> tuple[Layout, list[int]]:
        """The model's manifest and a descriptor an arena, the caller's to close; in use until this is closed.

        ``loading`` is the error before it is ready, with ``done`` and ``total`` in bytes in its facts.
        """
        reply, descriptors = self._call("attach", id=model_id)
        try:
            layout = Layout.from_json(reply.get("manifest"))
            if len(descriptors) != len(layout.arenas):
                raise SidecarError(f"the sidecar sent {len(descriptors)} descriptors for {len(layout.arenas)} arenas")
            return layout, descriptors
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise

    def pool(self, identity: str, index_bytes: int, records_bytes: int) -> tuple[int, int]:
        """Memory for the KV pages of this identity: descriptors of an index and of records, the caller's to close.

        Both are files in memory, empty at first, and then as their last user left them. Whoever has them may make them
        as long as it asked for here. They are this process's alone until the connection ends: ``busy`` where another
        has them, ``memory`` where the host has not got the bytes.
        """
        _, descriptors = self._call("pool", identity=identity, index_bytes=index_bytes, records_bytes=records_bytes)
        if len(descriptors) != 2:
            for fd in descriptors:
                os.close(fd)
            raise SidecarError(f"the sidecar sent {len(descriptors)} descriptors for a pool")
        return descriptors[0], descriptors[1]

    def evict(self, name: str, *, force: bool = False) -> int:
        """Have the owner let go of a model (by name, id or path) or a pool; the bytes it had."""
        return self._ask("evict", name=name, force=force)["bytes"]

    def verify(self, name: str) -> list[str]:
        """Have the owner hash a model again: the names of tensors that are not what was loaded."""
        return self._ask("verify", seconds=3600.0, name=name)["damaged"]

    def stop(self) -> None:
        """End the owner. What engines have mapped stays theirs."""
        self._ask("stop")

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call ``on_gone`` once, on a thread of its own, when the owner ends before ``close``."""

        def wait() -> None:
            poll = select.poll()
            poll.register(self._socket, select.POLLRDHUP)
            poll.poll()
            if not self._closed:
                self.gone = True
                on_gone()

        self._watcher = threading.Thread(target=wait, name="jaxserve-sidecar", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
