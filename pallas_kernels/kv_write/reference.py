"""The truth of cache writes, in jnp: whole rows are scattered."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import REFERENCE, Kernels
from pallas_kernels.kv_write.case import Case


def declines(case: Case, kernels: Kernels) -> str | None:
    """Nothing."""
    return None


def put(pages: jax.Array, slots: jax.Array, parts: Sequence[jax.Array], *, kernels: Kernels = REFERENCE) -> jax.Array:
    """``pages`` with ``parts [T, ..., n]`` in them, of the same dtype, where ``slots`` int32 ``[T]`` say.

    Pages are ``[P, ..., G, n]``; or ``[P, ..., W]``, G rows of the first part's n elements, then G of the second's. A
    reshape from one to the other would make XLA's CPU backend copy the pages where there are several devices.
    """
    whole = pages.ndim > parts[0].ndim
    size = pages.shape[-2] if whole else pages.shape[-1] // sum(part.shape[-1] for part in parts)
    page, offset = jnp.where(slots < 0, len(pages), slots // size), slots % size  # a page behind the last is dropped
    if whole:
        (rows,) = parts
        return pages.at[(page, *[slice(None)] * (pages.ndim - 3), offset)].set(rows, mode="drop")
    begin = 0
    for part in parts:
        pages = _put(pages, page, begin + offset * part.shape[-1], part)
        begin += size * part.shape[-1]
    return pages


def _put(pages: jax.Array, page: jax.Array, start: jax.Array, rows: jax.Array) -> jax.Array:
    """Write ``rows [T, ..., n]`` to ``pages[page[t], ..., start[t] : start[t] + n]``; a page beyond all is skipped."""
    last = pages.ndim - 1
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, rows.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, last),
    )
    where = jnp.stack([page, start], axis=-1)
    return lax.scatter(pages, where, rows, dims, mode=lax.GatherScatterMode.FILL_OR_DROP)
