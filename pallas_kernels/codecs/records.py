"""The bytes of a token in a compressed KV cache, in jnp.

- Heads (GQA), ``D + 4`` bytes for the key and for the value of each KV head. A page of a head holds its G rows of D
  e4m3, then its G float32 scales.
- Latent (MLA; published as ``fp8_ds_mla``), 656 bytes for 512 + 64 channels. A token is R e4m3, a float32 scale for
  each 128 of them, then the rope channels in bfloat16.
- Index key (DSA), 132 bytes for 128 channels. A page holds its G rows of e4m3, then its G rows of float32 scales, one
  for each 128 channels.

Latent and index pages are the published layouts, so that pages can be exchanged as they are. Their scales are powers
of two; those of heads are not (see ``fp8``). Multi-byte fields are little-endian.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import fp8

GROUP = 128
"""Channels that share a scale."""
LATENT_FLOOR = -13
"""The smallest scale's exponent: scale = max(amax / 448, 1e-4), rounded up to a power of two."""
KEY_FLOOR = -22
"""Of index keys: scale = max(amax, 1e-4) / 448, rounded up to a power of two."""
HEAD_LEAST = 1e-4
"""Of heads: scale = max(amax, 1e-4) / 448."""


class Latent(NamedTuple):
    """A latent record taken apart."""

    data: jax.Array  # e4m3 [..., R]
    scale: jax.Array  # float32 [..., ceil(R / 128)]
    rope: jax.Array  # bfloat16 [..., r]


def _groups(channels: int) -> int:
    return -(-channels // GROUP)


def _bytes(x: jax.Array) -> jax.Array:
    """The bytes of ``x [..., n]`` as uint8 ``[..., n * itemsize]``."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw if x.dtype.itemsize == 1 else raw.reshape(*x.shape[:-1], -1)


def _view(raw: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Bytes ``[..., n * itemsize]`` as ``[..., n]``."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(raw if size == 1 else raw.reshape(*raw.shape[:-1], -1, size), dtype)


# -- latent (MLA) -----------------------------------------------------------------------------------------------------


def latent_bytes(channels: int, rope: int) -> int:
    """Bytes a token takes: 656 for 512 and 64."""
    return channels + 4 * _groups(channels) + 2 * rope


def quantize_latent(latent: jax.Array, rope: jax.Array) -> Latent:
    """``latent [..., R]`` and ``rope [..., r]`` in any float dtype. A model without rope gives zeros."""
    data, exponent = fp8.quantize_groups(latent, GROUP, LATENT_FLOOR)
    return Latent(data, fp8.power_of_two(exponent), rope.astype(jnp.bfloat16))


def dequantize_latent(record: Latent) -> tuple[jax.Array, jax.Array]:
    """float32 ``[..., R]`` and ``[..., r]``."""
    return fp8.dequantize_groups(record.data, record.scale, GROUP), record.rope.astype(jnp.float32)


def pack_latent(record: Latent) -> jax.Array:
    """uint8 ``[..., latent_bytes]``."""
    return jnp.concatenate([_bytes(part) for part in record], axis=-1)


def latent_rows(latent: jax.Array, rope: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What pages of ``dtype`` hold of tokens: records where it is uint8, otherwise the numbers, ``[..., R + r]``."""
    if dtype == jnp.uint8:
        return pack_latent(quantize_latent(latent, rope))
    return jnp.concatenate([latent, rope], axis=-1).astype(dtype)


def unpack_latent(raw: jax.Array, channels: int) -> Latent:
    """The inverse of ``pack_latent``; ``channels`` is R."""
    middle = channels + 4 * _groups(channels)
    data, scale, rope = raw[..., :channels], raw[..., channels:middle], raw[..., middle:]
    return Latent(_view(data, fp8.E4M3), _view(scale, jnp.float32), _view(rope, jnp.bfloat16))


# -- index keys (DSA) -------------------------------------------------------------------------------------------------


def key_bytes(channels: int) -> int:
    """Bytes a token takes: 132 for 128."""
    return channels + 4 * _groups(channels)


def quantize_keys(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``keys [..., D]`` as e4m3 ``[..., D]`` and float32 scales ``[..., ceil(D / 128)]``."""
    data, exponent = fp8.quantize_groups(keys, GROUP, KEY_FLOOR)
    return data, fp8.power_of_two(exponent)


def dequantize_keys(data: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 ``[..., D]``."""
    return fp8.dequantize_groups(data, scale, GROUP)


def pack_key_pages(data: jax.Array, scale: jax.Array) -> jax.Array:
    """Pages of ``data [..., G, D]`` and ``scale [..., G, D / 128]`` as uint8 ``[..., G * key_bytes]``."""
    parts = [_bytes(part).reshape(*part.shape[:-2], -1) for part in (data, scale)]
    return jnp.concatenate(parts, axis=-1)


def unpack_key_pages(raw: jax.Array, channels: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of ``pack_key_pages``."""
    size = raw.shape[-1] // key_bytes(channels)
    data, scale = raw[..., : size * channels], raw[..., size * channels :]
    return (
        _view(data, fp8.E4M3).reshape(*raw.shape[:-1], size, channels),
        _view(scale, jnp.float32).reshape(*raw.shape[:-1], size, -1),
    )


# -- heads (GQA) ------------------------------------------------------------------------------------------------------


def head_bytes(channels: int) -> int:
    """Bytes the key, or the value, of a KV head takes for a token."""
    return channels + 4


def page_size(pages: jax.Array, channels: int) -> int:
    """G of pages ``[P, 2, K, G, D]`` of floats, or uint8 ``[P, 2, K, G * (D + 4)]``."""
    return pages.shape[3] // head_bytes(channels) if pages.dtype == jnp.uint8 else pages.shape[3]


def quantize_heads(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x [..., D]`` as e4m3 ``[..., D]`` and float32 scales ``[...]``: one for each token and head.

    A scale belongs to one token, so that what a page holds does not depend on which tokens were written together.
    """
    return fp8.quantize_tight(x, HEAD_LEAST)


def dequantize_heads(data: jax.Array, scale: jax.Array) -> jax.Array:
    """float32 ``[..., D]``."""
    return data.astype(jnp.float32) * scale[..., None]


def pack_head_pages(data: jax.Array, scale: jax.Array) -> jax.Array:
    """Pages of ``data [..., G, D]`` and ``scale [..., G]`` as uint8 ``[..., G * (D + 4)]``."""
    return jnp.concatenate([_bytes(data).reshape(*data.shape[:-2], -1), _bytes(scale)], axis=-1)


def unpack_head_pages(raw: jax.Array, channels: int) -> tuple[jax.Array, jax.Array]:
    """The inverse of ``pack_head_pages``."""
    size = raw.shape[-1] // head_bytes(channels)
    data, scale = raw[..., : size * channels], raw[..., size * channels :]
    return _view(data, fp8.E4M3).reshape(*raw.shape[:-1], size, channels), _view(scale, jnp.float32)
