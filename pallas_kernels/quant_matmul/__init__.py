"""Products with weights that stay quantized in memory and are dequantized on the way into the product.

``quant_matmul`` is the public function; ``reference`` (jnp) runs everywhere, ``mosaic`` on Hopper.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import REFERENCE, Kernels, choose
from pallas_kernels.grouped_matmul.case import Case
from pallas_kernels.quant_matmul.reference import dequantize

__all__ = ["Case", "dequantize", "quant_matmul"]


def quant_matmul(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array,
    *,
    blocks: tuple[int, int],
    dtype: str,
    kernels: Kernels = REFERENCE,
) -> jax.Array:
    """See ``reference.quant_matmul``."""
    module: Any = choose(__name__, Case.of(data, blocks, dtype), kernels).module
    return module.quant_matmul(x, data, scale, blocks=blocks, dtype=dtype, kernels=kernels)
