"""Absorbed latent attention on Hopper: the kernel of ``sparse_mla``, with every token so far for its rows.

A latent is one row for all heads, so that one gather of rows serves 64 heads at a time; that the rows lie in pages
rather than anywhere makes no difference to it.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import sparse_mla
from pallas_kernels.dispatch import Kernels
from pallas_kernels.mla_attention.case import Case
from pallas_kernels.sparse_mla import mosaic

MOST_QUERIES = 8
"""Of a row; for more, keys and values of heads are cheaper (``mla_prefill``)."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Why this kernel does not run a case, or None."""
    if case.queries > MOST_QUERIES:
        return f"{case.queries} queries a row; it takes {MOST_QUERIES}"
    return mosaic.declines(sparse_mla.Case(case.dtype, case.rank, case.rope, case.heads), kernels)


def mla_attention(
    q: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels,
    rank: int,
    scale: float,
) -> jax.Array:
    """See ``reference.mla_attention``; a query that is not real gives 0."""
    rows, queries, heads, width = q.shape
    size = pages.shape[1]
    number = jnp.arange(queries)
    seen = jnp.where(number < counts[:, None], starts[:, None] + number + 1, 0)
    places = (tables[:, :, None] * size + jnp.arange(size)).reshape(rows, 1, -1)
    places = jnp.broadcast_to(places, (rows, queries, places.shape[-1])).reshape(rows * queries, -1)
    flat = q.reshape(rows * queries, heads, width)
    out = mosaic.sparse_mla(flat, pages, places, seen.reshape(-1), kernels=kernels, rank=rank, scale=scale)
    return out.reshape(rows, queries, heads, rank)
