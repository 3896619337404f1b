"""What a layer keeps, for how long, and how many bytes that is. Imports no jax.

Kinds: ``paged`` keeps every token in pages of G tokens; further kinds (window, ring, state) come with the families that
need them. A sliding-window layer is paged for now: its pages are kept, its mask is not.
"""

from dataclasses import dataclass
from typing import Literal

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8 = "uint8"
"""The dtype of pages that hold fp8 records: bytes."""


@dataclass(frozen=True)
class CacheSpec:
    """A cache shared by a group of layers with equal records: K and V heads of one token, in one dtype.

    On the devices each layer holds one array ``[P, 2, K, G, D]`` (pages; keys and values; KV heads, tokens a page, head
    dim), sharded over K: a page is one piece of memory, which is quicker to move, and so is a head's part of it. Pages
    of fp8 records are bytes, ``[P, 2, K, G * (D + 4)]``: a head's G rows of e4m3, then their float32 scales.
    """

    kind: Literal["paged"]
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all layers of the group and all devices."""
        head = self.head_dim + 4 if self.dtype == FP8 else self.head_dim * _BYTES[self.dtype]
        return 2 * len(self.layers) * self.kv_heads * head

    def pages_shape(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        """Of one layer's array."""
        if self.dtype == FP8:
            return (num_pages, 2, self.kv_heads, page_size * (self.head_dim + 4))
        return (num_pages, 2, self.kv_heads, page_size, self.head_dim)

    @property
    def pages_axes(self) -> tuple[str | None, ...]:
        """The logical axes of that array."""
        return (None, None, "kv_heads") if self.dtype == FP8 else (None, None, "kv_heads", None, None)
