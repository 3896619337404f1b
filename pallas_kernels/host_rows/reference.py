"""The truth of copies to and from the pool, in jnp: the pool is an array like any other.

A loop goes as far as any row has entries, which come first in a plan: a step that misses nothing copies nothing.
"""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 4096
"""Records that are gathered at once."""


def fetch(pool: jax.Array, sources: jax.Array, latents: jax.Array, targets: jax.Array) -> jax.Array:
    """Rows of the pool into the latents (see the package)."""
    flat = pool.reshape(-1, pool.shape[-1])
    records = latents.reshape(-1, latents.shape[-1])
    real = (sources >= 0) & (sources < len(flat)) & (targets >= 0) & (targets < len(records))
    sources, targets = jnp.where(real, sources, 0), jnp.where(real, targets, len(records))  # beyond all: dropped
    if sources.ndim == 1:
        real, sources, targets = real[None], sources[None], targets[None]
    rows, width = sources.shape
    size = max(1, min(CHUNK // max(rows, 1), width))
    padding = ((0, 0), (0, -width % size))
    sources, targets = jnp.pad(sources, padding), jnp.pad(targets, padding, constant_values=len(records))
    end = jnp.max(jnp.where(real, jnp.arange(1, width + 1), 0), initial=0)

    def step(i: jax.Array, records: jax.Array) -> jax.Array:
        source, target = (lax.dynamic_slice_in_dim(x, i * size, size, axis=1) for x in (sources, targets))
        return records.at[target].set(flat[source], mode="drop")

    return lax.fori_loop(0, (end + size - 1) // size, step, records).reshape(latents.shape)


def write(pool: jax.Array, records: jax.Array, slots: jax.Array) -> jax.Array:
    """New records into the pool (see the package)."""
    flat = pool.reshape(-1, pool.shape[-1])
    where = jnp.where(slots < 0, len(flat), slots)
    return flat.at[where].set(records, mode="drop").reshape(pool.shape)
