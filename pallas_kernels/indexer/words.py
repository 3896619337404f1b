"""Positions as bits: bit i of word w is position ``32 w + i``, so that a choice among many takes little memory."""

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32


def packed(mask: jax.Array) -> jax.Array:
    """uint32 ``[..., S / 32]``: bit i of word w is ``mask[..., 32 w + i]``."""
    bits = mask.reshape(*mask.shape[:-1], -1, WORD).astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)
    return bits.sum(-1, dtype=jnp.uint32)


def first_bits(words: jax.Array, wanted: jax.Array) -> jax.Array:
    """The first ``wanted [...]`` bits of ``words [..., n]``, the others 0."""
    count = counted(words)
    before = jnp.cumsum(count, axis=-1) - count
    left = jnp.clip(wanted[..., None] - before, 0, count)
    edge = nth_bit(words, left)
    return jnp.where(left == count, words, words & ((jnp.uint32(1) << edge) - 1))


def nth_bit(words: jax.Array, number: jax.Array) -> jax.Array:
    """Where the bit of ``words`` is that ``number`` bits come before, uint32; anything where there is none."""
    place = jnp.zeros(words.shape, jnp.uint32)
    for width in (16, 8, 4, 2, 1):
        low = counted((words >> place) & jnp.uint32((1 << width) - 1))
        further = number >= low
        number = number - jnp.where(further, low, 0)
        place += jnp.where(further, jnp.uint32(width), 0)
    return place


def places(words: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Positions of the first ``count`` bits of ``words [..., n]``, int32 ``[..., count]``, then -1; and how many bits
    there are."""
    through = jnp.cumsum(counted(words), axis=-1)  # bits up to and with each word
    number = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (*words.shape[:-1], count))
    low, step = jnp.zeros(number.shape, jnp.int32), 1 << (words.shape[-1] - 1).bit_length()
    while step := step // 2:  # the first word with more bits up to it than come before
        here = jnp.minimum(low + step, words.shape[-1]) - 1
        low = jnp.where(jnp.take_along_axis(through, here, axis=-1) <= number, here + 1, low)
    low = jnp.minimum(low, words.shape[-1] - 1)
    word = jnp.take_along_axis(words, low, axis=-1)
    inside = number - jnp.take_along_axis(through, low, axis=-1) + counted(word)
    position = low * WORD + nth_bit(word, inside).astype(jnp.int32)
    return jnp.where(number < through[..., -1:], position, -1), through[..., -1]


def counted(words: jax.Array) -> jax.Array:
    """Bits of each word, int32."""
    return lax.population_count(words).astype(jnp.int32)
