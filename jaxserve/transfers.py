"""Pages on the move: from one place to another, and to records in host memory and back. Pure functions over all planes.

A record is one page of all planes, the same for any number of devices. Records that travel together are a block: for
each distinct kind of array in the planes (``CacheSpec.kinds``) an array ``[N, arrays of this kind, ...]``.

Both ways come in two forms. ``spill_pages`` and ``restore_pages`` move all pages of an array at once, for devices that
do many things at the same time. ``spill_in_turn`` and ``restore_in_turn`` move page after page, for a single CPU: each
byte is read and written once. XLA's CPU code for the first form writes everything twice, and meets its threads at every
array, which takes ten times as long as the copying where the machine has other work.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from jaxserve.cache_spec import CacheSpec, HeadPages, Pages

KV = list[tuple[Any, ...]]
"""By plane its pages, and what else belongs to it, which stays where it is."""
Block = tuple[jax.Array, ...]


def copy_pages(cache: CacheSpec, kv: KV, pairs: jax.Array) -> KV:
    """Every plane's pages ``pairs[0]`` copied to ``pairs[1]``, int32 ``[2, C]``; all are read before any is written."""
    source, target = pairs
    return _with(kv, [[array.at[target].set(array[source]) for array in arrays] for arrays in _pages(cache, kv)])


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

    written = [
        [write(array, next(sources[kind])) for kind, array in zip(kinds, arrays, strict=True)]
        for kinds, arrays in zip(cache.planes, _pages(cache, kv), strict=True)
    ]
    return _with(kv, written)


def spill_in_turn(cache: CacheSpec, block: Block, kv: KV, pages: jax.Array) -> Block:
    """``spill_pages`` into the memory of ``block``, whatever is there. All kinds must be plain."""

    def move(block: Block, kv: list[list[jax.Array]], pages: jax.Array) -> Block:
        def page(number: jax.Array, block: Block) -> Block:
            def record(records: jax.Array, arrays: list[jax.Array]) -> jax.Array:
                for i, array in enumerate(arrays):
                    row = jax.lax.dynamic_slice(array, (pages[number], 0), (1, array.shape[1]))
                    records = jax.lax.dynamic_update_slice(records, row, (number, i * array.shape[1]))
                return records

            return tuple(record(*one) for one in zip(block, kv, strict=True))

        return jax.lax.fori_loop(0, len(pages), page, block)

    moved = _one_function(move)(_flat(block), [_flat(_arrays(cache, kv, kind)) for kind in cache.kinds], pages)
    return tuple(part.reshape(whole.shape) for part, whole in zip(moved, block, strict=True))


def restore_in_turn(cache: CacheSpec, kv: KV, block: Block, pages: jax.Array) -> KV:
    """``restore_pages``. All kinds must be plain."""

    def move(kv: list[list[jax.Array]], block: Block, pages: jax.Array) -> list[list[jax.Array]]:
        def page(number: jax.Array, kv: list[list[jax.Array]]) -> list[list[jax.Array]]:
            def write(array: jax.Array, records: jax.Array, i: int) -> jax.Array:
                row = jax.lax.dynamic_slice(records, (number, i * array.shape[1]), (1, array.shape[1]))
                return jax.lax.dynamic_update_slice(array, row, (pages[number], 0))

            return [
                [write(array, records, i) for i, array in enumerate(arrays)]
                for arrays, records in zip(kv, block, strict=True)
            ]

        return jax.lax.fori_loop(0, len(pages), page, kv)

    moved = _one_function(move)([_flat(_arrays(cache, kv, kind)) for kind in cache.kinds], _flat(block), pages)
    found = {kind: iter(arrays) for kind, arrays in zip(cache.kinds, moved, strict=True)}
    written = [
        [next(found[kind]).reshape(array.shape) for kind, array in zip(kinds, arrays, strict=True)]
        for kinds, arrays in zip(cache.planes, _pages(cache, kv), strict=True)
    ]
    return _with(kv, written)


def _flat(arrays: Any) -> Any:
    """Each page or record as one row. Inside the one function XLA would count in all axes, one by one."""
    return jax.tree.map(lambda array: array.reshape(len(array), -1), arrays)


def _one_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have XLA's CPU compiler make one function of ``function``, as it does of small loops by itself, instead of a
    chain of calls that its threads share. It would copy nothing faster, and the threads have to be woken. Where the
    compiler does not know the attributes it is slower, and right."""
    jitted = jax.jit(function)

    def call(*args: Any) -> Any:
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            return jitted(*args)

    return call


def _arrays(cache: CacheSpec, kv: KV, wanted: Pages) -> list[jax.Array]:
    return [
        array
        for kinds, arrays in zip(cache.planes, _pages(cache, kv), strict=True)
        for kind, array in zip(kinds, arrays, strict=True)
        if kind == wanted
    ]


def _pages(cache: CacheSpec, kv: KV) -> list[tuple[jax.Array, ...]]:
    """The planes' pages alone."""
    return [plane[: len(kinds)] for kinds, plane in zip(cache.planes, kv, strict=True)]


def _with(kv: KV, written: list[list[jax.Array]]) -> KV:
    """The planes with these pages."""
    return [(*arrays, *plane[len(arrays) :]) for arrays, plane in zip(written, kv, strict=True)]


def _out(kind: HeadPages) -> jax.Array:
    """One of ours for each of the model's KV heads."""
    return jnp.array([kind.kv_source.index(head) for head in range(max(kind.kv_source) + 1)])


def _back(kind: HeadPages) -> jax.Array:
    """The model's KV head for each of ours; any for padding."""
    return jnp.array([max(head, 0) for head in kind.kv_source])
