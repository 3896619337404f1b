"""Products with quantized weights on Hopper: those of one group of blocks of rows (see ``grouped_matmul``)."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Kernels
from pallas_kernels.grouped_matmul import mosaic

declines = mosaic.declines


def quant_matmul(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    *,
    blocks: tuple[int, int],
    dtype: str,
    kernels: Kernels,
) -> jax.Array:
    """See ``reference.quant_matmul``. Sums over inputs that share a scale are multiplied by it in float32, so weights
    are not rounded: the result is nearer to the exact one."""
    tokens = x.shape[0]
    rows = mosaic.block_rows(tokens)
    x = jnp.pad(x, ((0, -tokens % rows), (0, 0))).reshape(-1, rows, x.shape[1])
    whose = jnp.zeros(len(x), jnp.int32)
    out = mosaic.grouped_matmul(
        x, data[None], scale[None], whose, jnp.int32(len(x)), blocks=blocks, dtype=dtype, kernels=kernels
    )
    return out.reshape(-1, out.shape[-1])[:tokens]
