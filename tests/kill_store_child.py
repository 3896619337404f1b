"""Writers that are killed in the middle of it: argument 1 is a folder, 2 the number of rounds, 3 a seed.

Each round a forked process writes records to a store in memory and one on disk, evicting all the time, until it is
killed with SIGKILL. Then both are opened again: whatever their indexes name must be there, byte for byte, without a
checksum having to tell. Nothing here imports jax.
"""

import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from jaxserve.disk_store import open_store
from jaxserve.host_tier import Block
from jaxserve.record_store import STRIDE, RecordStore
from jaxserve.store_tier import StoreTier

SIZE = 300_000
RECORDS = 7
NAME = "cd" * 32


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def record(name: bytes) -> np.ndarray:
    return np.resize(np.frombuffer(name, np.uint8), SIZE)


def opened(index: int, records: int, folder: Path) -> tuple[RecordStore, RecordStore]:
    """Both stores; the memory's descriptors stay the caller's."""
    memory = RecordStore(
        "sidecar",
        os.dup(index),
        os.dup(records),
        identity=NAME,
        record_bytes=SIZE,
        capacity=RECORDS,
        place="memory",
        near=True,
    )
    return memory, open_store(folder, NAME, SIZE, RECORDS * 2 * (SIZE + STRIDE))


def write(stores: tuple[RecordStore, RecordStore], first: int, ready: int) -> None:
    """As an engine does it, for ever: blocks are queued for the thread that writes, and some are read back."""
    tier = StoreTier(stores, lambda array: array)
    number = first
    while True:
        keys = [key(number + i) for i in range(4)]
        tier.save(Block(keys, np.stack([record(one) for one in keys])), range(4))
        tier.fetch([key(random.randrange(number + 4))])
        tier.used([key(random.randrange(number + 4)) for _ in range(3)])
        while tier.pending > 3:
            time.sleep(0.0002)
        number += 4
        if number == first + 8:
            os.write(ready, b"!")


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(int(sys.argv[3]))
    index, records = os.memfd_create("index"), os.memfd_create("records")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())
    logging.getLogger("jaxserve").addHandler(handler)
    found = moved = 0
    before: set[bytes] = set()
    for number in range(rounds):
        stores = opened(index, records, folder)
        told, ready = os.pipe()
        child = os.fork()
        if not child:
            write(stores, number << 32, ready)
        for store in stores:
            store.close()
        os.close(ready)
        assert os.read(told, 1), "the writer has failed"
        os.close(told)
        time.sleep(random.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        stores = opened(index, records, folder)
        for store in stores:
            for name in list(store._slots):
                bytes_ = store.read(name)
                assert bytes_ is not None, (store.name, "a record was torn, and only its checksum said so", said)
                assert (bytes_ == record(name)).all(), (store.name, "a record's bytes are another's")
                found += 1
            assert store.counts.damaged == 0
        after = {name for store in stores for name in store._slots}
        moved += after != before
        before = after
        for store in stores:
            store.close()
    assert not said, said
    print(json.dumps({"rounds": rounds, "found": found, "moved": moved}))


if __name__ == "__main__":
    main()
