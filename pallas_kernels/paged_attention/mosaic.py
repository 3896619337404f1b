"""Paged attention on Hopper: flash decoding (split over the context) and chunked prefill in one Mosaic GPU kernel.

A program computes 64 rows (queries of one KV head's group, padded) over one part of a sequence's context. One warpgroup
copies pages to shared memory (TMA), the other multiplies (wgmma) under an online softmax; parts are merged by their
log-sum-exp in XLA (Flash-Decoding, Dao et al. 2023). Page numbers are read from the table on the way.

Records of bytes are copied as 32-bit words, and the warpgroup that copies makes bfloat16 of them while the other
multiplies: byte j of word c is channel ``4c + j`` of a token, and lies at ``j * D / 4 + c`` of its row in a tile.
Queries are brought into this order before, outputs out of it afterwards, and between them it does not matter.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import Kernels
from pallas_kernels.hopper import ROWS, tiled
from pallas_kernels.paged_attention.case import Case
from pallas_kernels.scores import MASKED

DTYPES = ("bfloat16", "float16", "uint8")
WIDE_SPAN = 32
"""Tokens a step of heads wider than 192: shared memory has no room for more."""
ROOM = 220 << 10
"""Bytes of shared memory for queries, weights, outputs and what is under way."""
TURNED = 2
"""Steps whose records lie as numbers in shared memory."""


@dataclass(frozen=True)
class Tiling:
    """How a program goes through the context."""

    span: int = 64
    """Tokens a step."""
    stages: int = 3
    """Steps whose pages are under way at once."""
    programs: int = 264
    """Programs to split the context for: twice the H200's multiprocessors."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Why this kernel does not run a case, or None."""
    if case.dtype not in DTYPES:
        return f"pages are {case.dtype}; it takes bfloat16, float16 and records of bytes"
    if case.head_dim % 16 or case.head_dim > 256 or (case.head_dim > 64 and case.head_dim % 64):
        return f"head_dim {case.head_dim} is not 16, 32, 48, 64, 128, 192 or 256"
    if case.page_size % 8 or (64 % case.page_size and case.page_size % 64):
        return f"page_size {case.page_size} is not 8, 16, 32 or a multiple of 64"
    if case.dtype == "uint8" and case.head_dim not in (64, 128):
        return f"records have head_dim {case.head_dim}; it takes 64 and 128"
    if case.dtype == "uint8" and case.page_size % 64 and case.page_size != 32:
        return f"page_size {case.page_size} of records is neither 32 nor a multiple of 64"
    return None


def paged_attention(
    q: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See ``reference.paged_attention``. Products are of two 16-bit numbers, sums float32."""
    rows, queries, kv_heads, group, dim = q.shape
    size, fp8 = records.page_size(pages, dim), pages.dtype == jnp.uint8
    dtype = jnp.dtype(jnp.bfloat16 if fp8 else pages.dtype)
    parts, tokens, words = 1, pages, pages
    if fp8:  # words in two views: as rows, the first of which are the tokens; and as they are, scales at the end
        parts = 4
        words = lax.bitcast_convert_type(pages.reshape(*pages.shape[:3], -1, parts), jnp.uint32)
        tokens = words.reshape(*words.shape[:3], -1, dim // parts)
    tiling = Tiling(**kernels.tuned("paged_attention"))
    span = min(tiling.span, WIDE_SPAN if dim > 192 else tiling.span)
    piece = min(size, span)  # of a page, fetched at once
    at_once, pieces = span // piece, size // piece
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % at_once)))
    real = group * queries
    tiles = -(-real // ROWS)
    kept = ROWS if tiles > 1 else -(-real // 8) * 8
    splits = max(1, min(tiling.programs // (rows * kv_heads * tiles), tables.shape[1] * size // span))
    flat = _turned(q, dim // parts).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, real, dim).astype(dtype)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, tiles * ROWS - real), (0, 0)))
    first_scores = scale * math.log2(math.e) if softcap is None else scale

    mixers = 2 if dim > 192 else 1  # warpgroups that multiply: one keeps so many channels of 64 rows in registers
    mixed_dim = dim // mixers
    stages = max(2, min(tiling.stages, (ROOM - ROWS * (6 * dim + 2 * mixers * span)) // (4 * span * dim)))
    held = TURNED if fp8 else stages
    layout = plgpu.Layout.WGMMA

    def body(q_ref, tokens_ref, words_ref, tables_ref, spans_ref, out_ref, stats_ref, *scratch):
        q_smem, kv_smem, p_smem, out_smem, stats_smem, q_ready, ready, consumed, *raw = scratch
        row, head, tile, split = (lax.axis_index(name) for name in ("row", "head", "tile", "split"))
        start, count = spans_ref[0, row], spans_ref[1, row]
        lowest = 0 if window is None else lax.div(jnp.maximum(start - window + 1, 0), span)
        part = lax.div(lax.div(start + count + span - 1, span) - lowest + splits - 1, splits)
        first = lowest + split * part
        steps = jnp.clip(lax.div(start + count + span - 1, span) - first, 0, part)

        def copy(i, target, barrier):
            """Ask for the pages of a step."""
            slot = lax.rem(i, stages)
            for j in range(at_once):
                number = (first + i) * at_once + j
                page, offset = tables_ref[row, lax.div(number, pieces)], lax.rem(number, pieces) * piece
                here = pl.ds(j * piece, piece)
                for part in range(2):
                    source = tokens_ref.at[page, part, head, pl.ds(offset, piece)]
                    plgpu.copy_gmem_to_smem(source, target.at[slot, part, here], barrier.at[slot])
                    if fp8:
                        source = words_ref.at[page, part, head, pl.ds(size * dim // parts + offset, piece)]
                        plgpu.copy_gmem_to_smem(source, raw[1].at[slot, part, here], barrier.at[slot])

        def turn(i):
            """Make numbers of a step's records."""
            slot, to = lax.rem(i, stages), lax.rem(i, held)
            raw_smem, scales_smem, _ = raw
            width = dim // parts
            for part in range(2):
                scale = plgpu.load(scales_smem.at[slot, part], layout=layout.reduce(1), optimized=False)
                scale = lax.broadcast_in_dim(lax.bitcast_convert_type(scale, jnp.float32), (span, width), [0])
                word = plgpu.load(raw_smem.at[slot, part], layout=layout)
                for number in range(parts):
                    bits = ((word >> (8 * number)) & jnp.uint32(255)).astype(jnp.uint8)
                    value = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32) * scale
                    kv_smem[to, part, :, pl.ds(number * width, width)] = value.astype(dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[to])

        @pl.when(lax.axis_index("warpgroup") == mixers)
        def fetch():
            plgpu.set_max_registers(152 if fp8 else 40, action="decrease")
            if fp8:
                raw_smem, _, arrived = raw
                lax.fori_loop(0, jnp.minimum(steps, stages), lambda i, _: copy(i, raw_smem, arrived), None)

            def step(i, _):
                if fp8:
                    plgpu.barrier_wait(arrived.at[lax.rem(i, stages)])

                @pl.when(i >= held)
                def wait():
                    plgpu.barrier_wait(consumed.at[lax.rem(i, held)])

                if not fp8:
                    copy(i, kv_smem, ready)
                    return
                turn(i)

                @pl.when(i + stages < steps)
                def more():
                    copy(i + stages, raw_smem, arrived)

            def drain(i, _):
                plgpu.barrier_wait(consumed.at[lax.rem(i, held)])

            lax.fori_loop(0, steps, step, None)
            lax.fori_loop(jnp.maximum(steps - held, 0), steps, drain, None)

        def compute(mine):
            """All scores, and channels ``mine`` of what they mix."""
            channels = pl.ds(mine * mixed_dim, mixed_dim)
            plgpu.set_max_registers(232, action="increase")
            if mine == 0:
                plgpu.copy_gmem_to_smem(q_ref.at[row, head, pl.ds(tile * ROWS, ROWS)], q_smem, q_ready)
            plgpu.barrier_wait(q_ready)

            def across(values):
                return lax.broadcast_in_dim(values, (ROWS, span), [0])

            def step(i, carry):
                out, peak, total = carry
                slot = lax.rem(i, held)
                plgpu.barrier_wait(ready.at[slot])

                def scored(acc):
                    plgpu.wgmma(acc, q_smem, kv_smem.at[slot, 0].transpose((1, 0)))
                    return acc[...]

                scores = pl.run_scoped(scored, plgpu.ACC((ROWS, span), jnp.float32)) * first_scores
                if softcap is not None:
                    scores = softcap * math.log2(math.e) * jnp.tanh(scores / softcap)
                number = tile * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS, span), 0, layout=layout)
                key = (first + i) * span + plgpu.broadcasted_iota(jnp.int32, (ROWS, span), 1, layout=layout)
                position = start + lax.rem(number, queries)
                seen = key <= position
                if window is not None:
                    seen &= key > position - window
                scores = jnp.where(seen, scores, MASKED)
                new_peak = jnp.maximum(peak, scores.max(axis=1))
                weights = jnp.exp2(scores - across(new_peak))
                decay = jnp.exp2(peak - new_peak)
                p_smem[mine] = weights.astype(dtype)
                plgpu.commit_smem()

                def mixed(acc):
                    plgpu.wgmma(acc, p_smem.at[mine], kv_smem.at[slot, 1, :, channels])
                    return acc[...]

                brought = pl.run_scoped(mixed, plgpu.ACC((ROWS, mixed_dim), jnp.float32))
                plgpu.barrier_arrive(consumed.at[slot])
                out = out * lax.broadcast_in_dim(decay, (ROWS, mixed_dim), [0]) + brought
                return out, new_peak, total * decay + weights.sum(axis=1)

            begin = (
                plgpu.layout_cast(jnp.zeros((ROWS, mixed_dim), jnp.float32), layout),
                plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), layout.reduce(1)),
                plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1)),
            )
            out, peak, total = lax.fori_loop(0, steps, step, begin)
            out_smem[mine] = out
            if mine == 0:
                stats_smem[0] = peak
                stats_smem[1] = total
            plgpu.commit_smem()
            where = pl.ds(tile * ROWS, kept)
            target = out_ref.at[row, head, split, where, channels]
            plgpu.copy_smem_to_gmem(out_smem.at[mine, pl.ds(0, kept)], target)
            if mine == 0:
                plgpu.copy_smem_to_gmem(stats_smem, stats_ref.at[row, head, split, tile])
            plgpu.wait_smem_to_gmem(0)

        for mine in range(mixers):
            pl.when(lax.axis_index("warpgroup") == mine)(functools.partial(compute, mine))

    widest = min(128, plgpu.find_swizzle(16 * dim), plgpu.find_swizzle(16 * span))  # one for all that wgmma reads
    if fp8:
        widest = dim // 2  # a quarter of the channels is written at once: whole tiles
    raw: list[Any] = []
    if fp8:
        swizzle = plgpu.SwizzleTransform(dim)  # type: ignore[abstract]
        raw = [
            plgpu.SMEM((stages, 2, span, dim // parts), jnp.uint32, transforms=(swizzle,)),
            plgpu.SMEM((stages, 2, span), jnp.uint32),
            plgpu.Barrier(num_arrivals=4 * at_once, num_barriers=stages),
        ]
    out, stats = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, kv_heads, splits, (tiles - 1) * ROWS + kept, dim), jnp.float32),
            jax.ShapeDtypeStruct((rows, kv_heads, splits, tiles, 2, ROWS), jnp.float32),
        ],
        scratch_types=[
            tiled(ROWS, dim, dtype=dtype, widest=widest),
            tiled(held, 2, span, dim, dtype=dtype, widest=widest),
            tiled(mixers, ROWS, span, dtype=dtype, widest=widest),
            plgpu.SMEM((mixers, ROWS, mixed_dim), jnp.float32),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=1 if fp8 else 2 * at_once, num_barriers=held),
            plgpu.Barrier(num_arrivals=mixers, num_barriers=held),
            *raw,
        ],
        grid=(rows, kv_heads, tiles, splits),
        grid_names=("row", "head", "tile", "split"),
        num_threads=mixers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=kernels.interpret,
    )(flat, tokens, words, tables, jnp.stack([starts, counts]))
    out = out[:, :, :, :real]
    peak, total = (stats[..., part, :].reshape(rows, kv_heads, splits, -1)[..., :real] for part in (0, 1))
    top = peak.max(2)
    share = jnp.exp2(peak - top[:, :, None])
    total = (total * share).sum(2)
    if sinks is not None:
        total = total + jnp.exp2(jnp.repeat(sinks, queries, axis=1) * math.log2(math.e) - top)
    out = (out * share[..., None]).sum(2) / jnp.maximum(total, 1e-30)[..., None]
    out = out.reshape(rows, kv_heads, group, queries, dim).transpose(0, 3, 1, 2, 4)
    return _turned(out, parts)


def _turned(x: jax.Array, count: int) -> jax.Array:
    """``x [..., D]`` as a matrix of ``count`` rows, transposed, and as a vector again."""
    return x.reshape(*x.shape[:-1], count, -1).swapaxes(-1, -2).reshape(x.shape)
