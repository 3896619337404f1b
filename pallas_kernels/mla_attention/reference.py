"""The truth of latent attention, in jnp: an online softmax over chunks of pages, as in ``paged_attention``."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.mla_attention.case import Case
from pallas_kernels.scores import MASKED, product_dtype

State = tuple[jax.Array, jax.Array, jax.Array]
"""Of an online softmax: the largest score so far, the sum of weights, and the weighted sum of values."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Nothing."""
    return None


def mla_attention(
    q: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels = REFERENCE,
    rank: int,
    scale: float,
    chunk: int = 64,
) -> jax.Array:
    """Absorbed: each of N rows is a block of Q consecutive queries of one sequence, attending to all its tokens so far.

    q: ``[N, Q, H, R + r]``, what meets the latent, then what meets the rotated channels. tables: int32 ``[N, W]``, the
    pages of the row's sequence in order. starts, counts: int32 ``[N]``, position of the first query, and how many of
    the Q are real (the rest give finite rubbish). rank: R. Scores are multiplied by ``scale``. chunk: tokens of context
    a loop step looks at. Returns float32 ``[N, Q, H, R]``: the mixed latents.
    """
    rows, queries, heads, width = q.shape
    tables, count = _padded(tables, pages.shape[1], chunk)
    span = count * pages.shape[1]
    dtype = product_dtype(pages, heads * queries)
    flat = q.reshape(rows, queries * heads, width).astype(dtype)
    position = starts[:, None] + jnp.repeat(jnp.arange(queries), heads)  # [N, Q*H]

    def step(i: jax.Array, state: State) -> State:
        here = lax.dynamic_slice_in_dim(tables, i * count, count, axis=1)
        k = _read(pages, here, rank, dtype).reshape(rows, span, width)
        scores = jnp.einsum("nqc,nsc->nqs", flat, k, preferred_element_type=jnp.float32) * scale
        seen = i * span + jnp.arange(span) <= position[..., None]
        return _mix(state, jnp.where(seen, scores, MASKED), k[..., :rank])

    shape = flat.shape[:2]
    state = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, rank)))
    _, total, out = lax.fori_loop(0, (jnp.max(starts + counts) + span - 1) // span, step, state)
    return (out / total[..., None]).reshape(rows, queries, heads, rank)


Expand = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def mla_prefill(
    q: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    expand: Expand,
    *,
    rank: int,
    values: int,
    scale: float,
    chunk: int = 64,
) -> jax.Array:
    """Not absorbed: as ``mla_attention``, but queries are ``[N, Q, H, n + r]`` and meet what ``expand`` makes of
    latents ``[C, R]``: keys ``[C, H, n]`` and values ``[C, H, D]``. values: D. Returns float32 ``[N, Q, H, D]``.

    Rows with the same table stand together, in the order of their positions: what they look at is made once for all of
    them.
    """
    rows, queries, heads, _ = q.shape
    tables, count = _padded(tables, pages.shape[1], chunk)
    span = count * pages.shape[1]
    dtype = product_dtype(pages, queries)
    flat = q.swapaxes(1, 2).astype(dtype)  # [N, H, Q, n + r]
    ends = starts + counts
    begins = jnp.concatenate([jnp.array([True]), (tables[1:] != tables[:-1]).any(1)])
    (first,) = jnp.nonzero(jnp.concatenate([begins, jnp.array([True])]), size=rows + 1, fill_value=rows)

    def sequence(number: jax.Array, state: State) -> State:
        low, high = first[number], first[number + 1]

        def step(i: jax.Array, state: State) -> State:
            here = lax.dynamic_slice_in_dim(tables[low], i * count, count)
            latents = _read(pages, here, rank, dtype)
            k, v = expand(latents[:, :rank])
            shared = jnp.broadcast_to(latents[:, None, rank:], (span, heads, latents.shape[1] - rank))
            k = jnp.concatenate([k.astype(dtype), shared], axis=-1).swapaxes(0, 1)  # [H, C, n + r]
            v = v.astype(dtype).swapaxes(0, 1)

            def block(row: jax.Array, state: State) -> State:
                scores = jnp.einsum("hqc,hsc->hqs", flat[row], k, preferred_element_type=jnp.float32) * scale
                seen = i * span + jnp.arange(span) <= starts[row] + jnp.arange(queries)[:, None]
                peak, total, out = (part[row] for part in state)
                new = _mix((peak, total, out), jnp.where(seen, scores, MASKED), v)
                return tuple(lax.dynamic_update_index_in_dim(a, b, row, 0) for a, b in zip(state, new, strict=True))

            behind = ((ends <= i * span) & (jnp.arange(rows) >= low) & (jnp.arange(rows) < high)).sum()
            return lax.fori_loop(low + behind, high, block, state)

        mine = (jnp.arange(rows) >= low) & (jnp.arange(rows) < high)
        return lax.fori_loop(0, (jnp.max(jnp.where(mine, ends, 0)) + span - 1) // span, step, state)

    shape = flat.shape[:3]
    state = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, values)))
    _, total, out = lax.fori_loop(0, begins.sum(), sequence, state)
    return (out / jnp.where(total == 0, 1, total)[..., None]).swapaxes(1, 2)


def _padded(tables: jax.Array, page_size: int, chunk: int) -> tuple[jax.Array, int]:
    """Tables of a whole number of chunks, and pages a chunk has."""
    count = max(1, min(chunk // page_size, tables.shape[1]))
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % count))), count


def _read(pages: jax.Array, here: jax.Array, rank: int, dtype: jnp.dtype) -> jax.Array:
    """Latents and rotated channels of pages ``here [...]``, one axis: ``[... * G, R + r]``."""
    found = pages[here].reshape(-1, pages.shape[-1])
    if pages.dtype == jnp.uint8:
        found = jnp.concatenate(records.dequantize_latent(records.unpack_latent(found, rank)), axis=-1)
    return found.astype(dtype)


def _mix(state: State, scores: jax.Array, values: jax.Array) -> State:
    """One chunk more: ``scores [a, q, s]``, ``values [a, s, D]``."""
    peak, total, out = state
    new_peak = jnp.maximum(peak, scores.max(-1))
    weights = jnp.exp(scores - new_peak[..., None])
    decay = jnp.exp(peak - new_peak)
    mixed = jnp.einsum("aqs,asd->aqd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return new_peak, total * decay + weights.sum(-1), out * decay[..., None] + mixed
