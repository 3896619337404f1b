"""What implementations of the indexer choose by."""

import math
from dataclasses import dataclass

import jax

from pallas_kernels.codecs import records


@dataclass(frozen=True)
class Case:
    """The facts of a call that matter."""

    dtype: str
    """Of the pages; uint8: fp8 records."""
    heads: int
    dim: int
    page_size: int

    @classmethod
    def of(cls, q: jax.Array, pages: jax.Array) -> "Case":
        heads, dim = q.shape[2:]
        size = pages.shape[1] // records.key_bytes(dim) if pages.dtype == "uint8" else pages.shape[1]
        return cls(str(pages.dtype), heads, dim, size)

    def piece(self, span: int) -> int:
        """Keys that lie together, both in a page and in ``span`` keys of the sequence."""
        return math.gcd(self.page_size, span)
