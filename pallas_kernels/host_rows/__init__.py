"""Copies of single records between a pool in host memory and the latents on the device, inside a step.

``fetch(pool, sources, latents, targets)`` copies rows of the pool to rows of ``latents [P, G, n]``, which it returns.
sources, targets: int32 of one shape, ``[N, M]`` or ``[M]``; an entry with -1 in either, or a row beyond either array,
is skipped. No two entries have one target. ``write(pool, records, slots)`` copies new ``records [T, n]`` to rows
``slots`` int32 ``[T]`` of the pool, -1 nowhere, and returns the pool. Donated arrays are changed in place.

A pool is one of two things, which says what is done:

- an array ``[P, G, n]`` of the latents' dtype: ``reference`` (jnp, runs everywhere);
- ``Pinned``, the address of pinned host memory: ``foreign``, a CUDA kernel that reads and writes it over the bus. The
  address is an operand, so that programs can be stored, and what is recorded of a step and replayed reads the pool
  anew. Where a write's pool is handed to a later fetch, the fetch sees what was written.

The engine's process must have pinned that memory (``foreign.pin``) and keep it until no step is in flight. Under a mesh
both are called inside ``shard_map``: latents are whole on every device, the pool is the host's. One device's writes
suffice: the others may have -1 for slots.

**The CUDA kernel has not run on a GPU yet.** It is built without one (``build``), and programs that call it compile
for sm_90 without one. Its source is built for a CPU as well, and tested there.
"""

import jax

from pallas_kernels.host_rows import foreign, reference
from pallas_kernels.host_rows.foreign import Pinned

__all__ = ["Pinned", "fetch", "write"]

Pool = jax.Array | Pinned


def fetch(pool: Pool, sources: jax.Array, latents: jax.Array, targets: jax.Array) -> jax.Array:
    """The latents with the fetched rows in them (see the package)."""
    if isinstance(pool, Pinned):
        return foreign.fetch(pool, sources, latents, targets)
    return reference.fetch(pool, sources, latents, targets)


def write[P: (jax.Array, Pinned)](pool: P, records: jax.Array, slots: jax.Array) -> P:
    """The pool with the records in it (see the package)."""
    if isinstance(pool, Pinned):
        return foreign.write(pool, records, slots)
    return reference.write(pool, records, slots)
