"""The best of many scores on Hopper: a kernel searches for their threshold, each program for one query's.

Scores come once from where they are; as many as it holds stay in shared memory, where each thread finds again those
that it has put there. The search ends early where a threshold parts the best from the others. Only what a query sees
is looked at.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Kernels
from pallas_kernels.hopper import store
from pallas_kernels.indexer.threshold import LEAST, chosen, rising
from pallas_kernels.indexer.words import WORD

CHUNK = 2048
"""Scores in registers at once."""
SHARED = 24
"""Chunks that stay in shared memory: 192 KiB."""
ALONG = plgpu.Layout.TILED(Tiling(((16, WORD), (4, 4))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)
"""Rows of 32 words of 32 bits in registers: 16 bytes a thread, and eight threads side by side have a row."""


def best(scores: jax.Array, seen: jax.Array, top_k: int, kernels: Kernels) -> tuple[jax.Array, jax.Array]:
    """See ``threshold.best``, of the first ``seen [...]`` of ``scores [..., S]``; S is a multiple of what ``padded``
    says. A query that sees no more than ``top_k`` gets them all, whatever their scores are."""
    size = scores.shape[-1]
    above, level = _words(scores.reshape(-1, size // WORD, WORD), seen.reshape(-1), top_k, kernels)
    shape = (*seen.shape, size // WORD)
    left = jnp.clip(seen[..., None] - jnp.arange(size // WORD) * WORD, 0, WORD)  # of each word, positions seen
    every = jnp.where(left == WORD, jnp.uint32(2**32 - 1), (jnp.uint32(1) << left.astype(jnp.uint32)) - 1)
    few = (seen <= top_k)[..., None]
    above = jnp.where(few, every, jnp.where(left > 0, above.reshape(shape), 0))
    return chosen(above, jnp.where(few | (left == 0), 0, level.reshape(shape)), top_k)


def padded(size: int) -> int:
    """The least S for ``size`` scores."""
    return -(-size // _chunk(size)) * _chunk(size)


def _chunk(size: int) -> int:
    """Scores that are in registers at once: whole rows of ``ALONG``, of which a tile has 16."""
    return min(CHUNK, -(-size // (16 * WORD)) * 16 * WORD)


def _words(scores: jax.Array, seen: jax.Array, top_k: int, kernels: Kernels) -> tuple[jax.Array, jax.Array]:
    """For each of ``scores [R, n, 32]`` whether it is above the query's threshold, and whether it is level with it:
    uint32 ``[R, n]``. What is not seen has no bit; words of chunks with nothing that is seen are anything."""
    rows, count, _ = scores.shape
    high = _chunk(count * WORD) // WORD  # rows of a chunk
    chunks = count // high
    held = min(chunks, SHARED)

    def body(scores_ref, seen_ref, above_ref, level_ref, images_smem):
        row = lax.axis_index("row")
        mine = seen_ref[row]
        todo = jnp.where(mine > top_k, lax.div(mine + high * WORD - 1, high * WORD), 0)
        here = jnp.minimum(todo, held)

        def iota(axis: int) -> jax.Array:
            return plgpu.broadcasted_iota(jnp.int32, (high, WORD), axis, layout=ALONG)

        def read(chunk: Any) -> jax.Array:
            """Images of a chunk's scores."""
            found = plgpu.load(scores_ref.at[row, pl.ds(chunk * high, high)], layout=ALONG, optimized=False)
            position = (chunk * high + iota(0)) * WORD + iota(1)
            return jnp.where(position < mine, rising(found), LEAST)

        def kept(chunk: Any) -> jax.Array:
            return plgpu.load(images_smem.at[chunk], layout=ALONG, optimized=False)

        def keep(chunk: Any, _: None) -> None:
            images_smem[chunk] = read(chunk)

        lax.fori_loop(0, here, keep, None)

        def reached(limits: tuple[jax.Array, ...]) -> list[jax.Array]:
            """How many images are no less than each of the limits."""

            def more(load: Any, chunk: Any, totals: list[jax.Array]) -> list[jax.Array]:
                image = load(chunk)
                return [total + (image >= limit).astype(jnp.int32) for total, limit in zip(totals, limits, strict=True)]

            totals = [plgpu.layout_cast(jnp.zeros((high, WORD), jnp.int32), ALONG) for _ in limits]
            totals = lax.fori_loop(0, here, partial(more, kept), totals)
            totals = lax.fori_loop(here, todo, partial(more, read), totals)
            return [total.sum(axis=1).sum(axis=0) for total in totals]

        def go_on(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            shift, _, apart = state
            return (shift >= 0) & (apart == 0)

        def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            shift, found, apart = state
            limits = tuple(found | (jnp.int32(digit) << shift) for digit in (1, 2, 3))
            counts = reached(tuple(limit ^ jnp.int32(-(2**31)) for limit in limits))
            for limit, count in zip(limits, counts, strict=True):  # which rise, and counts fall
                found = jnp.where(count >= top_k, limit, found)
                apart |= (count == top_k).astype(jnp.int32)
            return shift - 2, found, apart

        shift = jnp.where(todo > 0, 30, -1)
        _, found, _ = lax.while_loop(go_on, step, (shift, jnp.int32(0), jnp.int32(0)))
        threshold = jnp.maximum(found ^ jnp.int32(-(2**31)), LEAST)

        def write(load: Any, chunk: Any, _: None) -> None:
            image = load(chunk)
            where = pl.ds(chunk * high, high)
            bits = jnp.int32(1) << iota(1)
            store(above_ref.at[row, where], jnp.where(image > threshold, bits, 0).sum(axis=1))
            store(level_ref.at[row, where], jnp.where((image == threshold) & (image > LEAST), bits, 0).sum(axis=1))

        lax.fori_loop(0, here, partial(write, kept), None)
        lax.fori_loop(here, todo, partial(write, read), None)

    above, level = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, count), jnp.int32)] * 2,
        scratch_types=[plgpu.SMEM((held, high, WORD), jnp.int32)],
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=512
        ),
        interpret=kernels.interpret,
    )(scores, seen)
    return lax.bitcast_convert_type(above, jnp.uint32), lax.bitcast_convert_type(level, jnp.uint32)
