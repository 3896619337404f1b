"""Products with weights that stay quantized in memory and are dequantized on the way into the product.

``quant_matmul`` is the public function. Today one implementation exists, ``reference`` (jnp, runs everywhere).
"""

from pallas_kernels.quant_matmul.reference import dequantize, quant_matmul

__all__ = ["dequantize", "quant_matmul"]
