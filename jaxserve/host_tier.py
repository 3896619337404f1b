"""The second tier: KV pages that left the device, in host memory. Policy only; imports no jax.

A page is a record under its key (see ``prefix_cache``). Records that leave together lie in one block, which is what the
runner moves: it fills ``Block.data`` when it launches the step that was planned with the spill. Nothing waits for a
transfer: whoever restores a block depends on its data, and the device runs steps in order. Blocks go, the longest
unused first, when the budget is full.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SIZES = (16, 8, 4, 2, 1)
"""Records a block may hold."""


@dataclass(slots=True, eq=False)
class Block:
    """Records on the host. ``data`` is the runner's: an array ``[records, ...]``, None until the spill is launched."""

    keys: list[bytes]
    data: Any = None
    live: int = 0
    """Records that can still be asked for."""

    @property
    def ready(self) -> bool:
        """Whether the data have arrived."""
        return self.data is not None and bool(getattr(self.data, "is_ready", lambda: True)())

    @property
    def nbytes(self) -> int:
        return 0 if self.data is None else int(self.data.nbytes)


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


@dataclass(slots=True)
class HostTier:
    """Records of ``record_bytes`` each, ``budget_bytes`` in all."""

    budget_bytes: int
    record_bytes: int
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
    def usage(self) -> float:
        """Share of the room that is taken."""
        return self._records / self.capacity if self.capacity else 0.0

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def find(self, key: bytes) -> tuple[Block, int] | None:
        """The block that holds the record and its number there; the block counts as used."""
        found = self._where.get(key)
        if found is not None:
            self._blocks.move_to_end(found[0])
        return found

    def put(self, keys: Sequence[bytes]) -> list[Block]:
        """Blocks for new records, in order, with as many of them as there is room for at all."""
        blocks = []
        taken, room = 0, min(len(keys), self.capacity)
        for size in SIZES:
            while size <= room - taken:
                blocks.append(self._block(list(keys[taken : taken + size])))
                taken += size
        self.counts.refused += len(keys) - taken
        self.counts.spilled += taken
        return blocks

    def _block(self, keys: list[bytes]) -> Block:
        while self._records + len(keys) > self.capacity:
            oldest, _ = self._blocks.popitem(last=False)
            self.counts.dropped += oldest.live
            self._release(oldest)
        block = Block(keys)
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
