"""Attention of query blocks over a paged KV cache.

``paged_attention`` is the public function. Today one implementation exists, ``reference`` (jnp, runs everywhere); GPU
kernels join it here, each in a file of its own, held to the reference by one test.
"""

from pallas_kernels.paged_attention.reference import paged_attention

__all__ = ["paged_attention"]
