"""The truth of sparse latent attention, in jnp: an online softmax over chunks of the chosen rows, which are gathered
and dequantized as they are needed. The loop runs to the largest count."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.scores import MASKED, product_dtype
from pallas_kernels.sparse_mla.case import Case

BUDGET = 1 << 24
"""Gathered channels that may stand in memory at once."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Nothing."""
    return None


def sparse_mla(
    q: jax.Array,
    pages: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels = REFERENCE,
    rank: int,
    scale: float,
    chunk: int | None = None,
) -> jax.Array:
    """Each token's attention to its rows (see the package). rank: R. Scores are multiplied by ``scale``. chunk: rows of
    a token that a loop step looks at."""
    tokens, heads, width = q.shape
    size = max(1, min(chunk or min(max(BUDGET // (tokens * width), 16), 512), rows.shape[1]))
    entry = jnp.arange(rows.shape[1])
    rows = jnp.where(entry < counts[:, None], rows, -1)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % size)), constant_values=-1)
    fp8 = pages.dtype == jnp.uint8
    dtype = product_dtype(pages, heads)
    flat = pages.reshape(-1, pages.shape[-1])
    q = q.astype(dtype)

    def gather(here: jax.Array) -> jax.Array:
        found = flat[jnp.maximum(here, 0)]  # [T, C, ...]
        if fp8:
            found = jnp.concatenate(records.dequantize_latent(records.unpack_latent(found, rank)), axis=-1)
        return found.astype(dtype)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, out = carry
        here = lax.dynamic_slice_in_dim(rows, i * size, size, axis=1)
        real = (here >= 0)[:, None]
        found = jnp.where(here[..., None] >= 0, gather(here), 0)  # what is not chosen may be NaN
        scores = jnp.einsum("thd,tcd->thc", q, found, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(real, scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.where(real, jnp.exp(scores - new_peak[..., None]), 0)
        decay = jnp.exp(peak - new_peak)
        total = total * decay + weights.sum(-1)
        latents = found[..., :rank]
        mixed = jnp.einsum("thc,tcd->thd", weights.astype(dtype), latents, preferred_element_type=jnp.float32)
        return new_peak, total, out * decay[..., None] + mixed

    carry = (jnp.full((tokens, heads), MASKED), jnp.zeros((tokens, heads)), jnp.zeros((tokens, heads, rank)))
    last = (jnp.minimum(jnp.max(counts), rows.shape[1]) + size - 1) // size
    _, total, out = lax.fori_loop(0, last, step, carry)
    return out / jnp.maximum(total, 1e-30)[..., None]
