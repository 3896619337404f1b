"""Writes of a step's new keys and values into the pages of a cache, in the cache's format.

Three functions, one a cache: ``write_heads`` (GQA; float pages, or fp8 with a scale for each token and head),
``write_latent`` (MLA; float pages, or ``fp8_ds_mla`` records), ``write_keys`` (the indexer's). What a format is, to the
bit, stands in ``pallas_kernels.codecs.records``; pages of uint8 hold records, pages of floats hold numbers.

``slots`` int32 ``[T]`` say where each token goes, ``page * G + offset``; a token with slot -1 is written nowhere. Which
of several tokens with one slot stays is open: only a dump page is written so. Donated pages are changed in place.

A token is quantized in jnp, the same for all implementations: arithmetic on a few rows, which XLA fuses with what made
them. What implementations differ in is the scatter, ``put``: ``reference`` (jnp) runs everywhere, ``mosaic`` on Hopper.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE, Kernels, choose
from pallas_kernels.kv_write.case import Case

__all__ = ["Case", "write_heads", "write_keys", "write_latent"]


def write_heads(
    pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array, *, kernels: Kernels = REFERENCE
) -> jax.Array:
    """Keys and values ``[T, K, D]`` into pages ``[P, 2, K, G, D]`` of floats, or uint8 ``[P, 2, K, G * (D + 4)]``."""
    if pages.dtype != jnp.uint8:
        return _put(pages, slots, kernels, jnp.stack([k, v], axis=1).astype(pages.dtype))
    both = zip(records.quantize_heads(k), records.quantize_heads(v), strict=True)
    return _put(pages, slots, kernels, *(jnp.stack([_bytes(x) for x in part], axis=1) for part in both))


def write_latent(
    pages: jax.Array, latent: jax.Array, rope: jax.Array, slots: jax.Array, *, kernels: Kernels = REFERENCE
) -> jax.Array:
    """``latent [T, R]`` and ``rope [T, r]`` into float pages ``[P, G, R + r]``, or uint8 ``[P, G, latent_bytes]``."""
    return _put(pages, slots, kernels, records.latent_rows(latent, rope, pages.dtype))


def write_keys(pages: jax.Array, keys: jax.Array, slots: jax.Array, *, kernels: Kernels = REFERENCE) -> jax.Array:
    """Index keys ``[T, D]`` into pages ``[P, G, D]`` of floats, or uint8 ``[P, G * key_bytes]``."""
    if pages.dtype != jnp.uint8:
        return _put(pages, slots, kernels, keys.astype(pages.dtype))
    data, scale = records.quantize_keys(keys)
    return _put(pages, slots, kernels, _bytes(data), _bytes(scale).reshape(len(keys), -1))


def _put(pages: jax.Array, slots: jax.Array, kernels: Kernels, *parts: jax.Array) -> jax.Array:
    """Write ``parts [T, ..., n]``; a row of ``pages [P, ..., W]`` holds G rows of the first, then of the second."""
    case = Case(str(pages.dtype), sum(part.shape[-1] * part.dtype.itemsize for part in parts))
    return choose(__name__, case, kernels).module.put(pages, slots, parts, kernels=kernels)


def _bytes(x: jax.Array) -> jax.Array:
    """Of e4m3 ``[..., n]``: uint8 ``[..., n]``; of float32 ``[...]``: ``[..., 4]``."""
    return lax.bitcast_convert_type(x, jnp.uint8)
