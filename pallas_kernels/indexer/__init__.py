"""The indexer of sparse attention: which earlier tokens each query attends to, found by scoring every key.

``select`` is the public function, ``index_scores`` and ``best`` its two halves: a kernel may replace either, or both at
once. Today one implementation exists, ``reference`` (jnp, runs everywhere).

N rows are blocks of Q consecutive queries of one sequence, as in ``paged_attention``. q: float32 ``[N, Q, H, D]``,
gates: float32 ``[N, Q, H]``, pages: index keys ``[P, G, D]`` of floats, or uint8 ``[P, G * key_bytes]``
(``pallas_kernels.codecs.records``); tables, starts, counts as there. The score of a key is
``sum_h gates_h * relu(q_h . k) / sqrt(D)`` in float32; a query sees the keys up to its own position.

What is chosen: int32 ``[N, Q, top_k]`` positions in the sequence, rising, then -1; beside it int32 ``[N, Q]``, how many
they are. The ``top_k`` best are chosen, of equal ones those that come first; all where there are no more than
``top_k``, and nothing for a query that is not real. So a choice does not depend on what else is in the batch, and the
rows read of a cache rise.
"""

from pallas_kernels.indexer.reference import best, index_scores, select

__all__ = ["best", "index_scores", "select"]
