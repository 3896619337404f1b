"""Attention of query blocks over a paged KV cache.

``paged_attention`` is the public function; ``reference`` (jnp) runs everywhere, ``mosaic`` on Hopper.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import REFERENCE, Kernels, choose
from pallas_kernels.paged_attention.case import Case

__all__ = ["Case", "paged_attention"]


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels = REFERENCE,
    **options: Any,
) -> jax.Array:
    """See ``reference.paged_attention``."""
    module = choose(__name__, Case.of(q, pages), kernels).module
    return module.paged_attention(q, pages, tables, starts, counts, kernels=kernels, **options)
