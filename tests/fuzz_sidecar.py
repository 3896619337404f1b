"""Throw frames of every kind at a sidecar: ``python tests/fuzz_sidecar.py --frames 50000`` starts one and does so.

It must answer an honest client afterwards as fast as before, and have kept neither descriptors nor memory.
"""

import argparse
import array
import json
import os
import random
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from jaxserve.sidecar import wire  # noqa: E402
from jaxserve.sidecar.place import Place  # noqa: E402

OPERATIONS = ("hello", "status", "load", "attach", "pool", "evict", "verify")
FIELDS = ("path", "dtype", "tensor_parallel", "role", "name", "id", "identity", "index_bytes", "records_bytes", "force")
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, 10**300, 1.5, "", "x", "m1", "\ud800", "\0", "a" * 5000, "/nowhere", "/" * 4096),
    *([], {}, [[]], {"op": "stop"}, "../../etc/passwd", "target", "float32", 4096, "🦎", "\n\r\t", 1e308),
)


def body(rng: random.Random) -> bytes:
    """What stands in a frame."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        depth = rng.choice((5, 500, 20_000))
        return rng.choice((b"[" * depth, b'{"op":' * min(depth, 10_000), b"[" * depth + b"]" * depth))[: 64 << 10]
    if kind == 2:
        return rng.choice((b"", b"{}", b"[]", b"NaN", b'{"op":NaN}', b'"hello"', b"1" * 6000, b'{"op":"hello","op":1}'))
    message: dict[str, Any] = {"op": rng.choice((*OPERATIONS, *OPERATIONS, "", "Stop", 7, None, []))}
    if message["op"] == "hello" and rng.random() < 0.7:
        message["protocol"] = wire.PROTOCOL
    for name in rng.sample(FIELDS, rng.randrange(len(FIELDS))):
        message[name] = rng.choice(ODD)
    if message["op"] == "pool" and rng.random() < 0.3:
        message |= {"identity": f"p{rng.randrange(60)}", "index_bytes": 4096, "records_bytes": rng.choice((1, 1 << 20))}
    data = bytearray(json.dumps(message).encode())
    if kind == 3:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data[: 60 << 10])


def converse(place: Place, rng: random.Random, frames: int) -> int:
    """One connection: some frames, sent whole or in pieces, the replies read or not. How many were sent."""
    sock = place.connect()
    sent = 0
    try:
        sock.settimeout(0.05)
        reads = rng.random() < 0.9
        while sent < frames:
            content = body(rng)
            frame = wire.HEADER.pack(len(content)) + content
            sent += 1
            last = False
            if rng.random() < 0.02:
                frame, last = frame[: rng.randrange(len(frame))], True
            elif rng.random() < 0.02:
                frame, last = struct.pack(">I", rng.choice((65_537, 2**31, 2**32 - 1))) + content, True
            try:
                if rng.random() < 0.02:  # descriptors that nobody asked for
                    rights = array.array("i", [0, 1, 2])
                    sock.sendmsg([frame or b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                elif rng.random() < 0.1:
                    cut = rng.randrange(len(frame) + 1)
                    sock.sendall(frame[:cut])
                    sock.sendall(frame[cut:])
                else:
                    sock.sendall(frame)
                if reads and not last:
                    sock.recv(1 << 20)
            except (TimeoutError, OSError):
                break
            if last:
                break
    finally:
        sock.close()
    return sent


def state(pid: int) -> tuple[int, int]:
    """Descriptors and bytes of anonymous memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), int(text.split("RssAnon:")[1].split()[0]) * 1024


def fuzz(place: Place, frames: int, seed: int = 0) -> int:
    """Send at least so many frames; returns how many it were."""
    rng, sent = random.Random(seed), 0
    while sent < frames:
        sent += converse(place, rng, rng.choice((1, 5, 100)))
    return sent


def main() -> None:
    from jaxserve.sidecar.start import connect_or_start

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Place(folder + "/p", "cpu", create=True) as place,
        connect_or_start(place, [], "fuzz")[0] as sidecar,
    ):
        try:
            fuzz(place, 2000, seed=parsed.seed + 1)  # what is loaded once is loaded
            time.sleep(1)
            before, begun = state(sidecar.pid), time.monotonic()
            sent = fuzz(place, parsed.frames, parsed.seed)
            seconds = time.monotonic() - begun
            time.sleep(1)
            begun = time.monotonic()
            status = sidecar.status()
            print(f"{sent} frames in {seconds:.1f} s; answers in {(time.monotonic() - begun) * 1e3:.1f} ms")
            after = state(sidecar.pid)
            print(f"descriptors {before[0]} -> {after[0]}, anonymous memory {before[1]} -> {after[1]} bytes")
            print(f"{status['bad_frames']} bad frames, {len(status['pools'])} pools, {len(status['models'])} models")
        finally:
            sidecar.stop()


if __name__ == "__main__":
    main()
