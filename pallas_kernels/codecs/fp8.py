"""e4m3 with scales. Pure functions; every result is exact, so that kernels can equal it.

Most scales are powers of two: ``2^e`` with the smallest ``e >= floor`` for which the group's largest magnitude fits
into e4m3 (``amax <= 448 * 2^e``). That is ``2^ceil(log2(amax / 448))`` of the published rules, found from the bits:
neither division by a constant nor a logarithm is the same on all backends, and ``x * 2^-e`` is exact on all.

Policy for what is not finite: it does not count for ``amax``, so that it spoils no neighbour; infinities saturate to
``±448 * 2^e``, NaN becomes the NaN 0x7f. A float32 below the smallest normal counts as zero, and one within a rounding
of 2^128 comes back infinite.
"""

import jax
import jax.numpy as jnp
from jax import lax

E4M3 = jnp.float8_e4m3fn
E4M3_MAX = 448.0
NAN = 0x7F
"""The byte of NaN; with the sign bit set it is NaN too, but is never written."""


def scale_exponent(amax: jax.Array, floor: int) -> jax.Array:
    """int32: the smallest ``e >= floor`` with ``amax <= 448 * 2^e``; ``amax`` is float32, finite, not negative."""
    bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
    above = (bits & 0x7FFFFF) > 0x600000  # 448 is 1.75 * 2^8
    return jnp.maximum((bits >> 23) - 127 - 8 + above, floor)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """``2^exponent`` as float32, for exponents from -126 to 127."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def quantize(x: jax.Array, floor: int) -> tuple[jax.Array, jax.Array]:
    """One scale for each row of ``x [..., n]``: e4m3 ``[..., n]`` and the scales' exponents, int32 ``[...]``."""
    x = x.astype(jnp.float32)
    exponent = scale_exponent(_largest(x), floor)
    return _encode(x * power_of_two(-exponent)[..., None]), exponent


def quantize_tight(x: jax.Array, least: float) -> tuple[jax.Array, jax.Array]:
    """As ``quantize``, with the tightest scale instead of a power of two: float32 ``max(amax, least) * (1 / 448)``.

    The largest number of a row comes back as it was, but for a rounding: that matters where one channel dwarfs the
    others, as in keys. The quotients are those of IEEE division.
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(_largest(x), least) * jnp.float32(1 / E4M3_MAX)
    return _encode(x / scale[..., None]), scale


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=-1)


def _encode(scaled: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(E4M3), jnp.uint8)
    return lax.bitcast_convert_type(jnp.where(jnp.isnan(scaled), jnp.uint8(NAN), bits), E4M3)


def quantize_groups(x: jax.Array, group: int, floor: int) -> tuple[jax.Array, jax.Array]:
    """One scale for every ``group`` channels of ``x [..., n]``, the last group as long as n leaves it.

    Returns e4m3 ``[..., n]`` and exponents int32 ``[..., ceil(n / group)]``.
    """
    size = x.shape[-1]
    groups = -(-size // group)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * group - size)])
    data, exponent = quantize(padded.reshape(*x.shape[:-1], groups, group), floor)
    return data.reshape(*x.shape[:-1], -1)[..., :size], exponent


def dequantize_groups(data: jax.Array, scale: jax.Array, group: int) -> jax.Array:
    """float32 ``[..., n]`` of e4m3 ``data [..., n]`` and float32 ``scale [..., ceil(n / group)]``."""
    wide = jnp.repeat(scale, group, axis=-1)[..., : data.shape[-1]]
    return data.astype(jnp.float32) * wide


def to_ue8m0(exponent: jax.Array) -> jax.Array:
    """The byte of a scale ``2^exponent``: uint8, ``exponent + 127``."""
    return (exponent + 127).astype(jnp.uint8)


def from_ue8m0(byte: jax.Array) -> jax.Array:
    """float32 of a UE8M0 byte. 0 (2^-127) is below float32's normal numbers and reads as 0 where those are flushed;
    255 is NaN."""
    bits = byte.astype(jnp.int32) << 23
    bits = jnp.where(byte == 0, 0x400000, jnp.where(byte == 255, 0x7FC00000, bits))
    return lax.bitcast_convert_type(bits, jnp.float32)
