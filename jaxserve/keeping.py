"""At the end of an engine: bring what its tiers hold to the stores, the last used first, as far as time allows."""

import logging
import time
from itertools import islice

from jaxserve.host_tier import Block, HostTier, Spill, sizes
from jaxserve.prefix_cache import PrefixCache
from jaxserve.runner import Runner
from jaxserve.store_tier import StoreTier

log = logging.getLogger(__name__)

SECONDS = 20.0
"""For writing when an engine closes."""


def keep(cache: PrefixCache, runner: Runner | None, seconds: float = SECONDS) -> None:
    """Write kept pages and host records to the stores, and close them. The engine's loop must have ended.

    ``runner`` None stands for a device that has failed: then there is nothing to bring.
    """
    tier, stores = cache.tier, cache.stores
    if tier is None or stores is None:
        return
    stores.stop()
    left = 0 if runner is None else _write(cache, tier, stores, runner, time.monotonic() + seconds)
    stores.close()
    if left:
        log.warning("%d KV pages were not kept: writing took longer than %.0f s", left, seconds)


def _write(cache: PrefixCache, tier: HostTier, stores: StoreTier, runner: Runner, deadline: float) -> int:
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
        stores.write(block, range(size))
    for block in reversed(tier.blocks()):
        if time.monotonic() > deadline:
            left += block.live
        elif block.data is not None:
            stores.write(block, tier.live(block))
    return left
