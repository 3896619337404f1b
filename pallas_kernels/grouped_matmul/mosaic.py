"""Products with the weights of groups on Hopper: weights stream through shared memory as they are stored, and meet
wgmma as its left factor, so that few rows waste little.

A program computes 128 outputs of one block of rows over some of the inputs. One warpgroup fetches (TMA), the others
multiply, 64 outputs each. e4m3 is read in halves of two channels, turned to 16 bits in registers (exactly) and
multiplied from there: part j of a step's channels are the j-th of each half, and the rows are brought into that order
before. The sum over the inputs that share a scale is multiplied by it in float32. What the programs of some outputs
bring is added up in XLA.

MXFP4 has products in float32: a row goes as two, the bfloat16 next to it and that next to what is left. Its numbers are
read four to a half, as e4m3 at first, and multiplied by their scales, exactly, before they meet the rows.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Kernels
from pallas_kernels.grouped_matmul.case import Case
from pallas_kernels.hopper import ROWS, tiled

DTYPES = ("bfloat16", "float16")
FP8 = "float8_e4m3fn"
MX = "uint8"
SPAN = 128
"""Inputs of a step, at most."""
LEAST_SPAN = 32
"""And at least: two parts of what one wgmma contracts."""
MOST_ROWS = 128
ROOM = 208 << 10
"""Bytes of shared memory for what is under way."""


@dataclass(frozen=True)
class Tiling:
    """How programs go through the weights."""

    stages: int = 6
    """Steps whose weights are under way at once, where shared memory has room for them."""
    programs: int = 264
    """Programs to split the inputs for: twice the H200's multiprocessors."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Why this kernel does not run a case, or None."""
    if case.data == MX:
        if case.dtype != "float32":
            return f"products of MXFP4 are of {case.dtype}; it takes float32"
    elif case.dtype not in DTYPES:
        return f"products are of {case.dtype}; it takes {' and '.join(DTYPES)}"
    if case.data not in (case.dtype, FP8, MX):
        return f"weights are {case.data}; it takes {case.dtype}, {FP8} and MXFP4"
    if case.outputs < ROWS:
        return f"{case.outputs} outputs are fewer than {ROWS}"
    least = LEAST_SPAN * (2 if case.data == MX else 1)
    if _span(case) < least:
        return f"{case.inputs} inputs in blocks of {case.blocks[1]} are no multiples of {least}"
    if case.data == FP8 and case.blocks[0] < 8:
        return f"{case.blocks[0]} outputs share a scale; it takes 8 and more"
    return None


def _span(case: Case) -> int:
    return math.gcd(SPAN, case.inputs, case.blocks[1] if case.data == FP8 else 0)


def block_rows(rows: int) -> int:
    """Rows of a block that the kernel takes: ``rows`` and some more."""
    return min(MOST_ROWS, -(-rows // 8) * 8)


def _twice(x: jax.Array) -> jax.Array:
    """Rows ``[B, rows, in]`` and what bfloat16 leaves of them, ``[B, 2 * rows, in]``."""
    near = x.astype(jnp.bfloat16)
    return jnp.concatenate([near, (x - near.astype(jnp.float32)).astype(jnp.bfloat16)], axis=1)


def grouped_matmul(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array | None,
    group: jax.Array,
    total: jax.Array,
    *,
    blocks: tuple[int, int] = (1, 1),
    dtype: str,
    kernels: Kernels,
) -> jax.Array:
    """See ``reference.grouped_matmul``. Of the weights nothing is rounded. MXFP4 takes blocks of up to 64 rows."""
    if data.dtype == MX:
        both = _scaled(_twice(x), data, scale, group, total, blocks=blocks, dtype=dtype, kernels=kernels)
        return both[:, : x.shape[1]] + both[:, x.shape[1] :]
    return _scaled(x.astype(dtype), data, scale, group, total, blocks=blocks, dtype=dtype, kernels=kernels)


def _scaled(
    x: jax.Array,
    data: jax.Array,
    scale: jax.Array | None,
    group: jax.Array,
    total: jax.Array,
    *,
    blocks: tuple[int, int],
    dtype: str,
    kernels: Kernels,
) -> jax.Array:
    """Of rows in 16 bits."""
    count, real, inputs = x.shape
    outputs = data.shape[1]
    span = _span(Case.of(data, blocks, dtype))
    mx, fp8 = data.dtype == MX, data.dtype == FP8
    packed = mx or fp8
    parts = 4 if mx else 2 if fp8 or span == SPAN else 1
    width, steps, rows = span // parts, inputs // span, block_rows(real)
    warpgroups = 2 if outputs >= 2 * ROWS else 1
    tile = warpgroups * ROWS
    tiles = -(-outputs // tile)
    x = jnp.pad(x, ((0, 0), (0, rows - real), (0, 0))).reshape(count, rows, steps, width, parts)
    if packed:
        x = x.transpose(0, 2, 4, 1, 3)
        data = lax.bitcast_convert_type(data.reshape(*data.shape[:2], inputs // parts, 2), jnp.uint16)
        columns = width
    else:
        x = x.reshape(count, rows, steps, parts, width).transpose(0, 2, 3, 1, 4)
        scale, columns = jnp.zeros((1, 1, 1), jnp.float32), span
    if mx:  # a word has the scales of a step
        assert scale is not None
        word = jnp.uint32 if span == SPAN else jnp.uint16
        scale = lax.bitcast_convert_type(scale.reshape(*scale.shape[:2], steps, span // 32), word)
    x = x.reshape(count * steps * parts, rows, width)
    tiling = Tiling(**kernels.tuned("grouped_matmul"))
    stages = min(tiling.stages, ROOM // (tile * columns * data.dtype.itemsize + span * rows * 2))
    # Partial sums are written and read in float32: at most a quarter of the bytes of the weights.
    most = max(1, min(steps // stages, inputs // (16 * rows)))
    splits = max(1, min(tiling.programs // (count * tiles), most))
    aligned = blocks[0] % ROWS == 0 and outputs % ROWS == 0
    distinct = 1 if aligned else (ROWS + blocks[0] - 2) // blocks[0] + 1
    layout = plgpu.Layout.WGMMA

    def body(x_ref, data_ref, scale_ref, group_ref, total_ref, out_ref, *scratch):
        x_smem, data_smem, arrived, consumed, *left_smem = scratch
        block, split, warpgroup = lax.axis_index("block"), lax.axis_index("split"), lax.axis_index("warpgroup")
        start = jnp.minimum(lax.axis_index("tile") * tile, outputs - tile)  # the last two tiles may overlap
        part_steps = -(-steps // splits)
        first = split * part_steps
        todo = jnp.where(block < total_ref[0], jnp.clip(steps - first, 0, part_steps), 0)
        mine = group_ref[block]

        @pl.when(warpgroup == warpgroups)
        def fetch():
            def step(i, _):
                slot = lax.rem(i, stages)

                @pl.when(i >= stages)
                def wait():
                    plgpu.barrier_wait(consumed.at[slot])

                here = data_ref.at[mine, pl.ds(start, tile), pl.ds((first + i) * columns, columns)]
                plgpu.copy_gmem_to_smem(here, data_smem.at[slot], arrived.at[slot])
                here = x_ref.at[pl.ds(((block * steps) + first + i) * parts, parts)]
                plgpu.copy_gmem_to_smem(here, x_smem.at[slot], arrived.at[slot])

            def drain(i, _):
                plgpu.barrier_wait(consumed.at[lax.rem(i, stages)])

            lax.fori_loop(0, todo, step, None)
            lax.fori_loop(jnp.maximum(todo - stages, 0), todo, drain, None)

        def compute(number):
            begin = start + number * ROWS
            here = pl.ds(number * ROWS, ROWS)

            def scales(k):
                """Of 64 outputs, for the inputs of step k."""
                column = lax.div((first + k) * span, blocks[1])
                top = lax.div(begin, blocks[0])
                if distinct == 1:
                    return scale_ref[mine, top, column]
                row = begin + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout.reduce(1))
                at = lax.div(row, blocks[0])
                found = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), layout.reduce(1))
                for n in range(distinct):
                    one = scale_ref[mine, jnp.minimum(top + n, scale_ref.shape[1] - 1), column]
                    found = jnp.where(at == top + n, one, found)
                return lax.broadcast_in_dim(found, (ROWS, rows), [0])

            def each_scale(k):
                """Of every number in a part of step k, times the 2^6 by which e2m1 read as e4m3 is too small."""
                found = scale_ref.at[mine, pl.ds(begin, ROWS), first + k]
                words = plgpu.load(found, layout=layout.reduce(1), optimized=False).astype(jnp.int32)
                column = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 1, layout=layout)
                byte = (lax.broadcast_in_dim(words, (ROWS, width), [0]) >> (column & ~7)) & 255
                scale = lax.bitcast_convert_type(jnp.minimum(byte + 6, 254) << 23, jnp.float32)
                return jnp.where(byte == 255, jnp.nan, scale)

            def numbers(halves, part, factor):
                """The part-th of every half's numbers, in 16 bits."""
                if mx:
                    code = halves >> (4 * part)
                    halves = ((code & 8) << 4) | ((code & 7) << 2)
                else:
                    halves = halves >> (8 * part)
                value = lax.bitcast_convert_type(halves.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)
                return (value * factor if mx else value).astype(x.dtype)

            def step(i, total):
                slot = lax.rem(i, stages)
                factor = scales(i) if fp8 else each_scale(i) if mx else None
                plgpu.barrier_wait(arrived.at[slot])

                def product(acc):
                    if not packed:
                        for part in range(parts):
                            left = data_smem.at[slot, here, pl.ds(part * width, width)]
                            plgpu.wgmma(acc, left, x_smem.at[slot, part].transpose((1, 0)))
                        return acc[...]
                    halves = plgpu.load(data_smem.at[slot, here], layout=layout)
                    for part in range(parts):
                        left = numbers(halves, part, factor)
                        if kernels.interpreted:  # which multiplies from shared memory alone
                            left_smem[0][number, part] = left
                            left = left_smem[0].at[number, part]
                        plgpu.wgmma(acc, left, x_smem.at[slot, part].transpose((1, 0)))
                    return acc[...]

                brought = pl.run_scoped(product, plgpu.ACC((ROWS, rows), jnp.float32))
                plgpu.barrier_arrive(consumed.at[slot])
                return total + (brought * factor if fp8 else brought)

            zero = plgpu.layout_cast(jnp.zeros((ROWS, rows), jnp.float32), layout)
            out = lax.fori_loop(0, todo, step, zero)

            @pl.when(block < total_ref[0])
            def write():
                found = out_ref.at[split, block, :, pl.ds(begin, ROWS)].transpose((1, 0))
                found[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)

        for number in range(warpgroups):
            pl.when(warpgroup == number)(functools.partial(compute, number))

    left = [tiled(warpgroups, parts, ROWS, width, dtype=x.dtype)] if packed and kernels.interpreted else []
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, count, rows, outputs), jnp.float32),
        scratch_types=[
            tiled(stages, parts, rows, width, dtype=x.dtype),
            tiled(stages, tile, columns, dtype=data.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            *left,
        ],
        grid=(count, tiles, splits),
        grid_names=("block", "tile", "split"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=kernels.interpret,
    )(x, data, scale, group, total.reshape(1))
    return out.sum(0)[:, :real]
