"""Attention over a paged cache of latents (multi-head latent attention, DeepSeek V2), in its two forms.

Pages are latents ``[P, G, R + r]`` of floats, R channels that keys and values of all heads are made from and r rotated
ones that are the same for all heads; or uint8 ``[P, G, latent_bytes]``, their ``fp8_ds_mla`` records
(``pallas_kernels.codecs.records``).

``mla_attention`` is the absorbed form: queries and outputs are in the latents' space, and nothing is made of a latent
but a score. It is the one for few queries. ``mla_prefill`` makes keys and values of heads from each latent once a
sequence, which pays for many queries: 2R + r multiplications for each query and token become n + r + D.

Today one implementation of each exists, ``reference`` (jnp, runs everywhere).
"""

from pallas_kernels.mla_attention.reference import mla_attention, mla_prefill

__all__ = ["mla_attention", "mla_prefill"]
