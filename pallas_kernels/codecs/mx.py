"""MXFP4 as gpt-oss keeps it on disk: e2m1 pairs with a UE8M0 scale for every 32 (OCP microscaling, version 1.0).

``blocks`` is uint8 ``[..., n / 32, 16]``, the even element in the low half of a byte; ``scales`` is uint8
``[..., n / 32]``, a byte b meaning ``2^(b - 127)``.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.codecs import fp8

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each of the 16 codes."""
EXPONENT_MAX = 2
"""Of e2m1's largest number, 6 = 1.5 * 2^2."""


def unpack_e2m1(packed: jax.Array) -> jax.Array:
    """float32 ``[..., 2 n]`` of uint8 ``packed [..., n]``, the low half of a byte first."""
    codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return jnp.array(E2M1, jnp.float32)[codes.astype(jnp.int32)].reshape(*packed.shape[:-1], -1)


def pack_e2m1(x: jax.Array) -> jax.Array:
    """Codes of ``x [..., 2 n]``, rounded to nearest, ties to the even code, saturated at 6; NaN becomes 6."""
    size = jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)).astype(jnp.float32)
    # The midpoints between neighbours; a tie goes up where the code above is even.
    up = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0]
    codes = sum(step.astype(jnp.uint8) for step in up) | jnp.where(jnp.signbit(x), jnp.uint8(8), jnp.uint8(0))
    low, high = codes[..., ::2], codes[..., 1::2]
    return low | (high << 4)


def dequantize(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 ``[..., n]`` of ``blocks [..., n / 32, 16]`` and ``scales [..., n / 32]``."""
    values = unpack_e2m1(blocks) * fp8.from_ue8m0(scales)[..., None]
    return values.reshape(*blocks.shape[:-2], -1)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x [..., n]``, n a multiple of 32, as blocks and scales, by the rule of the OCP specification.

    The scale is ``2^(floor(log2(amax)) - 2)``, so numbers between 6 and 8 times it saturate. A group without a normal
    number gets the smallest scale.
    """
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUP)
    amax = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=-1)
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    exponent = jnp.maximum((bits >> 23) - 127 - EXPONENT_MAX, -126)
    return pack_e2m1(x * fp8.power_of_two(-exponent)[..., None]), fp8.to_ue8m0(exponent)
