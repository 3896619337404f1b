"""What implementations of paged attention choose by."""

from dataclasses import dataclass

import jax

from pallas_kernels.codecs import records


@dataclass(frozen=True)
class Case:
    """The facts of a call that matter."""

    dtype: str
    """Of the pages; uint8: fp8 records."""
    head_dim: int
    page_size: int
    queries: int
    """Query rows of a KV head, and a row of the batch: queries times heads of the group."""

    @classmethod
    def of(cls, q: jax.Array, pages: jax.Array) -> "Case":
        return cls(str(pages.dtype), q.shape[-1], records.page_size(pages, q.shape[-1]), q.shape[1] * q.shape[3])
