"""The truth of products with grouped weights, in jnp: block by block, each a product with its group's weights.

The engine's experts on a CPU do not come here: ``jaxserve.experts`` goes through both of an expert's products tile by
tile of its width, so that a tile stays in the cache between them.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import mx
from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.grouped_matmul.case import Case
from pallas_kernels.quant_matmul.reference import product, quant_matmul


def declines(case: Case, kernels: Kernels) -> str | None:
    """Nothing."""
    return None


def grouped_matmul(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array | None,
    group: jax.Array,
    total: jax.Array,
    *,
    blocks: tuple[int, int] = (1, 1),
    dtype: str,
    kernels: Kernels = REFERENCE,
) -> jax.Array:
    """Blocks of rows ``x [B, rows, in]`` times the weights ``data [X, out, in]`` of each block's ``group``, int32
    ``[B]``; float32 ``[B, rows, out]``.

    Only the first ``total`` (int32 scalar) blocks are computed: anything may come out in the place of others, and their
    group and rows are not looked at. scale: float32 ``[X, ceil(out / blocks[0]), ceil(in / blocks[1])]`` of e4m3
    ``data``; of MXFP4, uint8 ``[X, out, in / 2]``, it is uint8 ``[X, out, in / 32]``, and ``dtype`` float32; None for
    weights of ``dtype``. Both factors are rounded to ``dtype``; products are summed in float32.
    """

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        weight = lax.dynamic_index_in_dim(data, group[i], keepdims=False)
        if data.dtype == jnp.uint8:
            assert scale is not None
            mine = lax.dynamic_index_in_dim(scale, group[i], keepdims=False)
            found = product(x[i], mx.dequantize(weight.reshape(*mine.shape, -1), mine), dtype)
        elif scale is None:
            found = product(x[i], weight, dtype)
        else:
            mine = lax.dynamic_index_in_dim(scale, group[i], keepdims=False)
            found = quant_matmul(x[i], weight, mine, blocks=blocks, dtype=dtype)
        return lax.dynamic_update_index_in_dim(out, found, i, 0)

    return lax.fori_loop(0, total, block, jnp.zeros((*x.shape[:2], data.shape[1]), jnp.float32))
