"""Writes of a step's new keys and values into the pages of a cache, in the cache's format.

Three functions, one a cache: ``write_heads`` (GQA; float pages, or fp8 with a scale for each token and head),
``write_latent`` (MLA; float pages, or ``fp8_ds_mla`` records), ``write_keys`` (the indexer's). What a format is, to the
bit, stands in ``pallas_kernels.codecs.records``; pages of uint8 hold records, pages of floats hold numbers.

``slots`` int32 ``[T]`` say where each token goes, ``page * G + offset``; a token with slot -1 is written nowhere. Which
of several tokens with one slot stays is open: only a dump page is written so. Donated pages are changed in place.

Today one implementation exists, ``reference`` (jnp, runs everywhere).
"""

from pallas_kernels.kv_write.reference import write_heads, write_keys, write_latent

__all__ = ["write_heads", "write_keys", "write_latent"]
