"""The owner process: one thread that answers clients, and threads that load. It trusts nobody but its own user.

A client that sends too much, too slowly, or nothing that makes sense costs a bounded buffer and is let go.
"""

import argparse
import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxserve import __version__
from jaxserve.sidecar import wire
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.holdings import Client, Holdings, Wish
from jaxserve.sidecar.place import Place

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
SPARE_CONNECTIONS = 4
"""Beyond those: for a person who wants to see what there is, or to end it, and not for longer than a hello may take."""
SPARE_OPERATIONS = ("hello", "status", "evict", "stop")
FRAME_SECONDS = 5.0
"""What a frame may take from its first byte to its last."""
HELLO_SECONDS = 10.0
"""How long a connection may say nothing; once it has said hello it may stay."""
WRITE_SECONDS = 10.0
"""How long a client may leave a reply unread."""
MAX_UNREAD = 1 << 20
"""Bytes of replies a client may leave unread before its requests wait."""
SOCKET_SECONDS = 2.0
"""How often it looks whether its socket and its lock are still there."""
AT_ONCE = 32
"""Requests of one client that are answered before others have their turn."""
MAX_TEXT = 4096
MAX_SIZE = 1 << 50

Reply = tuple[wire.Message, list[int]]


class Connection:
    """One client's socket, with what came and what is to go."""

    def __init__(self, sock: socket.socket, pid: int):
        self.sock, self.client = sock, Client(pid)
        self.frames = wire.Frames()
        self.requests: deque[bytes] = deque()
        self.replies: deque[tuple[memoryview, list[int]]] = deque()
        self.unread = 0
        self.begun = self.moved = time.monotonic()
        self.greeted = False
        self.waiting = False
        """For a thread to finish its request."""
        self.closing = False
        """When all replies have gone."""
        self.spare = False


class Owner:
    """Serves one device group until it is told to stop. ``uid`` is whom it answers."""

    def __init__(self, place: Place, holdings: Holdings, *, uid: int | None = None):
        self.place, self.holdings = place, holdings
        self.uid = os.geteuid() if uid is None else uid
        self.since = time.time()
        self.bad_frames = 0
        self.stopping = False
        self._connections: set[Connection] = set()
        self._locks: list[int] = []
        """Those taken after the first one's file was removed."""
        self._cut_off = False
        self._behind: set[Connection] = set()
        """Those with requests that others went before."""
        self._selector = selectors.DefaultSelector()
        self._done: deque[tuple[Connection, Reply]] = deque()
        self._helper = ThreadPoolExecutor(1, "jaxserve-verify")
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._operations: dict[str, Callable[[Connection, wire.Message], Reply | None]] = {
            "hello": self._hello,
            "status": self._status,
            "load": self._load,
            "attach": self._attach,
            "pool": self._pool,
            "evict": self._evict,
            "verify": self._verify,
            "stop": self._stop,
        }

    def serve(self) -> None:
        """Answer until stopped. The caller holds the place's lock."""
        self._listen()
        try:
            self._selector.register(self._wake_in, selectors.EVENT_READ, self._woken)
            log.info("the sidecar of group %s runs as process %d", self.place.group, os.getpid())
            while not self.stopping or self._last_words():
                for key, events in self._selector.select(0 if self._behind else 0.5):
                    if isinstance(key.data, Connection):
                        try:
                            self._serve_one(key.data, events)
                        except Exception:  # one client's trouble is no other's
                            log.exception("a connection failed")
                            self._close(key.data)
                    else:
                        key.data(key.fileobj)
                for connection in list(self._behind):
                    self._behind.discard(connection)
                    self._work(connection)
                self._expire()
                self._look()
            if self.place.holder() in (None, os.getpid()):
                self.place.forget()
        finally:
            self._listener.close()
        for connection in list(self._connections):
            self._close(connection)
        self._selector.close()
        for fd in (self._wake_in, self._wake_out, *self._locks):
            os.close(fd)
        log.info("the sidecar of group %s has ended", self.place.group)

    def stop(self, *_: object) -> None:
        """May be called by a signal or another thread."""
        self.stopping = True
        self._wake()

    def _listen(self) -> None:
        self._listener = self.place.listen()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._looked = time.monotonic()

    def _look(self) -> None:
        """Make the socket again where somebody has cleaned it away, and the lock likewise."""
        if self.stopping or time.monotonic() - self._looked < SOCKET_SECONDS:
            return
        self._looked = time.monotonic()
        if self._cut_off or (self.place.visible() and self.place.holder() == os.getpid()):
            return
        try:
            if self.place.holder() is None and (lock := self.place.lock()) is not None:
                self._locks.append(lock)
            if self.place.holder() != os.getpid():
                raise OSError("another sidecar has taken its place")
            before = self._listener
            self._listen()
        except OSError as error:
            self._cut_off = True
            log.warning(
                "the socket %s, or its lock, is gone and cannot be made again: %s", self.place.socket_path, error
            )
            return
        self._selector.unregister(before)
        before.close()
        log.warning("the socket %s, or its lock, was gone; it is there again", self.place.socket_path)

    def _last_words(self) -> bool:
        return any(c.replies and time.monotonic() - c.moved < 1.0 for c in self._connections)

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b"\0")
        except OSError:
            return  # it is awake, or over

    def _woken(self, pipe: Any) -> None:
        os.read(pipe, 4096)
        while self._done:
            connection, (reply, descriptors) = self._done.popleft()
            connection.waiting = False
            if connection in self._connections:
                self._answer(connection, reply, descriptors)
                self._work(connection)

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, listener: Any) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # it has gone again, or there are no descriptors left
            return
        sock.setblocking(False)
        pid, uid = wire.peer(sock)
        if uid != self.uid or len(self._connections) >= MAX_CONNECTIONS + SPARE_CONNECTIONS:
            why = "this sidecar answers its own user only" if uid != self.uid else "too many connections"
            code = "refused" if uid != self.uid else "busy"
            with sock, contextlib.suppress(OSError):  # it may have gone
                wire.send_some(sock, memoryview(wire.encode(_error(SidecarError(why, code)))), [])
            return
        connection = Connection(sock, pid)
        connection.spare = len(self._connections) >= MAX_CONNECTIONS
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve_one(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(connection)
        if events & selectors.EVENT_READ and connection in self._connections:
            try:
                data = connection.sock.recv(wire.MAX_REQUEST)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close(connection)
                return
            if connection.closing:
                return  # what a client says after it was told off
            try:
                connection.requests += connection.frames.feed(data)
            except SidecarError as error:
                self.bad_frames += 1
                connection.closing = True
                self._answer(connection, _error(error))
                return
        self._work(connection)

    def _work(self, connection: Connection) -> None:
        """Answer what has come, as long as the replies are read."""
        for _ in range(AT_ONCE):
            if not self._can_work(connection):
                break
            reply = self._handle(connection, connection.requests.popleft())
            if reply is not None:
                self._answer(connection, *reply)
        if self._can_work(connection):
            self._behind.add(connection)
        self._listen_to(connection)

    def _can_work(self, connection: Connection) -> bool:
        idle = not connection.waiting and connection.unread < MAX_UNREAD
        return connection in self._connections and bool(connection.requests) and idle

    def _handle(self, connection: Connection, body: bytes) -> Reply | None:
        try:
            message = wire.decode(body)
            name = _text(message, "op")
            operation = self._operations.get(name)
            if operation is None:
                raise SidecarError(f"op: known are {', '.join(self._operations)}", "invalid")
            if connection.spare and name not in SPARE_OPERATIONS:
                if sum(not c.spare for c in self._connections) >= MAX_CONNECTIONS:
                    raise SidecarError("too many connections", "busy")
                connection.spare = False
            return operation(connection, message)
        except SidecarError as error:
            self.bad_frames += error.code == "invalid"
            return _error(error), []
        except Exception as error:
            log.exception("a request failed")
            return _error(SidecarError(f"{type(error).__name__}: {error}"[:MAX_TEXT])), []

    def _answer(self, connection: Connection, reply: wire.Message, descriptors: Sequence[int] = ()) -> None:
        try:
            data = wire.encode(reply)
        except SidecarError as error:
            data = wire.encode(_error(error))
        if not connection.replies:
            connection.moved = time.monotonic()
        # Its own descriptors: what is evicted before they have gone might be another file by then.
        connection.replies.append((memoryview(data), [os.dup(fd) for fd in descriptors]))
        connection.unread += len(data)
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        try:
            while connection.replies:
                data, descriptors = connection.replies[0]
                sent = wire.send_some(connection.sock, data, descriptors)
                if not sent:
                    break
                _close_all(descriptors)
                connection.moved = time.monotonic()
                connection.unread -= sent
                if sent == len(data):
                    connection.replies.popleft()
                else:
                    connection.replies[0] = (data[sent:], [])
        except OSError:
            self._close(connection)
            return
        if connection.closing and not connection.replies:
            self._close(connection)
            return
        self._listen_to(connection)

    def _listen_to(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        held_back = connection.unread >= MAX_UNREAD or connection.waiting or bool(connection.requests)
        events = 0 if held_back else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if connection.replies else 0
        try:
            known = self._selector.get_key(connection.sock)
        except KeyError:
            known = None
        if not events:
            if known is not None:
                self._selector.unregister(connection.sock)
        elif known is None:
            self._selector.register(connection.sock, events, connection)
        elif known.events != events:
            self._selector.modify(connection.sock, events, connection)

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections):
            begun = connection.frames.begun
            held_back = bool(connection.requests) or connection.waiting
            slow = begun is not None and not held_back and now - begun > FRAME_SECONDS
            silent = not connection.greeted and now - connection.begun > HELLO_SECONDS
            deaf = bool(connection.replies) and now - connection.moved > WRITE_SECONDS
            late = connection.spare and now - connection.begun > HELLO_SECONDS
            if slow or silent or deaf or late:
                self.bad_frames += 1
                self._close(connection)

    def _close(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        for _, descriptors in connection.replies:
            _close_all(descriptors)
        self.holdings.leave(connection.client)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _hello(self, connection: Connection, message: wire.Message) -> Reply:
        protocol = message.get("protocol")
        if protocol != wire.PROTOCOL:
            raise SidecarError(f"protocol {wire.PROTOCOL} is spoken here", "invalid", {"protocol": wire.PROTOCOL})
        connection.client.what = _text(message, "what", "", 200)
        connection.greeted = True
        return {**self._about(), "models": self.holdings.offers()}, []

    def _about(self) -> wire.Message:
        return {
            "ok": True,
            "protocol": wire.PROTOCOL,
            "version": __version__,
            "pid": os.getpid(),
            "group": self.place.group,
            "since": round(self.since, 3),
        }

    def _status(self, connection: Connection, message: wire.Message) -> Reply:
        more = {
            "connections": [c.client.as_json() for c in self._connections],
            "bad_frames": self.bad_frames,
            "log": str(self.place.log_path),
        }
        return {**self._about(), **more, **self.holdings.status()}, []

    def _load(self, connection: Connection, message: wire.Message) -> Reply:
        path = _text(message, "path")
        if not os.path.isabs(path):
            raise SidecarError("path must be absolute", "invalid")
        wish = Wish(
            path,
            _text(message, "dtype", "auto", 20),
            _count(message, "tensor_parallel", 1, 64),
            _text(message, "role", "target", 20),
            _text(message, "name", "", 100),
        )
        if wish.role not in ("target", "draft"):
            raise SidecarError("role must be target or draft", "invalid")
        model = self.holdings.load(wish)
        return {"ok": True, **model.as_json()}, []

    def _attach(self, connection: Connection, message: wire.Message) -> Reply:
        loaded = self.holdings.attach(_text(message, "id", limit=100), connection.client)
        return {"ok": True, "manifest": loaded.layout.as_json()}, list(loaded.arenas.descriptors)

    def _pool(self, connection: Connection, message: wire.Message) -> Reply:
        index, records = (_count(message, name, 1, MAX_SIZE) for name in ("index_bytes", "records_bytes"))
        pool = self.holdings.pool(_text(message, "identity", limit=200), index, records, connection.client)
        return {"ok": True, "bytes": pool.used}, [pool.index, pool.records]

    def _evict(self, connection: Connection, message: wire.Message) -> Reply:
        force = message.get("force", False)
        if not isinstance(force, bool):
            raise SidecarError("force must be true or false", "invalid")
        return {"ok": True, "bytes": self.holdings.evict(_text(message, "name"), force=force)}, []

    def _verify(self, connection: Connection, message: wire.Message) -> None:
        """Answered later: hashing takes a while."""
        loaded = self.holdings.ready(_text(message, "name"))
        connection.waiting = True

        def check() -> None:
            from jaxserve.sidecar import loading

            try:
                reply: wire.Message = {"ok": True, "damaged": loading.verify(loaded)}
            except Exception as error:
                reply = _error(SidecarError(f"{type(error).__name__}: {error}"[:MAX_TEXT]))
            self._done.append((connection, (reply, [])))
            self._wake()

        self._helper.submit(check)

    def _stop(self, connection: Connection, message: wire.Message) -> Reply:
        self.stopping = True
        return {"ok": True, "pid": os.getpid()}, []


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _error(error: SidecarError) -> wire.Message:
    return {"ok": False, "error": error.code, "message": str(error), "facts": error.facts}


def _text(message: wire.Message, name: str, default: str | None = None, limit: int = MAX_TEXT) -> str:
    value = message.get(name, default)
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise SidecarError(f"{name} must be a text of at most {limit} printable characters", "invalid")
    return value


def _count(message: wire.Message, name: str, low: int, high: int) -> int:
    value = message.get(name, low)
    if type(value) is not int or not low <= value <= high:
        raise SidecarError(f"{name} must be an integer from {low} to {high}", "invalid")
    return value


def run(place: Place, uuids: Sequence[str], wishes: Sequence[Wish] = ()) -> int:
    """Own a device group in this process until it is stopped, and load ``wishes``; 1 where another process owns it."""
    lock = place.lock()
    if lock is None:
        log.error("a sidecar runs already at %s", place.socket_path)
        return 1

    def backend() -> Any:
        from jaxserve.sidecar import backends

        return backends.backend(uuids)

    def free() -> int:
        from jaxserve import memory

        return memory.host().free

    owner = Owner(place, Holdings(backend, free))
    for wish in wishes:
        owner.holdings.load(wish)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, owner.stop)
    try:
        owner.serve()
    finally:
        logging.shutdown()
        if sys.exc_info()[0] is None:
            os._exit(0)  # a load that is under way is nobody's any more
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """What ``start.spawn`` runs in a process of its own."""
    parser = argparse.ArgumentParser(prog="jaxserve-sidecar")
    parser.add_argument("--folder")
    parser.add_argument("--group", required=True)
    parser.add_argument("--uuid", action="append", default=[])
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with Place(parsed.folder, parsed.group, create=True) as place:
        return run(place, parsed.uuid)
