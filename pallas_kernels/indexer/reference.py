"""The truth of the indexer, in jnp.

Scores are made for a chunk of positions at a time, heads summed within, and the best so far are carried along: neither
the scores of all heads nor those of a whole context stand in memory. The loop runs to the longest context among the
rows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.indexer.case import Case

BUDGET = 1 << 22
"""Scores of single heads that may stand in memory at once."""
NONE = jnp.iinfo(jnp.int32).max
"""Sorts behind every position."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Nothing."""
    return None


def select(
    q: jax.Array,
    gates: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    top_k: int,
    kernels: Kernels = REFERENCE,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The positions that each query attends to, int32 ``[N, Q, top_k]`` and ``[N, Q]`` (see the package).

    chunk: positions scored at once.
    """
    rows, queries, heads, _ = q.shape
    size = Case.of(q, pages).page_size
    seen = seen_by(starts, counts, queries)

    def all_of_them() -> jax.Array:
        return everything(seen, top_k)[0]

    def scored() -> jax.Array:
        pages_at_once = _pages_at_once(rows * queries * heads, size, tables.shape[1], chunk)
        padded = _padded(tables, pages_at_once)
        span = pages_at_once * size

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            here = lax.dynamic_slice_in_dim(padded, i * pages_at_once, pages_at_once, axis=1)
            scores = _chunk_scores(q, gates, pages, here, seen, i * span)
            position = jnp.broadcast_to(i * span + jnp.arange(span), scores.shape)
            values, positions = (jnp.concatenate(x, axis=-1) for x in zip(carry, (scores, position), strict=True))
            values, order = lax.top_k(values, top_k)  # of equal ones the first: those carried along come before
            return values, jnp.take_along_axis(positions, order, axis=-1)

        shape = (rows, queries, top_k)
        carry = (jnp.full(shape, -jnp.inf), jnp.full(shape, NONE, jnp.int32))
        values, positions = lax.fori_loop(0, (jnp.max(seen) + span - 1) // span, step, carry)
        return _rising(values, positions)

    if tables.shape[1] * size <= top_k:
        chosen = all_of_them()
    else:
        chosen = lax.cond(jnp.max(seen) <= top_k, all_of_them, scored)
    return chosen, jnp.minimum(seen, top_k)


def index_scores(
    q: jax.Array,
    gates: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels = REFERENCE,
    chunk: int | None = None,
) -> jax.Array:
    """The score of every position, float32 ``[N, Q, W * G]``; -inf where a query does not see it."""
    rows, queries, heads, _ = q.shape
    size, width = Case.of(q, pages).page_size, tables.shape[1]
    seen = seen_by(starts, counts, queries)
    pages_at_once = _pages_at_once(rows * queries * heads, size, width, chunk)
    padded = _padded(tables, pages_at_once)
    span = pages_at_once * size

    def step(i: jax.Array, scores: jax.Array) -> jax.Array:
        here = lax.dynamic_slice_in_dim(padded, i * pages_at_once, pages_at_once, axis=1)
        found = _chunk_scores(q, gates, pages, here, seen, i * span)
        return lax.dynamic_update_slice_in_dim(scores, found, i * span, axis=2)

    out = jnp.full((rows, queries, padded.shape[1] * size), -jnp.inf)
    return lax.fori_loop(0, (jnp.max(seen) + span - 1) // span, step, out)[..., : width * size]


def _chunk_scores(
    q: jax.Array, gates: jax.Array, pages: jax.Array, here: jax.Array, seen: jax.Array, first: jax.Array
) -> jax.Array:
    """Scores ``[N, Q, C]`` of the positions from ``first`` that stand in the pages ``here [N, C / G]``."""
    rows, dim = len(q), q.shape[-1]
    keys = pages[here]
    if pages.dtype == jnp.uint8:
        keys = records.dequantize_keys(*records.unpack_key_pages(keys, dim))
    keys = keys.reshape(rows, -1, dim).astype(jnp.float32)
    scores = jax.nn.relu(jnp.einsum("nqhd,ncd->nqhc", q.astype(jnp.float32), keys))
    scores = jnp.einsum("nqhc,nqh->nqc", scores, gates.astype(jnp.float32)) * dim**-0.5
    visible = first + jnp.arange(keys.shape[1]) < seen[..., None]
    return jnp.where(visible, _one_zero(scores), -jnp.inf)


def _one_zero(scores: jax.Array) -> jax.Array:
    """-0 as 0: they are equal, though a sort may tell them apart."""
    return jnp.where(scores == 0, 0.0, scores)


def _rising(values: jax.Array, positions: jax.Array) -> jax.Array:
    chosen = jnp.sort(jnp.where(values > -jnp.inf, positions, NONE), axis=-1)
    return jnp.where(chosen == NONE, -1, chosen).astype(jnp.int32)


def everything(seen: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """What is chosen where queries see no more than ``top_k``."""
    position = jnp.arange(top_k, dtype=jnp.int32)
    return jnp.where(position < seen[..., None], position, -1), jnp.minimum(seen, top_k)


def seen_by(starts: jax.Array, counts: jax.Array, queries: int) -> jax.Array:
    """int32 ``[N, Q]``: how many keys each query sees."""
    number = jnp.arange(queries)
    return jnp.where(number < counts[:, None], starts[:, None] + number + 1, 0)


def _pages_at_once(products: int, size: int, width: int, chunk: int | None) -> int:
    """Pages of a chunk; ``products`` are made for each position of it."""
    wanted = chunk or min(max(BUDGET // products, 128), 4096)
    return max(1, min(wanted // size, width))


def _padded(tables: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % multiple)))
