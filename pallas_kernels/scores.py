"""What the references of attention share."""

import jax
import jax.numpy as jnp

MASKED = -1e30
"""A score no query sees; finite, so that a row that sees nothing stays finite too."""


def product_dtype(pages: jax.Array, queries: int) -> jnp.dtype:
    """What products are made in; for few queries XLA's CPU backend is quicker in float32, conversion included. Records
    of bytes hold what bfloat16 holds."""
    few = queries < 16
    return jnp.dtype(jnp.float32 if few else jnp.bfloat16 if pages.dtype == jnp.uint8 else pages.dtype)
