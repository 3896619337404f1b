"""Number formats of caches and weights, in jnp: what the kernels' references and the engine agree on, bit for bit.

``fp8``: e4m3 with power-of-two scales. ``records``: the bytes a token takes in a compressed KV cache. ``mx``: MXFP4.
"""
