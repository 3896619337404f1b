"""Products with the weights of groups on Hopper: weights stream through shared memory as they are stored, and meet
wgmma as its left factor, so that few rows waste little.

A program computes 128 outputs of one block of rows over some of the inputs. One warpgroup fetches (TMA), the others
multiply, 64 outputs each. e4m3 is read in halves of two channels, turned to 16 bits in registers (exactly) and
multiplied from there: part j of a step's channels are the j-th of each half, and the rows are brought into that order
before. The sum over the inputs that share a scale is multiplied by it in float32. What the programs of some outputs
bring is added up in XLA.
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
    if case.dtype not in DTYPES:
        return f"products are of {case.dtype}; it takes {' and '.join(DTYPES)}"
    if case.data not in (case.dtype, FP8):
        return f"weights are {case.data}; it takes {case.dtype} and {FP8}"
    if case.outputs < ROWS:
        return f"{case.outputs} outputs are fewer than {ROWS}"
    if _span(case) < LEAST_SPAN:
        return f"{case.inputs} inputs in blocks of {case.blocks[1]} are no multiples of {LEAST_SPAN}"
    if case.data == FP8 and case.blocks[0] < 8:
        return f"{case.blocks[0]} outputs share a scale; it takes 8 and more"
    return None


def _span(case: Case) -> int:
    return math.gcd(SPAN, case.inputs, case.blocks[1] if case.data == FP8 else 0)


def block_rows(rows: int) -> int:
    """Rows of a block that the kernel takes: ``rows`` and some more."""
    return min(MOST_ROWS, -(-rows // 8) * 8)


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
    """See ``reference.grouped_matmul``. The factors are rounded to 16 bits but for the scales: these are multiplied
    with sums, in float32."""
    count, real, inputs = x.shape
    outputs = data.shape[1]
    span = _span(Case.of(data, blocks, dtype))
    fp8 = scale is not None
    parts = 2 if fp8 or span == SPAN else 1
    width, steps, rows = span // parts, inputs // span, block_rows(real)
    warpgroups = 2 if outputs >= 2 * ROWS else 1
    tile = warpgroups * ROWS
    tiles = -(-outputs // tile)
    tiling = Tiling(**kernels.tuned("grouped_matmul"))
    stages = min(tiling.stages, ROOM // (span * (tile * data.dtype.itemsize + rows * 2)))
    # Partial sums are written and read in float32: at most a quarter of the bytes of the weights.
    most = max(1, min(steps // stages, inputs // (16 * rows)))
    splits = max(1, min(tiling.programs // (count * tiles), most))
    x = jnp.pad(x.astype(dtype), ((0, 0), (0, rows - real), (0, 0))).reshape(count, rows, steps, width, parts)
    if fp8:
        x = x.transpose(0, 2, 4, 1, 3)
        data = lax.bitcast_convert_type(data.reshape(*data.shape[:2], inputs // 2, 2), jnp.uint16)
        columns = width
    else:
        x = x.reshape(count, rows, steps, parts, width).transpose(0, 2, 3, 1, 4)
        scale, columns = jnp.zeros((1, 1, 1), jnp.float32), span
    x = x.reshape(count * steps * parts, rows, width)
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

            def step(i, total):
                slot = lax.rem(i, stages)
                factor = scales(i) if fp8 else None
                plgpu.barrier_wait(arrived.at[slot])

                def product(acc):
                    if not fp8:
                        for part in range(parts):
                            left = data_smem.at[slot, here, pl.ds(part * width, width)]
                            plgpu.wgmma(acc, left, x_smem.at[slot, part].transpose((1, 0)))
                        return acc[...]
                    halves = plgpu.load(data_smem.at[slot, here], layout=layout)
                    for part in range(parts):
                        byte = (halves >> (8 * part)).astype(jnp.uint8)
                        left = lax.bitcast_convert_type(byte, jnp.float8_e4m3fn).astype(jnp.float32).astype(dtype)
                        if kernels.interpreted:  # which multiplies from shared memory alone
                            left_smem[0][number, part] = left
                            left = left_smem[0].at[number, part]
                        plgpu.wgmma(acc, left, x_smem.at[slot, part].transpose((1, 0)))
                    return acc[...]

                brought = pl.run_scoped(product, plgpu.ACC((ROWS, rows), jnp.float32))
                plgpu.barrier_arrive(consumed.at[slot])
                return total + (brought if factor is None else brought * factor)

            zero = plgpu.layout_cast(jnp.zeros((ROWS, rows), jnp.float32), layout)
            out = lax.fori_loop(0, todo, step, zero)

            @pl.when(block < total_ref[0])
            def write():
                found = out_ref.at[split, block, :, pl.ds(begin, ROWS)].transpose((1, 0))
                found[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)

        for number in range(warpgroups):
            pl.when(warpgroup == number)(functools.partial(compute, number))

    left = [tiled(warpgroups, parts, ROWS, width, dtype=dtype)] if fp8 and kernels.interpreted else []
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, count, rows, outputs), jnp.float32),
        scratch_types=[
            tiled(stages, parts, rows, width, dtype=dtype),
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
