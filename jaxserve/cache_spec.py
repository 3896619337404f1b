"""What the layers keep of every token, and for how long. Imports no jax.

The cache is a pile of planes. A page is a slice through all of them, and belongs to one *group* of layers: each layer
of the group has one plane of it to itself. Layers of one group look equally far back; pages of a group with a window
are free again when they lie behind it. All groups take their pages from one pool.

A plane is one array of pages, or several: keys and values of heads, latents, index keys. A layer that reads what
another one has written has that one's plane.
"""

from collections.abc import Iterator
from dataclasses import dataclass

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8 = "uint8"
"""The dtype of pages that hold fp8 records: bytes."""
Axes = tuple[str | None, ...]


def _scales(channels: int) -> int:
    """Bytes of the float32 scales of a record, one for each 128 channels."""
    return 4 * -(-channels // 128)


@dataclass(frozen=True)
class HeadPages:
    """Keys and values of heads, ``[P, 2, K, G, D]``, sharded over K: a page is one piece of memory, which is quicker to
    move, and so is a head's part of it. Pages of fp8 records are bytes, ``[P, 2, K, G * (D + 4)]``: a head's G rows of
    e4m3, then their float32 scales."""

    kv_source: tuple[int, ...]
    """Which of the model's KV heads each of ours is (see ``HeadLayout``)."""
    head_dim: int
    dtype: str
    sharded = True

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes in one copy, over all devices that share it."""
        return (
            2 * len(self.kv_source) * (self.head_dim + 4 if self.dtype == FP8 else self.head_dim * _BYTES[self.dtype])
        )

    def page(self, size: int) -> tuple[int, ...]:
        """The shape of a page of ``size`` tokens."""
        return (2, len(self.kv_source), *self._head(size))

    def record(self, size: int) -> tuple[int, ...]:
        """The shape of a page that leaves the devices: the same for any number of them."""
        return (2, max(self.kv_source) + 1, *self._head(size))

    def _head(self, size: int) -> tuple[int, ...]:
        return (size * (self.head_dim + 4),) if self.dtype == FP8 else (size, self.head_dim)

    @property
    def plain(self) -> bool:
        """Whether our KV heads are just the model's."""
        return self.kv_source == tuple(range(len(self.kv_source)))

    @property
    def axes(self) -> Axes:
        """The logical axes of a page."""
        return (None, "kv_heads")


@dataclass(frozen=True)
class LatentPages:
    """The latent and the rotated channels of a token, ``[P, G, R + r]``, a copy on every device; or ``fp8_ds_mla``
    records, uint8 ``[P, G, bytes]``."""

    rank: int  # R
    rope: int  # r
    dtype: str
    sharded = False

    @property
    def token_bytes(self) -> int:
        if self.dtype == FP8:
            return self.rank + _scales(self.rank) + 2 * self.rope
        return (self.rank + self.rope) * _BYTES[self.dtype]

    def page(self, size: int) -> tuple[int, ...]:
        return (size, self.token_bytes if self.dtype == FP8 else self.rank + self.rope)

    record = page
    axes: Axes = ()
    plain = True


@dataclass(frozen=True)
class KeyPages:
    """The indexer's keys, ``[P, G, D]``, a copy on every device; or uint8 ``[P, G * bytes]``: G rows of e4m3, then
    their float32 scales."""

    dim: int
    dtype: str
    sharded = False

    @property
    def token_bytes(self) -> int:
        return self.dim + _scales(self.dim) if self.dtype == FP8 else self.dim * _BYTES[self.dtype]

    def page(self, size: int) -> tuple[int, ...]:
        return (size * self.token_bytes,) if self.dtype == FP8 else (size, self.dim)

    record = page
    axes: Axes = ()
    plain = True


Pages = HeadPages | LatentPages | KeyPages


@dataclass(frozen=True)
class LayerCache:
    """Where a layer keeps its part."""

    plane: int
    group: int


@dataclass(frozen=True)
class CacheSpec:
    """The whole cache of a model."""

    planes: tuple[tuple[Pages, ...], ...]
    layers: tuple[LayerCache, ...]
    windows: tuple[int | None, ...]
    """For each group, how many tokens its layers look back, the token itself included; None: all."""

    @property
    def arrays(self) -> Iterator[Pages]:
        """Of all planes, in order."""
        return (pages for plane in self.planes for pages in plane)

    @property
    def kinds(self) -> tuple[Pages, ...]:
        """The distinct ones."""
        return tuple(dict.fromkeys(self.arrays))

    @property
    def token_bytes(self) -> int:
        """Bytes of a page for each token it holds, over all devices that share it."""
        return sum(pages.token_bytes for pages in self.arrays)

    def device_bytes(self, devices: int) -> int:
        """The same on each of ``devices``."""
        return sum(pages.token_bytes // (devices if pages.sharded else 1) for pages in self.arrays)

    @property
    def dtypes(self) -> str:
        """For people."""
        return ", ".join(dict.fromkeys("fp8" if pages.dtype == FP8 else pages.dtype for pages in self.arrays))
