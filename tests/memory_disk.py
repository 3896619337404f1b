"""A stand-in for the disk tier in tests of policy: a dictionary, and whatever a block's data hold."""

from typing import Any

from jaxserve.disk_tier import Arrival
from jaxserve.host_tier import Block, sizes


class MemoryDisk:
    """What ``disk_tier.DiskTier`` does, at once and in memory."""

    def __init__(self, capacity: int, kept: dict[bytes, Any]):
        self.capacity, self.kept = capacity, kept
        self.reading: set[bytes] = set()
        self.asked: list[tuple[bytes, ...]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self.kept

    def save(self, block: Block, numbers: list[int]) -> bool:
        if block.data is None:
            return False
        for number in numbers:
            self.kept[block.keys[number]] = block.data[number]
            while len(self.kept) > self.capacity:
                del self.kept[next(iter(self.kept))]
        return True

    def fetch(self, keys: list[bytes]) -> None:
        self.reading.update(keys)
        self.asked.append(tuple(keys))

    def arrived(self) -> list[Arrival]:
        found = []
        for keys in self.asked:
            there = [key for key in keys if key in self.kept]
            there = list(keys[: len(there)]) if there == list(keys[: len(there)]) else []
            blocks, start = [], 0
            for size in sizes(len(there)):
                part = there[start : start + size]
                blocks.append((part, [self.kept[key] for key in part]))
                start += size
            found.append(Arrival(keys, blocks))
        self.asked.clear()
        self.reading.clear()
        return found
