"""Latent attention over chosen rows of a paged cache: decode and prefill alike.

``sparse_mla`` is the public function; ``reference`` (jnp) runs everywhere, ``mosaic`` on Hopper.

q: ``[T, H, R + r]`` absorbed queries: what meets the latent, then what meets the rotated channels. pages: latents
``[P, G, R + r]`` of floats, or uint8 ``[P, G, latent_bytes]`` (``pallas_kernels.codecs.records``). rows: int32
``[T, k]``, the rows of the cache each token attends to, ``page * G + offset``; -1 is no row. counts: int32 ``[T]``,
how many of a token's entries are looked at: nothing behind them is read. Which sequence or position a row belongs to
is not asked, so that rows may lie anywhere in the pages, in another buffer's too that is handed in their place.
Returns float32 ``[T, H, R]``: the mixed latents; 0 for a token that attends to nothing.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import REFERENCE, Kernels, choose
from pallas_kernels.sparse_mla.case import Case

__all__ = ["Case", "sparse_mla"]


def sparse_mla(
    q: jax.Array,
    pages: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    rank: int,
    scale: float,
    kernels: Kernels = REFERENCE,
    **options: Any,
) -> jax.Array:
    """Each token's attention to its rows. rank: R. Scores are multiplied by ``scale``; ``options`` are the
    implementation's."""
    module = choose(__name__, Case.of(q, pages, rank), kernels).module
    return module.sparse_mla(q, pages, rows, counts, kernels=kernels, rank=rank, scale=scale, **options)
