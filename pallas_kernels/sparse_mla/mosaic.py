"""Sparse latent attention on Hopper: rows are gathered by TMA, one by one, and dequantized on their way to wgmma.

A program computes up to 64 heads of one token over some of its chosen rows, 64 at a time. One warpgroup fetches rows to
a staging area; two others turn them into 16-bit tiles, each half of the channels, both score them (the same scores),
and each mixes its half of the output under an online softmax. What the programs of a token bring is merged in XLA.

A row is read as 32-bit words, which shared memory can hold and registers take apart: channel ``4c + j`` of a record is
byte j of word c, channel ``2c + j`` of a bfloat16 row is half j of it. Part j of a tile has every such channel; queries
are brought into this order before, outputs out of it afterwards, and between them it does not matter.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Kernels
from pallas_kernels.hopper import ROWS, tiled
from pallas_kernels.scores import MASKED
from pallas_kernels.sparse_mla.case import Case

PARTS = 4
"""Of the latent's channels; two belong to each of the warpgroups that compute."""
SCALES = 32
"""Words that are fetched for a row's scales."""
CHUNK = 32
"""Words that are turned at once: 128 channels of a record, which share a scale."""


PROGRAMS = 132
"""To split a token's rows for: the H200's multiprocessors."""


@dataclass(frozen=True)
class Row:
    """How a row of the cache is laid out, in words of 32 bits."""

    rank: int
    rope: int
    fp8: bool

    @property
    def width(self) -> int:
        """Channels of a part, and words of a tile of words."""
        return self.rank // PARTS

    @property
    def tiles(self) -> int:
        """Tiles of words with latent channels: all four parts are in one, or two are in each of two."""
        return 1 if self.fp8 else 2

    @property
    def rope_at(self) -> int:
        """Where the rotated channels begin."""
        return self.width + self.rank // 128 if self.fp8 else 2 * self.width

    @property
    def words(self) -> int:
        return self.rope_at + self.rope // 2

    def order(self) -> np.ndarray:
        """The channels of the latent, part after part."""
        word = np.arange(self.width)
        if self.fp8:
            return np.concatenate([4 * word + byte for byte in range(4)])
        return np.concatenate([2 * (tile * self.width + word) + half for tile in (0, 1) for half in (0, 1)])

    def rope_order(self) -> np.ndarray:
        word = np.arange(self.rope // 2)
        return np.concatenate([2 * word, 2 * word + 1])


def declines(case: Case, kernels: Kernels) -> str | None:
    """Why this kernel does not run a case, or None."""
    if case.dtype not in ("bfloat16", "uint8"):
        return f"pages are {case.dtype}; it takes bfloat16 and records of bytes"
    if case.rank % 128 or case.rank > 512:
        return f"the latent has {case.rank} channels, which are not 128, 256, 384 or 512"
    if case.rope != 64:
        return f"{case.rope} channels are rotated; it takes 64"
    return None


def sparse_mla(
    q: jax.Array,
    pages: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels,
    rank: int,
    scale: float,
) -> jax.Array:
    """See the package."""
    tokens, heads, channels = q.shape
    row = Row(rank, channels - rank, pages.dtype == jnp.uint8)
    size = 4 // pages.dtype.itemsize
    words = lax.bitcast_convert_type(pages.reshape(-1, pages.shape[-1] // size, size), jnp.uint32)  # [P * G, words]
    head_tiles = -(-heads // ROWS)
    q = jnp.pad(q, ((0, 0), (0, head_tiles * ROWS - heads), (0, 0))).astype(jnp.bfloat16)
    q = q.reshape(tokens, head_tiles, ROWS, channels)

    def parts(x: jax.Array, order: np.ndarray, count: int) -> jax.Array:
        return x[..., order].reshape(tokens, head_tiles, ROWS, count, -1).swapaxes(2, 3)

    q_latent, q_rope = parts(q, row.order(), PARTS), parts(q, rank + row.rope_order(), 2)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % ROWS)), constant_values=-1)
    real = (rows >= 0) & (jnp.arange(rows.shape[1]) < counts[:, None])
    some = jnp.maximum(jnp.where(real, rows, 0).max(1, keepdims=True), 0)
    rows = jnp.where(real, rows, ~some)  # a row that may be read, told from those that count by its sign
    steps = (jnp.minimum(counts, rows.shape[1]) + ROWS - 1) // ROWS
    programs = kernels.tuned("sparse_mla").get("programs", PROGRAMS)
    splits = max(1, min(programs // (tokens * head_tiles), rows.shape[1] // ROWS))
    first_scores = scale * math.log2(math.e)
    layout = plgpu.Layout.WGMMA
    piece = min(row.width, 64)

    def pieces(mine: int) -> list[tuple[int, Any]]:
        """Where a warpgroup's share of the output lies: part and channels."""
        parts = (2 * mine, 2 * mine + 1)
        return [(part, pl.ds(start, piece)) for part in parts for start in range(0, row.width, piece)]

    def body(q_ref, q_rope_ref, words_ref, rows_ref, steps_ref, out_ref, stats_ref, *scratch):
        q_smem, qr_smem, raw_smem, scales_smem, raw_rope_smem, k_smem, kr_smem, p_smem, *barriers = scratch
        q_ready, arrived, taken, turned, weighed, done = barriers
        token, tile, warpgroup = lax.axis_index("token"), lax.axis_index("tile"), lax.axis_index("warpgroup")
        split = lax.axis_index("split")
        part_steps = lax.div(steps_ref[token] + splits - 1, splits)
        first = split * part_steps
        todo = jnp.clip(steps_ref[token] - first, 0, part_steps)

        @pl.when(warpgroup == 2)
        def fetch():
            plgpu.set_max_registers(40, action="decrease")

            def step(i, _):
                @pl.when(i > 0)
                def wait():
                    plgpu.barrier_wait(taken)

                def one(j, _):
                    where = rows_ref[token, (first + i) * ROWS + j]
                    where = jnp.where(where < 0, ~where, where)
                    for part in range(row.tiles):
                        source = words_ref.at[where, pl.ds(part * row.width, row.width)]
                        plgpu.copy_gmem_to_smem(source, raw_smem.at[part, j], arrived)
                    if row.fp8:
                        source = words_ref.at[where, pl.ds(row.width, SCALES)]
                        plgpu.copy_gmem_to_smem(source, scales_smem.at[j], arrived)
                    source = words_ref.at[where, pl.ds(row.rope_at, row.rope // 2)]
                    plgpu.copy_gmem_to_smem(source, raw_rope_smem.at[j], arrived)

                lax.fori_loop(0, ROWS, one, None)

            lax.fori_loop(0, todo, step, None)

            @pl.when(todo > 0)
            def last():
                plgpu.barrier_wait(taken)

        def half(word, number):
            """The lower or the upper 16 bits of words, as the bfloat16 that they are."""
            bits = word << 16 if number == 0 else word & jnp.uint32(0xFFFF0000)
            return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)

        def byte(word, number):
            bits = ((word >> (8 * number)) & jnp.uint32(255)).astype(jnp.uint8)
            return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)

        def turn(mine):
            """Raw words to tiles: the parts of one warpgroup, a few words at a time so that registers suffice."""
            if row.fp8:
                found = lax.bitcast_convert_type(plgpu.load(scales_smem, layout=layout, optimized=False), jnp.float32)
                column = plgpu.broadcasted_iota(jnp.int32, (ROWS, SCALES), 1, layout=layout)
            for start in range(0, row.width, CHUNK):
                here = pl.ds(start, CHUNK)
                raw = raw_smem.at[mine if row.tiles == 2 else 0, :, here]
                word = plgpu.load(raw, layout=layout, optimized=False)
                if row.fp8:
                    scale = jnp.where(column == start // CHUNK, found, 0.0).sum(axis=1)
                    scale = lax.broadcast_in_dim(scale, (ROWS, CHUNK), [0])
                for number in range(2):
                    part = 2 * mine + number
                    value = (byte(word, part) * scale).astype(jnp.bfloat16) if row.fp8 else half(word, number)
                    k_smem[part, :, here] = value
            word = plgpu.load(raw_rope_smem, layout=layout, optimized=False)
            kr_smem[mine] = half(word, mine)

        def compute(mine):
            plgpu.set_max_registers(232, action="increase")
            if mine == 0:
                for part in range(PARTS):
                    plgpu.copy_gmem_to_smem(q_ref.at[token, tile, part], q_smem.at[part], q_ready)
                for part in range(2):
                    plgpu.copy_gmem_to_smem(q_rope_ref.at[token, tile, part], qr_smem.at[part], q_ready)
            plgpu.barrier_wait(q_ready)

            def step(i, carry):
                outs, peak, total = carry
                plgpu.barrier_wait(arrived)
                turn(mine)
                plgpu.commit_smem()
                plgpu.barrier_arrive(taken)
                plgpu.barrier_arrive(turned)
                plgpu.barrier_wait(turned)

                def scored(acc):
                    @pl.loop(0, jnp.minimum(todo, 1) * PARTS)  # not unrolled: all its addresses would be kept
                    def latent(part):
                        plgpu.wgmma(acc, q_smem.at[part], k_smem.at[part].transpose((1, 0)))

                    for part in range(2):
                        plgpu.wgmma(acc, qr_smem.at[part], kr_smem.at[part].transpose((1, 0)))
                    return acc[...]

                scores = pl.run_scoped(scored, plgpu.ACC((ROWS, ROWS), jnp.float32)) * first_scores
                here = rows_ref.at[token, pl.ds((first + i) * ROWS, ROWS)]
                chosen = plgpu.load(here, layout=layout.reduce(0), optimized=False)
                seen = lax.broadcast_in_dim(chosen, (ROWS, ROWS), [1]) >= 0
                scores = jnp.where(seen, scores, MASKED)
                new_peak = jnp.maximum(peak, scores.max(axis=1))
                weights = jnp.exp2(scores - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
                weights = jnp.where(seen, weights, 0.0)
                decay = jnp.exp2(peak - new_peak)
                new_total = total * decay + weights.sum(axis=1)
                if mine == 0:
                    p_smem[...] = weights.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                plgpu.barrier_arrive(weighed)
                plgpu.barrier_wait(weighed)
                new_outs = []
                for out, (part, here) in zip(outs, pieces(mine), strict=True):

                    def mixed(acc, part=part, here=here):
                        plgpu.wgmma(acc, p_smem, k_smem.at[part, :, here])
                        return acc[...]

                    brought = pl.run_scoped(mixed, plgpu.ACC((ROWS, piece), jnp.float32))
                    new_outs.append(out * lax.broadcast_in_dim(decay, brought.shape, [0]) + brought)
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)
                return tuple(new_outs), new_peak, new_total

            zero = plgpu.layout_cast(jnp.zeros((ROWS, piece), jnp.float32), layout)
            begin = (
                (zero,) * len(pieces(mine)),
                plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), layout.reduce(1)),
                plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)),
            )
            outs, peak, total = lax.fori_loop(0, todo, step, begin)
            for out, (part, here) in zip(outs, pieces(mine), strict=True):
                out_ref[token, tile, split, part, :, here] = out
            if mine == 0:
                stats_ref[token, tile, split, 0] = peak
                stats_ref[token, tile, split, 1] = total

        for mine in (0, 1):
            pl.when(warpgroup == mine)(functools.partial(compute, mine))

    half_rope = row.rope // 2
    fetched = ROWS * (row.tiles + row.fp8 + 1)
    out, stats = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tokens, head_tiles, splits, PARTS, ROWS, row.width), jnp.float32),
            jax.ShapeDtypeStruct((tokens, head_tiles, splits, 2, ROWS), jnp.float32),
        ],
        scratch_types=[
            tiled(PARTS, ROWS, row.width, dtype=jnp.bfloat16, widest=2 * CHUNK),
            tiled(2, ROWS, half_rope, dtype=jnp.bfloat16),
            plgpu.SMEM((row.tiles, ROWS, row.width), jnp.uint32),
            plgpu.SMEM((ROWS, SCALES) if row.fp8 else (1, 4), jnp.uint32),
            plgpu.SMEM((ROWS, half_rope), jnp.uint32),
            tiled(PARTS, ROWS, row.width, dtype=jnp.bfloat16, widest=2 * CHUNK),
            tiled(2, ROWS, half_rope, dtype=jnp.bfloat16),
            tiled(ROWS, ROWS, dtype=jnp.bfloat16, widest=2 * CHUNK),
            plgpu.Barrier(num_arrivals=PARTS + 2),
            plgpu.Barrier(num_arrivals=fetched),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(tokens, head_tiles, splits),
        grid_names=("token", "tile", "split"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=512
        ),
        interpret=kernels.interpret,
    )(q_latent, q_rope, words, rows, steps)
    peak, total = stats[:, :, :, 0], stats[:, :, :, 1]
    share = jnp.exp2(peak - peak.max(2, keepdims=True))
    total = (total * share).sum(2)[:, :, None, :, None]
    out = (out * share[:, :, :, None, :, None]).sum(2) / jnp.maximum(total, 1e-30)
    out = out.swapaxes(2, 3).reshape(tokens, head_tiles * ROWS, rank)[:, :heads]
    return out[..., np.argsort(row.order())]
