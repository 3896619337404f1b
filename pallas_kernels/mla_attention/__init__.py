"""Attention over a paged cache of latents (multi-head latent attention, DeepSeek V2), in its two forms.

Pages are latents ``[P, G, R + r]`` of floats, R channels that keys and values of all heads are made from and r rotated
ones that are the same for all heads; or uint8 ``[P, G, latent_bytes]``, their ``fp8_ds_mla`` records
(``pallas_kernels.codecs.records``).

``mla_attention`` is the absorbed form: queries and outputs are in the latents' space, and nothing is made of a latent
but a score. It is the one for few queries. ``mla_prefill`` makes keys and values of heads from each latent once a
sequence, which pays for many queries: 2R + r multiplications for each query and token become n + r + D.

``reference`` (jnp) has both and runs everywhere; ``mosaic`` has the absorbed form on Hopper.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import REFERENCE, Kernels, choose
from pallas_kernels.mla_attention.case import Case
from pallas_kernels.mla_attention.reference import mla_prefill

__all__ = ["Case", "mla_attention", "mla_prefill"]


def mla_attention(
    q: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    rank: int,
    scale: float,
    kernels: Kernels = REFERENCE,
    **options: Any,
) -> jax.Array:
    """See ``reference.mla_attention``; ``options`` are the implementation's."""
    module = choose(__name__, Case.of(q, pages, rank), kernels).module
    fixed = {"rank": rank, "scale": scale, "kernels": kernels}
    return module.mla_attention(q, pages, tables, starts, counts, **fixed, **options)
