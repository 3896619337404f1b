"""The resolver in one CUDA kernel (``resolve.cuh``), a block of threads for each row, as XLA calls it.

It is in the library of ``pallas_kernels.host_rows``. **It has not run on a GPU yet.** Built for a CPU it is tested,
phase after phase.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Kernels
from pallas_kernels.host_rows.foreign import RESOLVE, unavailable
from pallas_kernels.resolver.plan import Case, Hot, Plan

SHARED = 227 << 10
"""Bytes of shared memory a block may have on Hopper."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Why this kernel does not run a case, or None."""
    if kernels.capability is None:
        return "the device is no NVIDIA GPU"
    table = max(2, 1 << (2 * case.entries - 1).bit_length())
    if 8 * table + 3 * case.slots + (10 << 10) > SHARED or case.slots >= 1 << 16:
        return f"{case.entries} entries and regions of {case.slots} rows do not fit shared memory"
    return unavailable()


def resolve(
    positions: jax.Array,
    pages: jax.Array,
    frames: jax.Array,
    regions: jax.Array,
    hot: Hot,
    *,
    page_size: int,
    first: int,
) -> tuple[Plan, Hot]:
    """The plan for what was chosen, and what the regions hold after it (see the package)."""
    rows, queries, top_k = positions.shape

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    plan = [ints(*positions.shape), *[ints(rows, min(queries * top_k, hot.held.shape[1]))] * 2, *[ints(rows)] * 3]
    call = jax.ffi.ffi_call(RESOLVE, [*plan, *(ints(*x.shape) for x in hot)], input_output_aliases={4: 6, 5: 7})
    found = call(positions, pages, frames, regions, *hot, page_size=np.int64(page_size), first=np.int64(first))
    return Plan(*found[:6]), Hot(*found[6:])
