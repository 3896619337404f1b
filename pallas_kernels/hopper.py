"""What the Mosaic GPU kernels for Hopper share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Kernels

ROWS = 64
"""Rows that one wgmma multiplies."""


def tiled(*shape: int, dtype: Any, widest: int = 128) -> Any:
    """Shared memory that wgmma reads: tiles of 8 rows and up to ``widest`` bytes, swizzled. Slices are whole tiles."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(plgpu.find_swizzle(shape[-1] * size * 8), widest)
    tiling, swizzling = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))


def accumulated(start: jax.Array, multiply: Callable[[Any], None], kernels: Kernels) -> jax.Array:
    """``start`` and what ``multiply`` adds to the accumulator that it is given. The interpreter knows no accumulators
    that begin with something: there the sum is made afterwards."""
    if not kernels.interpreted:
        return pl.run_state(multiply)(plgpu.ACC.init(start))

    def alone(acc: Any) -> jax.Array:
        multiply(acc)
        return acc[...]

    rows, columns = start.shape
    return start + pl.run_scoped(alone, plgpu.ACC((rows, columns), start.dtype))


def store(ref: Any, value: Any) -> None:
    """``ref[...] = value``, also where a warp does not fill sectors of 32 bytes: from jax 0.12 on that must be said."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
