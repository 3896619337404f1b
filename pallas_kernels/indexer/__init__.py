"""The indexer of sparse attention: which earlier tokens each query attends to, found by scoring every key.

``select`` is the public function, ``index_scores`` its first half; ``reference`` (jnp) runs everywhere, ``mosaic`` on
Hopper. ``best`` is the second half by itself, for scores from anywhere.

N rows are blocks of Q consecutive queries of one sequence, as in ``paged_attention``. q: float32 ``[N, Q, H, D]``,
gates: float32 ``[N, Q, H]``, pages: index keys ``[P, G, D]`` of floats, or uint8 ``[P, G * key_bytes]``
(``pallas_kernels.codecs.records``); tables, starts, counts as there. The score of a key is
``sum_h gates_h * relu(q_h . k) / sqrt(D)`` in float32; a query sees the keys up to its own position.

What is chosen: int32 ``[N, Q, top_k]`` positions in the sequence, rising, then -1; beside it int32 ``[N, Q]``, how many
they are. The ``top_k`` best are chosen, of equal ones those that come first; all where there are no more than
``top_k``, and nothing for a query that is not real. So a choice does not depend on what else is in the batch, and the
rows read of a cache rise.
"""

from typing import Any

import jax

from pallas_kernels.dispatch import REFERENCE, Kernels, choose
from pallas_kernels.indexer.case import Case
from pallas_kernels.indexer.threshold import best

__all__ = ["Case", "best", "index_scores", "select"]


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
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """The positions that each query attends to, and how many they are. ``options`` are the implementation's."""
    module = choose(__name__, Case.of(q, pages), kernels).module
    return module.select(q, gates, pages, tables, starts, counts, top_k=top_k, kernels=kernels, **options)


def index_scores(
    q: jax.Array,
    gates: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels = REFERENCE,
    **options: Any,
) -> jax.Array:
    """The score of every position, float32 ``[N, Q, W * G]``; -inf where a query does not see it."""
    module = choose(__name__, Case.of(q, pages), kernels).module
    return module.index_scores(q, gates, pages, tables, starts, counts, kernels=kernels, **options)
