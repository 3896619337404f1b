"""Products of rows with the weights of the group they belong to: the experts of a mixture.

``grouped_matmul`` is the public function; ``reference`` (jnp) runs everywhere, ``mosaic`` on Hopper.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import REFERENCE, Kernels, choose
from pallas_kernels.grouped_matmul.case import Case

__all__ = ["Case", "grouped_matmul"]


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
    """See ``reference.grouped_matmul``."""
    module: Any = choose(__name__, Case.of(data, blocks, dtype), kernels).module
    return module.grouped_matmul(x, data, scale, group, total, blocks=blocks, dtype=dtype, kernels=kernels)
