"""The truth of the resolver, in jnp.

Of each row a map over the positions of its sequence says which slot holds a position, or which entry asked for it
first: one scatter from the slots, one from the entries, one gather. Its size is the context's, whatever was chosen;
nothing is sorted and nothing compared pairwise.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.resolver.plan import Hot, Plan

NOBODY = jnp.iinfo(jnp.int32).max


def resolve(
    positions: jax.Array,
    pages: jax.Array,
    frames: jax.Array,
    regions: jax.Array,
    hot: Hot,
    *,
    page_size: int,
    first: int,
) -> tuple[Plan, Hot]:
    """The plan for what was chosen, and what the regions hold after it (see the package)."""
    rows, queries, top_k = positions.shape
    count, slots = hot.held.shape
    fresh = regions < -1
    number = jnp.where(fresh, -2 - regions, regions)
    owned = (number >= 0) & (number < count)
    here = jnp.where(owned, number, 0)
    index = jnp.where(fresh[:, None], -1, hot.held[here])
    lru = jnp.where(fresh[:, None], jnp.arange(slots), hot.lru[here])
    one = jax.vmap(partial(_resolve_row, page_size=page_size))
    flat = positions.reshape(rows, queries * top_k)
    plan, index, lru = one(flat, pages, frames, owned, first + here * slots, index, lru)
    back = jnp.where(owned, number, count + jnp.arange(rows))  # rows without a region: beyond all, dropped
    hot = Hot(*(old.at[back].set(new, mode="drop") for old, new in zip(hot, (index, lru), strict=True)))
    return plan._replace(rows=plan.rows.reshape(positions.shape)), hot


def _resolve_row(
    position: jax.Array,
    pages: jax.Array,
    frames: jax.Array,
    owned: jax.Array,
    first: jax.Array,
    index: jax.Array,
    lru: jax.Array,
    *,
    page_size: int,
) -> tuple[Plan, jax.Array, jax.Array]:
    """One row: ``position [M]``, ``pages`` and ``frames [W]``, whether it has a region and where that begins,
    ``index`` and ``lru`` ``[B]``, which are returned as they are afterwards."""
    entries, slots, span = len(position), len(index), len(pages) * page_size
    entry, slot = jnp.arange(entries), jnp.arange(slots)
    real = (position >= 0) & (position < span)
    safe = jnp.where(real, position, 0)
    page, offset = safe // page_size, safe % page_size
    resident = real & (frames[page] >= 0)
    wanted = real & ~resident & owned

    held = (index >= 0) & (index < span)
    who = jnp.full(span, NOBODY)  # of each position: its slot - B, or the first entry that wants it
    who = who.at[jnp.where(held, index, span + slot)].set(slot - slots, mode="drop", unique_indices=True)
    who = who.at[jnp.where(wanted, position, span)].min(entry, mode="drop")
    found = who[safe]
    hit, missing = wanted & (found < 0), wanted & (found == entry)

    is_hit = jnp.zeros(slots, bool).at[jnp.where(hit, found + slots, slots)].set(True, mode="drop")
    hits = is_hit.sum(dtype=jnp.int32)
    number = jnp.cumsum(missing) - 1  # of a miss
    missing &= number < slots - hits
    misses = missing.sum(dtype=jnp.int32)
    hit_in_order = is_hit[lru]
    older = jnp.cumsum(~hit_in_order) - 1  # place among those that may be taken
    begin = slots - hits - misses  # of those that are filled
    unhit = jnp.where(older < misses, begin + older, older - misses)
    place = jnp.where(hit_in_order, slots - hits + jnp.cumsum(hit_in_order) - 1, unhit)
    lru = jnp.zeros_like(lru).at[place].set(lru, unique_indices=True)

    given = lru[jnp.clip(begin + number, 0, slots - 1)]
    asked = jnp.clip(found, 0, entries - 1)
    mine = jnp.where(hit, found + slots, given[asked])
    wanted &= hit | missing[asked]
    rows = jnp.where(resident, frames[page] * page_size + offset, jnp.where(wanted, first + mine, -1))
    index = index.at[jnp.where(missing, given, slots + entry)].set(position, mode="drop", unique_indices=True)
    at = jnp.where(missing, number, entries + entry)
    nothing = jnp.full(min(entries, slots), -1)
    sources = nothing.at[at].set(pages[page] * page_size + offset, mode="drop", unique_indices=True)
    targets = nothing.at[at].set(first + given, mode="drop", unique_indices=True)
    lost = ((position >= 0) & ~resident & ~wanted).sum(dtype=jnp.int32)
    return Plan(rows, sources, targets, hits, misses, lost), index, lru
