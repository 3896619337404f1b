"""A weight that stays quantized in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import lax

from jaxserve.quantization.mx_array import MxArray
from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.quant_matmul import dequantize, quant_matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantArray:
    """e4m3 ``data``, and float32 ``scale`` with an element for every ``blocks[i]`` elements along axis i.

    The shape is the decoder's, whatever the checkpoint's is. Of axes that a product merges, all but the last have
    blocks of 1; an axis that stands alone may end with a part of a block. ``data`` and ``scale`` may also be what
    describes arrays, as in any tree of parameters.
    """

    data: Any
    scale: Any
    blocks: tuple[int, ...] = field(metadata={"static": True})
    dtype: str = field(metadata={"static": True})
    """What the weight is rounded to for a product: the engine's dtype."""
    axes: tuple[str | None, ...] = field(default=(), metadata={"static": True})
    """The logical axes that devices divide it by; empty: they do not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def dequantize(self) -> jax.Array:
        """The whole weight, in ``dtype``."""
        return dequantize(self.data, self.scale, self.blocks).astype(self.dtype)

    def matmul(self, x: jax.Array, inputs: int, kernels: Kernels = REFERENCE) -> jax.Array:
        """``x [T, in]`` times this weight, whose last ``inputs`` axes are ``in``; float32 ``[T, out]``."""
        outer = len(self.shape) - inputs

        def matrix(array: jax.Array) -> jax.Array:
            return array.reshape(math.prod(array.shape[:outer]), -1)

        blocks = self.sides(inputs)
        return quant_matmul(x, matrix(self.data), matrix(self.scale), blocks=blocks, dtype=self.dtype, kernels=kernels)

    def sides(self, inputs: int) -> tuple[int, int]:
        """The blocks of the matrix whose columns are the last ``inputs`` axes: those of the axes merged before others
        are 1."""
        return self.blocks[len(self.shape) - inputs - 1], self.blocks[-1]


Weight = jax.Array | QuantArray | MxArray


def cut(weight: Weight, starts: Sequence[Any], sizes: Sequence[int]) -> Weight:
    """``lax.dynamic_slice`` of a weight. Starts and sizes of a quantized one fall on borders of blocks."""
    if isinstance(weight, MxArray):
        return weight.cut(starts, sizes)
    if not isinstance(weight, QuantArray):
        return lax.dynamic_slice(weight, starts, sizes)
    scale_starts = [start // block for start, block in zip(starts, weight.blocks, strict=True)]
    scale_sizes = [-(-size // block) for size, block in zip(sizes, weight.blocks, strict=True)]
    data = lax.dynamic_slice(weight.data, starts, sizes)
    return replace(weight, data=data, scale=lax.dynamic_slice(weight.scale, scale_starts, scale_sizes))
