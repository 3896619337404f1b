"""The truth of paged attention, in jnp: an online softmax over chunks of pages (Flash Attention, arXiv 2205.14135).

The loop runs to the longest context among the rows, so a batch of short sequences costs little however wide the page
table is. Pages are head-major ``[P, 2, K, G, D]``: on a CPU they gather up to 2.5 times faster than with G before K.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.paged_attention.case import Case
from pallas_kernels.scores import MASKED, product_dtype


def declines(case: Case, kernels: Kernels) -> str | None:
    """Nothing."""
    return None


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels = REFERENCE,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    chunk: int = 64,
) -> jax.Array:
    """Each of N rows is a block of Q consecutive queries of one sequence, attending to all its keys so far.

    q: ``[N, Q, K, g, D]``, g query heads a KV head. pages: ``[P, 2, K, G, D]``, keys and values of P
    pages; or uint8 ``[P, 2, K, G * (D + 4)]``, their fp8 records (``pallas_kernels.codecs.records``).
    tables: int32 ``[N, W]``, the pages of the row's sequence in order. starts, counts: int32 ``[N]``, position of the
    first query, and how many of the Q are real (the rest give finite rubbish). window: tokens a query sees, itself
    included. softcap: scores become ``softcap * tanh(score / softcap)``. sinks: float32 ``[K, g]``, a score of each
    head that takes part in the softmax and has no value. chunk: tokens of context a loop step looks at.
    Returns float32 ``[N, Q, K, g, D]``.
    """
    rows, queries, kv_heads, group, dim = q.shape
    page_size = records.page_size(pages, dim)
    count = max(1, min(chunk // page_size, tables.shape[1]))
    span = count * page_size
    if tables.shape[1] % count:
        tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % count)))
    fp8 = pages.dtype == jnp.uint8
    dtype = product_dtype(pages, group * queries)
    flat = q.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * queries, dim).astype(dtype)
    position = starts[:, None] + jnp.tile(jnp.arange(queries), group)  # [N, g*Q]

    def gather(here: jax.Array, part: int) -> jax.Array:
        found = pages[here, part]  # [N, count, K, G, D]
        if fp8:
            found = records.dequantize_heads(*records.unpack_head_pages(found, dim))
        return found.astype(dtype).swapaxes(1, 2).reshape(rows, kv_heads, span, dim)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, out = carry
        here = lax.dynamic_slice_in_dim(tables, i * count, count, axis=1)
        k, v = gather(here, 0), gather(here, 1)
        scores = jnp.einsum("nkqd,nkcd->nkqc", flat, k, preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        key_position = i * span + jnp.arange(span)
        seen = key_position <= position[..., None]
        if window is not None:
            seen &= key_position > position[..., None] - window
        scores = jnp.where(seen[:, None], scores, MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.exp(scores - new_peak[..., None])
        decay = jnp.exp(peak - new_peak)
        total = total * decay + weights.sum(-1)
        mixed = jnp.einsum("nkqc,nkcd->nkqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_peak, total, out * decay[..., None] + mixed

    shape = flat.shape[:3]
    carry = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    end = jnp.max(starts + counts)
    first, last = jnp.int32(0), (end + span - 1) // span
    if window is not None:  # padding rows see nothing, and do not make the others begin early
        first = jnp.maximum(jnp.min(jnp.where(counts > 0, starts, end)) - window + 1, 0) // span
    peak, total, out = lax.fori_loop(first, last, step, carry)
    if sinks is not None:
        total = total + jnp.exp(jnp.repeat(sinks, queries, axis=1) - peak)
    out = out / total[..., None]
    return out.reshape(rows, kv_heads, group, queries, dim).transpose(0, 3, 1, 2, 4)
