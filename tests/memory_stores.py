"""A stand-in for the stores in tests of policy: dictionaries, and whatever a block's data hold."""

from collections.abc import Iterable
from typing import Any

from jaxserve.host_tier import Block, sizes
from jaxserve.store_tier import Arrival


class MemoryStores:
    """What ``store_tier.StoreTier`` does, at once and in memory.

    ``kept`` are the stores' contents by name, the fastest first; ``near`` says that the first is as quick as the host.
    """

    def __init__(self, capacity: int, *kept: tuple[str, dict[bytes, Any]], near: bool = False):
        self.capacity, self.kept, self.first_is_near = capacity, dict(kept), near
        self.reading: set[bytes] = set()
        self.asked: list[tuple[bytes, ...]] = []
        self.busy = False

    def __contains__(self, key: bytes) -> bool:
        return any(key in store for store in self.kept.values())

    keeps = __contains__

    def near(self, key: bytes) -> bool:
        return self.first_is_near and key in next(iter(self.kept.values()))

    def used(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for store in self.kept.values():
                if key in store:
                    store[key] = store.pop(key)

    def save(self, block: Block, numbers: Iterable[int]) -> bool:
        if block.data is None:
            return False
        for number in numbers:
            for number_of_store, store in enumerate(self.kept.values()):
                store.setdefault(block.keys[number], block.data[number])
                while len(store) > self.capacity * (number_of_store + 1):  # what is slower has more room
                    del store[next(iter(store))]
        return True

    def fetch(self, keys: list[bytes]) -> None:
        self.reading.update(keys)
        self.asked.append(tuple(keys))

    def arrived(self) -> list[Arrival]:
        found = []
        for keys in self.asked:
            blocks = []
            there = next((i for i, key in enumerate(keys) if key not in self), len(keys))
            start = 0
            for size in sizes(there):
                part = list(keys[start : start + size])
                blocks.append((part, [self._find(key)[1] for key in part], self._find(part[0])[0]))
                start += size
            found.append(Arrival(keys, blocks))
        self.asked.clear()
        self.reading.clear()
        return found

    def _find(self, key: bytes) -> tuple[str, Any]:
        return next((name, store[key]) for name, store in self.kept.items() if key in store)
