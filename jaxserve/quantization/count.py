"""How many numbers a model's weights are."""

import math

import jax

from jaxserve.params import ParamSpec, Specs
from jaxserve.quantization.array import QuantArray
from jaxserve.quantization.mx_array import MxArray


def count_numbers(specs: Specs) -> int:
    """Of the tensors on disk that the parameters are made of, each once, however they are kept and cut in memory. Two
    to a byte of MXFP4; scales of quantized weights do not count."""
    found: dict[str, int] = {}
    kinds = (ParamSpec, QuantArray, MxArray)
    for leaf in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, kinds)):
        spec = leaf if isinstance(leaf, ParamSpec) else leaf.data
        each = 2 if isinstance(leaf, MxArray) else 1
        found |= {name: each * math.prod(shape) for name, shape in spec.pieces.items()}
    return sum(found.values())
