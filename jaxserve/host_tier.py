"""The second tier: KV pages that left the device, in host memory. Policy only; imports no jax.

A page is a record under its key (see ``prefix_cache``). Records that leave together lie in one block, which is what the
runner moves: it fills ``Block.data`` when it launches the step that was planned with the spill. Nothing waits for a
transfer: whoever restores a block depends on its data, and the device runs steps in order. Blocks go, the longest
unused first, when the budget is full; stores beneath may take them.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.records import checksum, checksums, nbytes, ready

log = logging.getLogger(__name__)

SIZES = (16, 8, 4, 2, 1)
"""Records a block may hold."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Block:
    """Records on the host. ``data`` is the runner's (see ``records``), None until the spill is launched."""

    keys: list[bytes]
    data: Any = None
    live: int = 0
    """Records that can still be asked for."""
    sums: list[int] | None = None
    """A checksum a record, where the tier has been told to take them."""
    source: str = "host"
    """Where it is used from: "host", or the store that it has come from and not been used since."""

    @property
    def ready(self) -> bool:
        """Whether the data have arrived."""
        return self.data is not None and ready(self.data)

    @property
    def nbytes(self) -> int:
        return 0 if self.data is None else nbytes(self.data)


def sizes(count: int) -> list[int]:
    """``count`` records as sizes of blocks."""
    found = []
    for size in SIZES:
        found += [size] * (count // size)
        count %= size
    return found


@dataclass(frozen=True, slots=True)
class Spill:
    """Copy ``pages`` from the device into ``block``, in this order."""

    block: Block
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy a block to the device: record i to ``pages[i]``, 0 where it is not wanted."""

    block: Block
    pages: list[int]


@dataclass(slots=True)
class Counts:
    """What has happened, in records."""

    spilled: int = 0
    restored: int = 0
    dropped: int = 0
    """Records that went for want of room."""
    refused: int = 0
    """Pages that could not be spilled at all."""
    damaged: int = 0
    """Records whose checksum was wrong."""


@dataclass(slots=True)
class HostTier:
    """Records of ``record_bytes`` each, ``budget_bytes`` in all.

    ``checked`` (for finding faults; it waits for transfers) compares a record with its checksum before it is used.
    ``below`` is offered each block that has to go, with the numbers of its records, and says whether it takes them.
    """

    budget_bytes: int
    record_bytes: int
    checked: bool = False
    below: Callable[[Block, list[int]], bool] = lambda block, numbers: False
    counts: Counts = field(default_factory=Counts)
    _where: dict[bytes, tuple[Block, int]] = field(default_factory=dict)
    _blocks: OrderedDict[Block, None] = field(default_factory=OrderedDict)
    _records: int = 0

    @property
    def capacity(self) -> int:
        """Records that fit."""
        return self.budget_bytes // self.record_bytes

    @property
    def records(self) -> int:
        """Records that room is taken by."""
        return self._records

    @property
    def nbytes(self) -> int:
        """Bytes that the blocks' data take."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def usage(self) -> float:
        """Share of the room that is taken."""
        return self._records / self.capacity if self.capacity else 0.0

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def find(self, key: bytes) -> tuple[Block, int] | None:
        """The block that holds the record and its number there; the block counts as used."""
        found = self._where.get(key)
        if found is None:
            return None
        if self.checked and not self._sound(*found):
            self.counts.damaged += 1
            log.error("a KV page in host memory is damaged; it is dropped and computed again")
            self.forget(key)
            return None
        self._blocks.move_to_end(found[0])
        return found

    def _sound(self, block: Block, number: int) -> bool:
        self.seal(block)
        return block.sums is None or block.sums[number] == checksum(block.data, number)

    def seal(self, block: Block) -> None:
        """Take the checksums of a block whose spill has been launched, if they are wanted and not taken yet."""
        if self.checked and block.sums is None and block.data is not None:
            block.sums = checksums(block.data)

    def put(self, keys: Sequence[bytes]) -> list[Block]:
        """Blocks for new records, in order, with as many of them as there is room for at all."""
        room = min(len(keys), self.capacity)
        left, blocks = list(keys[:room]), []
        for size in sizes(room):
            blocks.append(self._add(Block(left[:size])))
            del left[:size]
        self.counts.refused += len(keys) - room
        self.counts.spilled += room
        return blocks

    def adopt(self, keys: Sequence[bytes], data: Any, source: str) -> None:
        """Take records that have come from a store; as many as some block may hold, and not more than there is room
        for."""
        self._add(Block(list(keys), data, source=source))

    def blocks(self) -> list[Block]:
        """All of them, the longest unused first."""
        return list(self._blocks)

    def live(self, block: Block) -> list[int]:
        """Numbers of the block's records that can still be asked for."""
        return [number for number, key in enumerate(block.keys) if self._where.get(key) == (block, number)]

    def _add(self, block: Block) -> Block:
        keys = block.keys
        while self._records + len(keys) > self.capacity:
            oldest, _ = self._blocks.popitem(last=False)
            if not self.below(oldest, self.live(oldest)):
                self.counts.dropped += oldest.live
            self._release(oldest)
        for number, key in enumerate(keys):
            self.forget(key)
            self._where[key] = (block, number)
        block.live = len(keys)
        self._blocks[block] = None
        self._records += len(keys)
        return block

    def forget(self, key: bytes) -> None:
        """Drop a record; its block goes with its last one."""
        found = self._where.pop(key, None)
        if found is None:
            return
        block = found[0]
        block.live -= 1
        if block.live == 0:
            del self._blocks[block]
            self._release(block)

    def _release(self, block: Block) -> None:
        self._records -= len(block.keys)
        for number, key in enumerate(block.keys):
            if self._where.get(key) == (block, number):
                del self._where[key]

    def check(self) -> None:
        """Raise AssertionError unless the books agree and the budget is kept."""
        live = sum(block.live for block in self._blocks)
        records = sum(len(block.keys) for block in self._blocks)
        if live != len(self._where) or records != self._records or records > self.capacity:
            raise AssertionError(f"host tier: {live} live of {records} records, {len(self._where)} known")
        if any(block not in self._blocks or block.keys[i] != key for key, (block, i) in self._where.items()):
            raise AssertionError("host tier: a key leads to a block that is gone")
