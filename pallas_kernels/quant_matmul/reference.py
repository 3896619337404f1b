"""The truth of products with block-quantized weights, in jnp: dequantize in float32, round to the dtype, multiply."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.grouped_matmul.case import Case


def declines(case: Case, kernels: Kernels) -> str | None:
    """Nothing."""
    return None


def dequantize(data: jax.Array, scale: jax.Array, blocks: Sequence[int]) -> jax.Array:
    """float32 of e4m3 ``data``; ``scale`` has an element for every ``blocks[i]`` elements of axis i, whose last block
    may be cut short."""
    for axis, (size, block) in enumerate(zip(data.shape, blocks, strict=True)):
        if block > 1:
            scale = lax.slice_in_dim(jnp.repeat(scale, block, axis=axis), 0, size, axis=axis)
    return data.astype(jnp.float32) * scale


def quant_matmul(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    *,
    blocks: tuple[int, int],
    dtype: str,
    kernels: Kernels = REFERENCE,
) -> jax.Array:
    """``x [T, in]`` times e4m3 ``data [out, in]`` with its scales (see ``dequantize``), float32 ``[T, out]``.

    Both factors are rounded to ``dtype``; products are summed in float32.
    """
    return product(x, dequantize(data, scale, blocks), dtype)


def product(x: jax.Array, weight: jax.Array, dtype: str) -> jax.Array:
    """``x [T, in]`` times ``weight [out, in]`` as ``dtype``, summed in float32.

    A single row is doubled where dtype has 16 bits: XLA's CPU backend has no fast path for one.
    """
    rows = x.shape[0]
    x = x.astype(dtype)
    if rows == 1 and x.dtype.itemsize < 4:
        x = jnp.concatenate([x, x])
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, weight.astype(dtype), dims, preferred_element_type=jnp.float32)[:rows]
