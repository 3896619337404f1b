"""A weight that stays MXFP4 in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import mx


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MxArray:
    """``data`` uint8 ``[..., n / 2]``, two e2m1 numbers a byte, and ``scale`` uint8 ``[..., n / 32]``, powers of two.

    A product dequantizes to float32, which is exact. Either may also be what describes an array.
    """

    data: Any
    scale: Any

    dtype: ClassVar = jnp.dtype(jnp.float32)
    """Of the other factor of a product."""
    block: ClassVar = mx.GROUP
    """Channels, along the last axis, that share a scale."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.data.shape[-1] * 2)

    def dequantize(self) -> jax.Array:
        return mx.dequantize(self.data.reshape(*self.scale.shape, -1), self.scale)

    def cut(self, starts: Sequence[Any], sizes: Sequence[int]) -> "MxArray":
        """``lax.dynamic_slice``; along the last axis, starts and sizes are multiples of ``block``."""

        def part(array: jax.Array, unit: int) -> jax.Array:
            return lax.dynamic_slice(array, (*starts[:-1], starts[-1] // unit), (*sizes[:-1], sizes[-1] // unit))

        return MxArray(part(self.data, 2), part(self.scale, self.block))
