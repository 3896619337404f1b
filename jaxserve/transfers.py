"""Pages on the move: from one place to another, and to records in host memory and back. Pure functions over all planes.

A record is one page of all planes, the same for any number of devices. Records that travel together are a block: for
each distinct kind of array in the planes (``CacheSpec.kinds``) an array ``[N, arrays of this kind, ...]``.
"""

import jax
import jax.numpy as jnp

from jaxserve.cache_spec import CacheSpec, HeadPages, Pages

KV = list[tuple[jax.Array, ...]]
Block = tuple[jax.Array, ...]


def copy_pages(kv: KV, pairs: jax.Array) -> KV:
    """Every plane's pages ``pairs[0]`` copied to ``pairs[1]``, int32 ``[2, C]``; all are read before any is written."""
    source, target = pairs
    return [tuple(pages.at[target].set(pages[source]) for pages in plane) for plane in kv]


def spill_pages(cache: CacheSpec, size: int, kv: KV, pages: jax.Array) -> Block:
    """Pages int32 ``[N]``, of ``size`` tokens, as a block of N records."""

    def rows(kind: Pages, array: jax.Array) -> jax.Array:
        if isinstance(kind, HeadPages) and not kind.plain:
            return array[pages][:, :, _out(kind)].reshape(len(pages), -1)
        return array.reshape(len(array), -1)[pages]  # a page as one row: XLA's CPU code copies long rows best

    def stack(kind: Pages) -> jax.Array:
        found = jnp.stack([rows(kind, array) for array in _arrays(cache, kv, kind)], axis=1)
        return found.reshape(len(pages), found.shape[1], *kind.record(size))

    return tuple(stack(kind) for kind in cache.kinds)


def restore_pages(cache: CacheSpec, kv: KV, block: Block, pages: jax.Array) -> KV:
    """Write the records of a block to pages int32 ``[N]``."""
    sources = {}
    for kind, records in zip(cache.kinds, block, strict=True):
        if isinstance(kind, HeadPages) and not kind.plain:
            records = jax.device_put(records, jax.memory.Space.Device)[:, :, :, _back(kind)]
        records = records.reshape(*records.shape[:2], -1)
        sources[kind] = iter([records[:, i] for i in range(records.shape[1])])

    def write(array: jax.Array, rows: jax.Array) -> jax.Array:
        return array.reshape(len(array), -1).at[pages].set(rows, mode="promise_in_bounds").reshape(array.shape)

    return [
        tuple(write(array, next(sources[kind])) for kind, array in zip(kinds, plane, strict=True))
        for kinds, plane in zip(cache.planes, kv, strict=True)
    ]


def _arrays(cache: CacheSpec, kv: KV, wanted: Pages) -> list[jax.Array]:
    return [
        array
        for kinds, plane in zip(cache.planes, kv, strict=True)
        for kind, array in zip(kinds, plane, strict=True)
        if kind == wanted
    ]


def _out(kind: HeadPages) -> jax.Array:
    """One of ours for each of the model's KV heads."""
    return jnp.array([kind.kv_source.index(head) for head in range(max(kind.kv_source) + 1)])


def _back(kind: HeadPages) -> jax.Array:
    """The model's KV head for each of ours; any for padding."""
    return jnp.array([max(head, 0) for head in kind.kv_source])
