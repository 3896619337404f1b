"""Frames between owner and client: four bytes of length (big-endian) and a JSON object; descriptors go beside a reply.

Whatever comes in is data: nothing is unpickled, a length beyond the limit ends the connection before anything is kept
of it, and JSON that is none is an error.
"""

import array
import contextlib
import json
import os
import socket
import struct
import time
from typing import Any

from jaxserve.sidecar.errors import SidecarError

PROTOCOL = 1
HEADER = struct.Struct(">I")
CREDENTIALS = struct.Struct("iII")
"""Users are unsigned: those of containers go beyond 2^31."""
MAX_REQUEST = 64 << 10
MAX_REPLY = 64 << 20
MAX_DESCRIPTORS = 64
"""In one reply: an arena a device, or the two of a KV pool."""

Message = dict[str, Any]


def encode(message: Message, limit: int = MAX_REPLY) -> bytes:
    """A frame. Raises ``SidecarError`` where it is longer than ``limit``."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(body) > limit:
        raise SidecarError(f"a message of {len(body)} bytes is longer than {limit}", "invalid")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The object in a frame's body. Raises ``SidecarError`` for anything else."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SidecarError(f"not a JSON object: {type(error).__name__}", "invalid") from None
    if not isinstance(message, dict):
        raise SidecarError(f"not a JSON object but a {type(message).__name__}", "invalid")
    return message


class Frames:
    """Puts frames together from pieces as they arrive."""

    def __init__(self, limit: int = MAX_REQUEST):
        self.limit = limit
        self.begun: float | None = None
        """When the first byte of an unfinished frame came (``time.monotonic``); None between frames."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are now whole. Raises ``SidecarError`` where a frame is longer than the limit."""
        self._buffer += data
        whole = []
        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            if size > self.limit:
                raise SidecarError(f"a frame of {size} bytes is longer than {self.limit}", "invalid")
            if len(self._buffer) < HEADER.size + size:
                break
            whole.append(bytes(self._buffer[HEADER.size : HEADER.size + size]))
            del self._buffer[: HEADER.size + size]
            self.begun = None
        if self._buffer and self.begun is None:
            self.begun = time.monotonic()
        return whole


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end, as the kernel knows them."""
    return credentials(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))


def credentials(ucred: bytes) -> tuple[int, int]:
    """Process and user of the kernel's ``struct ucred``."""
    pid, uid, _ = CREDENTIALS.unpack(ucred)
    return pid, uid


def call(sock: socket.socket, message: Message, seconds: float) -> tuple[Message, list[int]]:
    """Send a request and wait for its reply and the descriptors beside it (the caller's to close).

    Raises ``SidecarError``: what the owner answered, ``silent`` where it has not answered whole within ``seconds``, or
    ``gone``.
    """
    deadline = time.monotonic() + seconds
    descriptors: list[int] = []
    try:
        sock.settimeout(seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # why it hung up may be there to be read
            sock.sendall(encode(message, MAX_REQUEST))
        frames = Frames(MAX_REPLY)
        bodies: list[bytes] = []
        while not bodies:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            bodies = frames.feed(_receive(sock, descriptors))
        reply = decode(bodies[0])
        if reply.get("ok") is not True:
            text, code = reply.get("message"), reply.get("error")
            raise SidecarError(
                f"the sidecar says: {text}", code if isinstance(code, str) else "failed", reply.get("facts")
            )
    except BaseException as error:
        for fd in descriptors:
            os.close(fd)
        if isinstance(error, OSError):
            if isinstance(error, TimeoutError):
                raise SidecarError(f"the sidecar gave no answer in {seconds:g} s", "silent") from None
            raise SidecarError(f"the sidecar is gone: {error}", "gone") from None
        raise
    return reply, descriptors


def _receive(sock: socket.socket, descriptors: list[int]) -> bytes:
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    data, beside, flags, _ = sock.recvmsg(1 << 20, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found = array.array("i")
            found.frombytes(content[: len(content) // found.itemsize * found.itemsize])
            descriptors.extend(found)
    if flags & socket.MSG_CTRUNC:
        raise ConnectionError("more descriptors than expected")
    if not data:
        raise ConnectionError("the connection ended")
    return data


def send_some(sock: socket.socket, data: memoryview, descriptors: list[int]) -> int:
    """Send what a non-blocking socket takes, the descriptors with the first byte; how much that was (0: it is full)."""
    with contextlib.suppress(BlockingIOError, InterruptedError):
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            return sock.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
        return sock.send(data, socket.MSG_NOSIGNAL)
    return 0
