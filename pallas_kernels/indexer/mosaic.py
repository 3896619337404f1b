"""The indexer on Hopper: every key is scored where it lies, and the best are found without a sort.

A program scores one part of a sequence's keys for up to eight of its queries. One warpgroup fetches pages, the others
score 64 keys each a step: keys are the rows that wgmma multiplies, heads of one query its columns, and a row's sum
over them, weighted by the gates, is the key's score. So keys are fetched, and records turned into 16-bit numbers, once
for eight queries.

A query is brought to at most 1 by a power of two for each head, which its gate takes up: float16 then holds it to 11
bits, whatever its size. A key's e4m3 is a float16 of the same bits, 2**8 smaller; its scale meets the finished sum.
Records are read as words of 32 bits, of which byte j of word c is channel ``4c + j``; queries are put in the order in
which that leaves the channels: all of byte 0, of byte 1, and so on.

No loop of XLA's depends on a length, nothing is branched on: either would make the host wait in every layer.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Kernels
from pallas_kernels.hopper import ROWS, store, tiled
from pallas_kernels.indexer.case import Case
from pallas_kernels.indexer.mosaic_best import ALONG, best, padded
from pallas_kernels.indexer.reference import everything, seen_by

DTYPES = ("bfloat16", "float16", "uint8")
WORDS = 32
"""Of a record's channels, 4 a word."""
SHIFT = 2.0**8
"""What a key's float16 of the same bits is too small by."""
FETCHING = 40
"""Registers of a thread that fetches."""
BUDGET = 1 << 28
"""Bytes of scores that may stand in memory at once."""


@dataclass(frozen=True)
class Tiling:
    """How a program goes through the context."""

    queries: int = 8
    """That keys are fetched once for."""
    workers: int = 2
    """Warpgroups that compute, 2 or 4: each has 64 keys of a step."""
    stages: int = 6
    """Steps whose pages are under way at once, where there is room."""
    room: int = 200 << 10
    """Bytes of shared memory."""
    programs: int = 132
    """Programs to split the context for: the H200's multiprocessors."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Why this kernel does not run a case, or None."""
    if case.dtype not in DTYPES:
        return f"pages are {case.dtype}; it takes bfloat16, float16 and records of bytes"
    if case.heads > 64:
        return f"there are {case.heads} heads; it takes up to 64"
    if case.dim != 128 and (case.dtype == "uint8" or case.dim not in (32, 64)):
        return f"keys have {case.dim} channels; it takes 128, of float pages 32 and 64 too"
    least = 32 if case.dtype == "uint8" else 8
    if case.page_size % least:
        return f"page_size {case.page_size} is not a multiple of {least}"
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
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """See the package. Keys of rows that see no more than ``top_k`` are not read."""
    rows, queries = q.shape[:2]
    size = padded(tables.shape[1] * Case.of(q, pages).page_size)

    def part(args: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, gates, tables, starts, counts = args
        scored = jnp.where(starts + counts > top_k, counts, 0)
        scores = _scores(q, gates, pages, tables, starts, scored, size, kernels)
        return best(scores, seen_by(starts, counts, queries), top_k, kernels)

    if tables.shape[1] * Case.of(q, pages).page_size <= top_k:
        return everything(seen_by(starts, counts, queries), top_k)
    at_once = max(1, BUDGET // (queries * size * 4))
    args = (q, gates, tables, starts, counts)
    if rows <= at_once:
        return part(args)
    more = -rows % at_once
    groups = (jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, at_once, *x.shape[1:]) for x in args)
    positions, found = (x.reshape(-1, *x.shape[2:])[:rows] for x in lax.map(part, tuple(groups)))
    return positions, found


def index_scores(
    q: jax.Array,
    gates: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    *,
    kernels: Kernels,
) -> jax.Array:
    """See ``reference.index_scores``."""
    size = tables.shape[1] * Case.of(q, pages).page_size
    scores = _scores(q, gates, pages, tables, starts, counts, padded(size), kernels)[..., :size]
    return jnp.where(jnp.arange(size) < seen_by(starts, counts, q.shape[1])[..., None], scores, -jnp.inf)


def _scores(
    q: jax.Array,
    gates: jax.Array,
    pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    width: int,
    kernels: Kernels,
) -> jax.Array:
    """float32 ``[N, Q, width]``, a multiple of 512 that a table's tokens fit in. What a query does not see is
    anything."""
    case, tiling = Case.of(q, pages), Tiling(**kernels.tuned("indexer"))
    rows, queries, heads, dim = q.shape
    workers, span = tiling.workers, tiling.workers * ROWS
    fp8, size, piece = case.dtype == "uint8", case.page_size, case.piece(span)
    dtype = jnp.float16 if fp8 else pages.dtype
    exponent = jnp.frexp(jnp.abs(q.astype(jnp.float32)).max(-1))[1]  # [N, Q, H]
    q = jnp.ldexp(q.astype(jnp.float32), -exponent[..., None])
    gates = jnp.ldexp(gates.astype(jnp.float32), exponent)
    if fp8:
        q = q[..., (4 * np.arange(WORDS) + np.arange(4)[:, None]).reshape(-1)]
    together = min(tiling.queries, queries)
    tiles = -(-queries // together)
    columns = -(-heads // WORDS) * WORDS
    more = ((0, 0), (0, tiles * together - queries), (0, columns - heads))
    q = jnp.pad(q.astype(dtype), (*more, (0, 0))).reshape(rows, tiles, together, columns, dim)
    gates = jnp.pad(gates, more).reshape(rows, tiles, together, columns)
    splits = max(1, min(tiling.programs // (rows * tiles), -(-tables.shape[1] * size // span)))
    factor = dim**-0.5
    held = together * columns * dim * 2 + (span * dim * 2 if fp8 else 0)
    fetched = span * (WORDS + 1) * 4 if fp8 else span * dim * 2
    stages = max(2, min(tiling.stages, (tiling.room - held) // fetched))
    launched = 512 // (workers + 1) // 8 * 8 * (workers + 1)  # registers of a lane of all warpgroups together
    registers = (launched - FETCHING) // workers // 8 * 8
    sources: tuple[jax.Array, ...] = (pages,)
    if fp8:
        words = lax.bitcast_convert_type(pages.reshape(len(pages), -1, 4), jnp.uint32)  # [P, G * 33]
        sources = (words.reshape(len(pages), -1, WORDS), words)
    parts = len(sources)

    def body(q_ref, gates_ref, tables_ref, spans_ref, *refs):
        sources, (out_ref, q_smem, gates_smem, k_smem, *raw, q_ready, arrived, consumed) = refs[:parts], refs[parts:]
        row, tile, split = (lax.axis_index(name) for name in ("row", "tile", "split"))
        mine = lax.axis_index("warpgroup")
        start, count = spans_ref[0, row], spans_ref[1, row]
        real = jnp.clip(count - tile * together, 0, together)
        end = jnp.where(real > 0, start + tile * together + real, 0)  # keys the last real query sees
        steps = lax.div(end + span - 1, span)
        part = lax.div(steps + splits - 1, splits)
        first = split * part
        todo = jnp.clip(steps - first, 0, part)

        @pl.when(mine == workers)
        def fetch():
            plgpu.set_max_registers(FETCHING, action="decrease")

            def step(i, _):
                slot = lax.rem(i, stages)

                @pl.when(i >= stages)
                def wait():
                    plgpu.barrier_wait(consumed.at[slot])

                for j in range(span // piece):
                    key = jnp.minimum((first + i) * span + j * piece, lax.div(end - 1, piece) * piece)
                    page, offset = tables_ref[row, lax.div(key, size)], lax.rem(key, size)
                    here = (slot, pl.ds(j * piece, piece))
                    into = raw[0] if fp8 else k_smem
                    plgpu.copy_gmem_to_smem(sources[0].at[page, pl.ds(offset, piece)], into.at[here], arrived.at[slot])
                    if fp8:
                        scales = sources[1].at[page, pl.ds(size * WORDS + offset, piece)]
                        plgpu.copy_gmem_to_smem(scales, raw[1].at[here], arrived.at[slot])

            def drain(i, _):
                plgpu.barrier_wait(consumed.at[lax.rem(i, stages)])

            lax.fori_loop(0, todo, step, None)
            lax.fori_loop(jnp.maximum(todo - stages, 0), todo, drain, None)

        @pl.when(mine < workers)
        def compute():
            plgpu.set_max_registers(registers, action="increase")

            @pl.when(mine == 0)
            def ask():
                for number in range(together):
                    plgpu.copy_gmem_to_smem(q_ref.at[row, tile, number], q_smem.at[number], q_ready)
                plgpu.copy_gmem_to_smem(gates_ref.at[row, tile], gates_smem, q_ready)

            plgpu.barrier_wait(q_ready)
            layout = plgpu.Layout.WGMMA
            where = pl.ds(mine * ROWS, ROWS)

            def half(word, number):
                """Byte ``number`` of words as the float16 of the same bits."""
                left, right = 8 - 8 * number, 8 * number - 7
                sign = word << left if left > 0 else word >> -left
                rest = word << -right if right < 0 else word >> right
                bits = (sign & jnp.uint32(0x8000)) | (rest & jnp.uint32(0x3F80))
                return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)

            def step(i, _):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(arrived.at[slot])
                if fp8:
                    word = plgpu.load(raw[0].at[slot, where], layout=ALONG, optimized=False)
                    for number in range(4):
                        k_smem[mine, :, pl.ds(number * WORDS, WORDS)] = half(word, number)
                    scale = plgpu.load(raw[1].at[slot, where], layout=layout.reduce(1), optimized=False)
                    scale = lax.bitcast_convert_type(scale, jnp.float32) * SHIFT
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(consumed.at[slot])
                    keys = k_smem.at[mine]
                else:
                    keys = k_smem.at[slot, where]

                def score(number, _):
                    def scored(acc):
                        plgpu.wgmma(acc, keys, q_smem.at[number].transpose((1, 0)))
                        return acc[...]

                    products = pl.run_scoped(scored, plgpu.ACC((ROWS, columns), jnp.float32))
                    gate = plgpu.load(gates_smem.at[number], layout=layout.reduce(0), optimized=False)
                    gate = lax.broadcast_in_dim(gate, products.shape, [1])
                    total = (jnp.maximum(products, 0.0) * gate).sum(axis=1)
                    total = total * scale * factor if fp8 else total * factor
                    store(out_ref.at[row, tile, number, pl.ds((first + i) * span + mine * ROWS, ROWS)], total)

                lax.fori_loop(0, real, score, None)
                if not fp8:
                    plgpu.barrier_arrive(consumed.at[slot])

            lax.fori_loop(0, todo, step, None)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, tiles, together, width), jnp.float32),
        scratch_types=[
            tiled(together, columns, dim, dtype=dtype, widest=64 if fp8 else 128),
            plgpu.SMEM((together, columns), jnp.float32),
            tiled(workers, ROWS, dim, dtype=dtype, widest=64) if fp8 else tiled(stages, span, dim, dtype=dtype),
            *([plgpu.SMEM((stages, span, WORDS), jnp.uint32), plgpu.SMEM((stages, span), jnp.uint32)] if fp8 else []),
            plgpu.Barrier(num_arrivals=together + 1),
            plgpu.Barrier(num_arrivals=span // piece * parts, num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        ],
        grid=(rows, tiles, splits),
        grid_names=("row", "tile", "split"),
        num_threads=workers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=kernels.interpret,
    )(q, gates, tables, jnp.stack([starts, counts]), *sources)
    return out.reshape(rows, tiles * together, -1)[:, :queries]
