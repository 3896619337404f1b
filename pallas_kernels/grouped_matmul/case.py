"""What implementations of products with grouped weights choose by."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Case:
    """The facts of a call that matter."""

    dtype: str
    """Of the factors of the product."""
    data: str
    """The weights' dtype in memory; uint8: MXFP4, two numbers a byte."""
    outputs: int
    inputs: int
    blocks: tuple[int, int] = (1, 1)
    """How many of the outputs and of the inputs share a scale, where there are scales."""

    @classmethod
    def of(cls, data: jax.Array, blocks: tuple[int, int], dtype: str) -> "Case":
        outputs, inputs = data.shape[-2:]
        each = 2 if data.dtype == "uint8" else 1
        return cls(dtype, str(data.dtype), outputs, each * inputs, blocks)
