"""The truth of cache writes, in jnp: quantize, then scatter whole rows."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import records


def write_heads(pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """Keys and values ``[T, K, D]`` into pages ``[P, 2, K, G, D]`` of floats, or uint8 ``[P, 2, K, G * (D + 4)]``."""
    rows = jnp.stack([k, v], axis=1)  # [T, 2, K, D]
    dim = k.shape[-1]
    size = records.page_size(pages, dim)
    page, offset = _place(pages, slots, size)
    if pages.dtype != jnp.uint8:
        return pages.at[page, :, :, offset].set(rows.astype(pages.dtype), mode="drop")
    data, scale = records.quantize_heads(rows)
    pages = _put(pages, page, offset * dim, lax.bitcast_convert_type(data, jnp.uint8))
    return _put(pages, page, size * dim + offset * 4, lax.bitcast_convert_type(scale, jnp.uint8))


def write_latent(pages: jax.Array, latent: jax.Array, rope: jax.Array, slots: jax.Array) -> jax.Array:
    """``latent [T, R]`` and ``rope [T, r]`` into float pages ``[P, G, R + r]``, or uint8 ``[P, G, latent_bytes]``."""
    page, offset = _place(pages, slots, pages.shape[1])
    if pages.dtype == jnp.uint8:
        rows = records.pack_latent(records.quantize_latent(latent, rope))
    else:
        rows = jnp.concatenate([latent, rope], axis=-1).astype(pages.dtype)
    return pages.at[page, offset].set(rows, mode="drop")


def write_keys(pages: jax.Array, keys: jax.Array, slots: jax.Array) -> jax.Array:
    """Index keys ``[T, D]`` into pages ``[P, G, D]`` of floats, or uint8 ``[P, G * key_bytes]``."""
    if pages.dtype != jnp.uint8:
        page, offset = _place(pages, slots, pages.shape[1])
        return pages.at[page, offset].set(keys.astype(pages.dtype), mode="drop")
    dim = keys.shape[-1]
    size = pages.shape[1] // records.key_bytes(dim)
    page, offset = _place(pages, slots, size)
    data, scale = records.quantize_keys(keys)
    pages = _put(pages, page, offset * dim, lax.bitcast_convert_type(data, jnp.uint8))
    raw = lax.bitcast_convert_type(scale, jnp.uint8).reshape(len(keys), -1)
    return _put(pages, page, size * dim + offset * raw.shape[-1], raw)


def _place(pages: jax.Array, slots: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each slot; a page behind the last for slot -1, which is dropped."""
    return jnp.where(slots < 0, len(pages), slots // size), slots % size


def _put(pages: jax.Array, page: jax.Array, start: jax.Array, rows: jax.Array) -> jax.Array:
    """Write ``rows [T, ..., n]`` to ``pages[page[t], ..., start[t] : start[t] + n]``; a page beyond all is skipped."""
    last = pages.ndim - 1
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, rows.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, last),
    )
    where = jnp.stack([page, start], axis=-1)
    return lax.scatter(pages, where, rows, dims, mode=lax.GatherScatterMode.FILL_OR_DROP)
