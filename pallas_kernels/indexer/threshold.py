"""The best of many scores by their threshold: no sort, and nothing of the scores' size is written.

Scores are compared as integers that rise as they do. The one that ``top_k`` are no less than is searched for bit by
bit, by counting; what is chosen then is a bit for each position (``words``).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer.words import WORD, counted, first_bits, packed, places

BITS = 2
"""That a pass over the scores finds."""
LEAST = -0x7F800001
"""The image of -inf."""


def best(scores: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """The ``top_k`` best of ``scores [..., S]`` as rising positions ``[..., top_k]``, then -1, and how many they are.

    Of equal ones those that come first; what is -inf is never chosen.
    """
    padding = [(0, 0)] * (scores.ndim - 1)
    scores = jnp.pad(scores, [*padding, (0, -scores.shape[-1] % WORD)], constant_values=-jnp.inf)
    image = rising(scores)
    threshold = jnp.maximum(search(image, top_k), LEAST)[..., None]
    return chosen(packed(image > threshold), packed((image == threshold) & (image > LEAST)), top_k)


def chosen(above: jax.Array, level: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """``top_k`` positions, all those ``above`` and then the first of those that are ``level``; words ``[..., n]``."""
    wanted = jnp.maximum(top_k - counted(above).sum(-1), 0)
    return places(above | first_bits(level, wanted), top_k)


def rising(x: jax.Array) -> jax.Array:
    """int32 that order as the float32 ``x`` do; -0 is 0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def search(image: jax.Array, count: int) -> jax.Array:
    """The ``count``-th largest of ``image [..., S]``, int32 ``[...]``; the least int32 where there are fewer."""

    def step(i: jax.Array, found: jax.Array) -> jax.Array:
        shift = (32 - BITS * (i + 1)).astype(jnp.uint32)
        digit = jnp.zeros(found.shape, jnp.uint32)
        for value in range(1, 1 << BITS):
            limit = signed(found | jnp.uint32(value) << shift)
            digit += (image >= limit[..., None]).sum(-1, dtype=jnp.int32) >= count
        return found | digit << shift

    return signed(lax.fori_loop(0, 32 // BITS, step, jnp.zeros(image.shape[:-1], jnp.uint32)))


def signed(found: jax.Array) -> jax.Array:
    """uint32 as int32 in the same order."""
    return lax.bitcast_convert_type(found ^ jnp.uint32(1 << 31), jnp.int32)
