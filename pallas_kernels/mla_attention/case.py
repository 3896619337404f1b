"""What implementations of latent attention choose by."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Case:
    """The facts of a call that matter."""

    dtype: str
    """Of the pages; uint8: fp8 records."""
    rank: int
    rope: int
    heads: int
    queries: int
    """Of a row; the un-absorbed form has 0."""

    @classmethod
    def of(cls, q: jax.Array, pages: jax.Array, rank: int) -> "Case":
        return cls(str(pages.dtype), rank, q.shape[-1] - rank, q.shape[2], q.shape[1])
