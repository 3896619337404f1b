"""Quantized checkpoints: which are read (``rules``), how their weights are kept (``array``) and filled (``specs``)."""

from jaxserve.quantization.array import QuantArray, Weight, cut
from jaxserve.quantization.count import count_numbers
from jaxserve.quantization.mx_array import MxArray
from jaxserve.quantization.rules import BlockFp8, MxExperts, rule
from jaxserve.quantization.specs import may_stay, quantized

__all__ = [
    "BlockFp8",
    "MxArray",
    "MxExperts",
    "QuantArray",
    "Weight",
    "count_numbers",
    "cut",
    "may_stay",
    "quantized",
    "rule",
]
