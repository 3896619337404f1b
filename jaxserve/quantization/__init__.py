"""Quantized checkpoints: which are read (``rules``), how their weights are kept (``array``) and filled (``specs``)."""

from jaxserve.quantization.array import QuantArray, cut
from jaxserve.quantization.rules import BlockFp8, rule
from jaxserve.quantization.specs import quantized

__all__ = ["BlockFp8", "QuantArray", "cut", "quantized", "rule"]
