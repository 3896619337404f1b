"""What the Mosaic GPU kernels for Hopper share."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows that one wgmma multiplies."""


def tiled(*shape: int, dtype: Any, widest: int = 128) -> Any:
    """Shared memory that wgmma reads: tiles of 8 rows and up to ``widest`` bytes, swizzled. Slices are whole tiles."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(plgpu.find_swizzle(shape[-1] * size * 8), widest)
    tiling, swizzling = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzling))
