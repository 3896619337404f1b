"""Cache writes on Hopper: a Mosaic GPU kernel puts rows of 32-bit words where they belong, in place.

Pages and rows are seen as words, whatever they hold: a view that costs nothing, and the kernel need not know formats.
What a token's words are is computed in jnp before (see the package): that writes and reads a step's rows once more than
one kernel for all would, which is little beside what the step reads, and the bits are those of the reference for sure.
A program writes one token. Warps go over heads and lanes over words, so that a head's row is written in whole sectors.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Kernels
from pallas_kernels.hopper import store
from pallas_kernels.kv_write.case import Case

WARPS, LANES = 4, 32
HEADS = 32
"""Rows of a page that are in registers at once."""


def declines(case: Case, kernels: Kernels) -> str | None:
    """Why this kernel does not run a case, or None."""
    if case.row % 4:
        return f"a row has {case.row} bytes; it writes words of 4"
    return None


def put(pages: jax.Array, slots: jax.Array, parts: Sequence[jax.Array], *, kernels: Kernels) -> jax.Array:
    """See ``reference.put``."""
    tokens, heads = len(slots), math.prod(parts[0].shape[1:-1])
    rows = [_words(part.reshape(tokens, heads, -1)) for part in parts]
    words = _words(pages.reshape(len(pages), heads, -1))
    size = words.shape[2] // sum(row.shape[2] for row in rows)
    place = jnp.stack([jnp.where(slots < 0, -1, slots // size), slots % size])

    def body(place_ref, *refs):
        *rows_refs, pages_ref = refs
        token = lax.axis_index("token")
        page, offset = place_ref[0, token], place_ref[1, token]

        @pl.when(page >= 0)
        def write():
            begin = 0
            for rows_ref in rows_refs:
                width = rows_ref.shape[2]
                for first, high, at, wide in _blocks(heads, width):
                    source = rows_ref.at[token, pl.ds(first, high), pl.ds(at, wide)]
                    target = pages_ref.at[page, pl.ds(first, high), pl.ds(begin + offset * width + at, wide)]
                    if high * wide == 1:
                        target[0, 0] = source[0, 0]
                    else:
                        store(target, plgpu.load(source, layout=_layout(high, wide), optimized=False))
                begin += size * width

    held = jax.new_ref(words)
    plgpu.kernel(
        body,
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=kernels.interpret,
    )(place, *rows, held)
    return lax.bitcast_convert_type(jax.freeze(held), pages.dtype).reshape(pages.shape)


def _words(x: jax.Array) -> jax.Array:
    """``x [..., n]`` as uint32 ``[..., words]``."""
    size = 4 // x.dtype.itemsize
    return lax.bitcast_convert_type(x if size == 1 else x.reshape(*x.shape[:-1], -1, size), jnp.uint32)


def _blocks(heads: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """What is written at once of rows of ``width`` words: the first row and how many, the first word and how many.

    Words are taken in multiples of a warp's lanes, and what is left in powers of two.
    """
    for first in range(0, heads, HEADS):
        at = 0
        while at < width:
            left = width - at
            wide = left // LANES * LANES or 1 << left.bit_length() - 1
            yield first, min(HEADS, heads - first), at, wide
            at += wide


def _layout(rows: int, width: int) -> Any:
    """How warps and lanes share ``rows`` of ``width`` words; what they have too many of does the same again."""
    down, across = math.gcd(rows, WARPS), min(width, LANES)

    def shared(dim: int, size: int, whole: int) -> tuple[Any, ...]:
        mine = (dim,) if size > 1 else ()
        return mine if size == whole else (*mine, plgpu.Replicated(whole // size))

    tiles, warps = (((down, across), (1,)), -3) if across > 1 else (((down, across),), -2)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), shared(warps, down, WARPS), shared(-2, across, LANES), -1)
