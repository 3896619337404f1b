"""Sparse latent attention on Hopper: rows are gathered by TMA, one by one, and dequantized on their way to wgmma.

A program computes up to 64 heads of one token over some of its chosen rows, 64 at a time. Four warpgroups hand a step
on: two turn raw rows into 16-bit tiles, half of the channels each; then one of them scores and weighs (online softmax)
while the other fetches the next rows to a staging area; the last two mix, half of the output each: it takes most of
their registers, which is why they do nothing else. What the programs of a token bring is merged in XLA.

A row is read as 32-bit words, which shared memory can hold and registers take apart: channel ``4c + j`` of a record is
byte j of word c, channel ``2c + j`` of a bfloat16 row is half j of it. A half of a tile has two kinds of such latent
channels and one of the rotated ones; queries are brought into this order before, outputs out of it afterwards, and
between them it does not matter.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Kernels
from pallas_kernels.hopper import ROWS, accumulated, tiled
from pallas_kernels.scores import MASKED
from pallas_kernels.sparse_mla.case import Case

HALVES = 2
"""Of the channels, each turned by one warpgroup and mixed by another."""
SCALES = 32
"""Words that are fetched for a row's scales."""
CHUNK = 32
"""Words that are turned at once: 128 channels of a record, which share a scale."""
MIXING, TURNING = 160, 96
"""Registers a thread of those that mix, and of the others; four warpgroups share 512."""
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
        """Channels that are alike, in words and place: byte j of each, or half j of a half of them."""
        return self.rank // 4

    @property
    def half(self) -> int:
        """Channels of a half of a tile: latent ones, then rotated ones."""
        return 2 * self.width + self.rope // 2

    @property
    def fetched(self) -> int:
        """Words that are fetched from a row's beginning: latents, and scales."""
        return self.width + SCALES if self.fp8 else 2 * self.width

    @property
    def rope_at(self) -> int:
        """The word where the rotated channels begin."""
        return self.width + self.rank // 128 if self.fp8 else 2 * self.width

    def order(self) -> np.ndarray:
        """The channels of a row in the order of tiles: ``[HALVES, half]``."""
        word, rotated = np.arange(self.width), np.arange(self.rope // 2)
        halves = []
        for half in range(HALVES):
            if self.fp8:
                latent = [4 * word + 2 * half + number for number in range(2)]
            else:
                latent = [2 * (half * self.width + word) + number for number in range(2)]
            halves.append(np.concatenate([*latent, self.rank + 2 * rotated + half]))
        return np.stack(halves)


def declines(case: Case, kernels: Kernels) -> str | None:
    """Why this kernel does not run a case, or None."""
    if case.dtype not in ("bfloat16", "uint8"):
        return f"pages are {case.dtype}; it takes bfloat16 and records of bytes"
    if case.rank % 128 or case.rank > 512:
        return f"the latent has {case.rank} channels, which are not 128, 256, 384 or 512"
    if case.rope != 64:
        return f"{case.rope} channels are rotated; it takes 64"
    if case.dtype == "uint8" and case.rank != 512 and not kernels.interpreted:
        return f"records of {case.rank} channels are no multiple of 16 bytes, which TMA wants; those of 512 are"
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
    programs: int | None = None,
) -> jax.Array:
    """See the package. programs: how many a token's rows are split for, at most."""
    tokens, heads, channels = q.shape
    row = Row(rank, channels - rank, pages.dtype == jnp.uint8)
    size = 4 // pages.dtype.itemsize
    words = lax.bitcast_convert_type(pages.reshape(-1, pages.shape[-1] // size, size), jnp.uint32)  # [P * G, words]
    head_tiles = -(-heads // ROWS)
    q = jnp.pad(q, ((0, 0), (0, head_tiles * ROWS - heads), (0, 0))).astype(jnp.bfloat16)
    q = q.reshape(tokens, head_tiles, ROWS, channels)[..., row.order()].swapaxes(2, 3)  # [T, tiles, HALVES, ROWS, half]
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % ROWS)), constant_values=-1)
    real = (rows >= 0) & (jnp.arange(rows.shape[1]) < counts[:, None])
    some = jnp.maximum(jnp.where(real, rows, 0).max(1, keepdims=True), 0)
    rows = jnp.where(real, rows, ~some)  # a row that may be read, told from those that count by its sign
    steps = jnp.where(real.any(1), (jnp.minimum(counts, rows.shape[1]) + ROWS - 1) // ROWS, 0)
    programs = programs or kernels.tuned("sparse_mla").get("programs", PROGRAMS)
    splits = max(1, min(programs // (tokens * head_tiles), rows.shape[1] // ROWS))
    first_scores = scale * math.log2(math.e)
    layout = plgpu.Layout.WGMMA
    piece = min(row.width, 128)

    def body(q_ref, words_ref, rows_ref, steps_ref, out_ref, stats_ref, *scratch):
        q_smem, raw_smem, raw_rope_smem, k_smem, p_smem, decay_smem, *barriers = scratch
        q_ready, arrived, taken, turned, weighed, mixed = barriers
        token, tile, warpgroup = lax.axis_index("token"), lax.axis_index("tile"), lax.axis_index("warpgroup")
        split = lax.axis_index("split")
        part_steps = lax.div(steps_ref[token] + splits - 1, splits)
        first = split * part_steps
        todo = jnp.clip(steps_ref[token] - first, 0, part_steps)

        def half_word(word, number):
            """The lower or the upper 16 bits of words, as the bfloat16 that they are."""
            bits = word << 16 if number == 0 else word & jnp.uint32(0xFFFF0000)
            return lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)

        def byte(word, number):
            bits = ((word >> (8 * number)) & jnp.uint32(255)).astype(jnp.uint8)
            return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)

        def turn(i, half):
            """Raw words to a half of a tile, a few words at a time so that registers suffice."""
            plgpu.barrier_wait(arrived)

            @pl.when(i > 0)
            def wait():
                plgpu.barrier_wait(mixed)

            for start in range(0, row.width, CHUNK):
                raw = raw_smem.at[:, pl.ds(start if row.fp8 else half * row.width + start, CHUNK)]
                word = plgpu.load(raw, layout=layout, optimized=False)
                if row.fp8:
                    column = raw_smem.at[:, row.width + start // CHUNK]
                    scale = plgpu.load(column, layout=layout.reduce(1), optimized=False)
                    scale = lax.broadcast_in_dim(lax.bitcast_convert_type(scale, jnp.float32), (ROWS, CHUNK), [0])
                for number in range(2):
                    if row.fp8:
                        value = (byte(word, 2 * half + number) * scale).astype(jnp.bfloat16)
                    else:
                        value = half_word(word, number)
                    k_smem[half, :, pl.ds(number * row.width + start, CHUNK)] = value
            word = plgpu.load(raw_rope_smem, layout=layout, optimized=False)
            k_smem[half, :, pl.ds(2 * row.width, row.rope // 2)] = half_word(word, half)
            plgpu.commit_smem()
            plgpu.barrier_arrive(turned)
            plgpu.barrier_arrive(taken)

        @pl.when(warpgroup == 3)
        def fetch():
            plgpu.set_max_registers(TURNING, action="decrease")

            def start(i):
                @plgpu.warp_map
                def quarter(warp):
                    def one(j, _):
                        where = rows_ref[token, (first + i) * ROWS + j]
                        where = jnp.where(where < 0, ~where, where)
                        plgpu.copy_gmem_to_smem(words_ref.at[where, pl.ds(0, row.fetched)], raw_smem.at[j], arrived)
                        source = words_ref.at[where, pl.ds(row.rope_at, row.rope // 2)]
                        plgpu.copy_gmem_to_smem(source, raw_rope_smem.at[j], arrived)

                    lax.fori_loop(warp * (ROWS // 4), (warp + 1) * (ROWS // 4), one, None)

            def step(i, _):
                turn(i, 1)
                plgpu.barrier_wait(taken)
                pl.when(i + 1 < todo)(lambda: start(i + 1))

            pl.when(todo > 0)(lambda: start(0))
            lax.fori_loop(0, todo, step, None)
            pl.when(todo > 0)(lambda: plgpu.barrier_wait(mixed))

        @pl.when(warpgroup == 2)
        def weigh():
            plgpu.set_max_registers(TURNING, action="decrease")
            for half in range(HALVES):
                plgpu.copy_gmem_to_smem(q_ref.at[token, tile, half], q_smem.at[half], q_ready)
            plgpu.barrier_wait(q_ready)

            def step(i, carry):
                peak, total = carry
                turn(i, 0)
                plgpu.barrier_wait(turned)

                def scored(acc):
                    # HALVES, but the compiler must not know it: it would keep the addresses of an unrolled loop
                    @pl.loop(0, steps_ref[tokens])
                    def product(half):
                        plgpu.wgmma(acc, q_smem.at[half], k_smem.at[half].transpose((1, 0)))

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
                p_smem[...] = weights.astype(jnp.bfloat16)
                decay_smem[...] = decay
                plgpu.commit_smem()
                plgpu.barrier_arrive(weighed)
                return new_peak, total * decay + weights.sum(axis=1)

            begin = (
                plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), layout.reduce(1)),
                plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)),
            )
            peak, total = lax.fori_loop(0, todo, step, begin)
            pl.when(todo > 0)(lambda: plgpu.barrier_wait(mixed))
            stats_ref[token, tile, split, 0] = peak
            stats_ref[token, tile, split, 1] = total

        def mix(half):
            plgpu.set_max_registers(MIXING, action="increase")

            def step(i, outs):
                plgpu.barrier_wait(weighed)
                decay = plgpu.load(decay_smem, layout=layout.reduce(1), optimized=False)
                new = []
                for number, out in enumerate(outs):
                    values = k_smem.at[half, :, pl.ds(number * piece, piece)]

                    def product(acc, values=values):
                        plgpu.wgmma(acc, p_smem, values)

                    new.append(accumulated(out * lax.broadcast_in_dim(decay, out.shape, [0]), product, kernels))
                plgpu.barrier_arrive(mixed)
                return tuple(new)

            zero = plgpu.layout_cast(jnp.zeros((ROWS, piece), jnp.float32), layout)
            outs = lax.fori_loop(0, todo, step, (zero,) * (2 * row.width // piece))
            for number, out in enumerate(outs):
                out_ref[token, tile, split, half, :, pl.ds(number * piece, piece)] = out

        for half in range(HALVES):
            pl.when(warpgroup == half)(functools.partial(mix, half))

    out, stats = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tokens, head_tiles, splits, HALVES, ROWS, 2 * row.width), jnp.float32),
            jax.ShapeDtypeStruct((tokens, head_tiles, splits, 2, ROWS), jnp.float32),
        ],
        scratch_types=[
            tiled(HALVES, ROWS, row.half, dtype=jnp.bfloat16, widest=2 * CHUNK),
            plgpu.SMEM((ROWS, row.fetched), jnp.uint32),
            plgpu.SMEM((ROWS, row.rope // 2), jnp.uint32),
            tiled(HALVES, ROWS, row.half, dtype=jnp.bfloat16, widest=2 * CHUNK),
            tiled(ROWS, ROWS, dtype=jnp.bfloat16, widest=2 * CHUNK),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=HALVES),
            plgpu.Barrier(num_arrivals=2 * ROWS),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=HALVES),
        ],
        grid=(tokens, head_tiles, splits),
        grid_names=("token", "tile", "split"),
        num_threads=4,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=512
        ),
        interpret=kernels.interpret,
    )(q, words, rows, jnp.append(steps, HALVES))
    peak, total = stats[:, :, :, 0], stats[:, :, :, 1]
    share = jnp.exp2(peak - peak.max(2, keepdims=True))
    total = (total * share).sum(2)[:, :, None, :, None]
    out = (out * share[:, :, :, None, :, None]).sum(2) / jnp.maximum(total, 1e-30)
    out = out.swapaxes(2, 3).reshape(tokens, head_tiles * ROWS, rank)[:, :heads]
    return out[..., np.argsort(row.order()[:, : 2 * row.width].reshape(-1))]
