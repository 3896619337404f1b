"""At the end of an engine: bring what its tiers hold to the disk, the last used first, as far as time allows."""

import logging
import time
from itertools import islice

from jaxserve.disk_store import DiskStore
from jaxserve.disk_tier import write
from jaxserve.host_tier import Block, HostTier, Spill, sizes
from jaxserve.prefix_cache import PrefixCache
from jaxserve.runner import Runner

log = logging.getLogger(__name__)

SECONDS = 20.0
"""For writing when an engine closes."""


def keep(cache: PrefixCache, runner: Runner | None, seconds: float = SECONDS) -> None:
    """Write kept pages and host records to the disk tier, and close it. The engine's loop must have ended.

    ``runner`` None stands for a device that has failed: then there is nothing to bring.
    """
    tier, disk = cache.tier, cache.disk
    if tier is None or disk is None:
        return
    disk.stop()
    left = 0 if runner is None else _write(cache, tier, disk.store, runner, time.monotonic() + seconds)
    disk.store.close()
    if left:
        log.warning("%d KV pages were not kept: writing took longer than %.0f s", left, seconds)


def _write(cache: PrefixCache, tier: HostTier, store: DiskStore, runner: Runner, deadline: float) -> int:
    """Returns how many records there was no time for."""
    left = 0
    pages = cache.keepsakes()
    found = iter(pages.items())
    for size in sizes(len(pages)):
        some = dict(islice(found, size))
        if time.monotonic() > deadline:
            left += size
            continue
        block = Block(list(some))
        runner.spill(Spill(block, list(some.values())))
        write(store, block, range(size))
    for block in reversed(tier.blocks()):
        if time.monotonic() > deadline:
            left += block.live
        elif block.data is not None:
            write(store, block, tier.live(block))
    return left
