"""The experts of a mixture, computed for the tokens that chose them: cost follows the choices.

Choices are sorted by expert and cut into blocks of rows of one expert. Where a kernel takes them (``grouped_matmul``),
all blocks go through each of an expert's two products at once. Elsewhere a loop runs over the blocks that there are,
and over tiles of an expert's width, so that nothing but a tile of weights is ever copied. ``lax.ragged_dot`` would do
the same in one call, but on a CPU, and on Hopper, it expands to a product with every expert.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import quantization
from jaxserve.layers import linear
from pallas_kernels import grouped_matmul
from pallas_kernels.dispatch import REFERENCE, Kernels, choose

TILE_BYTES = 2 << 20
"""Gate and up weights of a tile: half the copy's round trip through the cache when it fits (1.4 times faster at 16 rows
and more)."""
MAX_BLOCK = 64
KERNEL_BLOCKS = (8, 128)
"""Rows of the smallest and of the largest block of a kernel; of MXFP4, whose rows go twice, half as many."""
FEW = 8
"""Rows an expert gets on average in a step, up to which padding is held down."""


class Blocks(NamedTuple):
    """Choices in the order of their experts, and the blocks they are cut into."""

    order: jax.Array
    """int32 ``[A + rows]``: the choice at each place; choices of no expert come last, then padding."""
    expert: jax.Array
    """int32 ``[most blocks]``: the expert of each block."""
    start: jax.Array
    """int32 ``[most blocks]``: where in the order a block begins. What lies beyond its expert is computed again."""
    total: jax.Array
    """int32 scalar: blocks there are."""


def block_rows(choices: int, experts: int) -> int:
    """Rows of a block, a power of two, by the rows an expert gets where choices fall evenly.

    For few, as many as waste at most 30% on rows that do nothing. For many, so many that most experts need one block:
    on a CPU a block of 16 rows takes hardly longer than one of 4.
    """
    mean = choices / min(choices, experts)
    rows = 1
    while rows < MAX_BLOCK and (rows < 1.25 * mean if mean > FEW else 2 * rows <= 1 + 0.6 * mean):
        rows *= 2
    return rows


def cut(choices: jax.Array, experts: int, rows: int) -> Blocks:
    """Sort ``choices`` (int32 ``[A]``, expert of each; ``experts`` for none) and cut them into blocks of ``rows``."""
    order = jnp.argsort(choices, stable=True).astype(jnp.int32)
    counts = (choices[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    blocks = (counts + rows - 1) // rows
    last = jnp.cumsum(blocks)
    most = len(choices) // rows + min(len(choices), experts)
    number = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.minimum((last <= number[:, None]).sum(1, dtype=jnp.int32), experts - 1)
    start = (jnp.cumsum(counts) - counts)[expert] + (number - (last - blocks)[expert]) * rows
    return Blocks(jnp.pad(order, (0, rows)), expert, start, last[-1])


def kernel_rows(choices: int, experts: int, most: int) -> int:
    """Rows of a block of a kernel, a power of two. For few, so many that most experts need one block: their weights are
    what takes time. For many, no more than an expert gets on average: padding takes memory."""
    mean = choices / min(choices, experts)
    rows = KERNEL_BLOCKS[0]
    while rows < min(most, 2 * mean if mean <= most / 4 else mean):
        rows *= 2
    return rows


def mix(
    params: dict[str, Any],
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
    width_axis: str,
    kernels: Kernels = REFERENCE,
) -> jax.Array:
    """Sum over each token's choices of weight times that expert's output, float32 ``[T, E]``.

    params: ``gate_up [X, 2, F, E]``, ``down [X, E, F]``, and biases ``[X, 2, F]``, ``[X, E]`` where the experts have
    them. chosen: int32 ``[T, k]``, X for a choice that is not to be computed. weights: float32 ``[T, k]``. gated: joins
    gate and up. width_axis: the mesh axis the width F is divided over; the down bias is added on its first device.
    """
    tokens, per_token = chosen.shape
    if all(kernel(params[name], kernels) for name in ("gate_up", "down")):
        out, place = _by_blocks(params, x, chosen, gated, width_axis, kernels)
    else:
        out, place = _by_tiles(params, x, chosen, gated, width_axis)
    found = out[place].reshape(tokens, per_token, -1)
    computed = (chosen < params["gate_up"].shape[0])[:, :, None]
    return jnp.where(computed, found * weights[:, :, None], 0.0).sum(1)


def _by_tiles(
    params: dict[str, Any],
    x: jax.Array,
    chosen: jax.Array,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
    width_axis: str,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of experts, float32 ``[.., E]``, and int32 ``[T * k]``: which of them is each choice's."""
    per_token = chosen.shape[1]
    gate_up, down = params["gate_up"], params["down"]
    experts, _, width, hidden = gate_up.shape
    rows = block_rows(chosen.size, experts)
    if jnp.dtype(gate_up.dtype).itemsize < 4:
        rows = max(rows, 2)  # ``linear`` would double a single one
    tile = tile_width(width, 2 * hidden * jnp.dtype(gate_up.dtype).itemsize, math.lcm(_block(gate_up), _block(down)))
    blocks = cut(chosen.reshape(-1), experts, rows)
    owners = blocks.order // per_token
    x = x.astype(gate_up.dtype)

    def part(expert: jax.Array, mine: jax.Array, first: jax.Array) -> jax.Array:
        """What ``tile`` channels of an expert's width contribute to rows ``mine``."""
        weight = quantization.cut(gate_up, (expert, 0, first, 0), (1, 2, tile, hidden))
        both = linear(mine, weight)[:, 0]  # [rows, 2, tile]
        if "gate_up_bias" in params:
            both = both + lax.dynamic_slice(params["gate_up_bias"], (expert, 0, first), (1, 2, tile))
        inner = gated(both[:, 0], both[:, 1])
        return linear(inner, quantization.cut(down, (expert, 0, first), (1, hidden, tile)))[:, 0]

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        expert, start = blocks.expert[i], blocks.start[i]
        mine = x[lax.dynamic_slice_in_dim(owners, start, rows)]
        total = jnp.zeros((rows, hidden), jnp.float32)
        if "down_bias" in params:
            total = total + params["down_bias"][expert] * (lax.axis_index(width_axis) == 0)
        total = lax.fori_loop(0, width // tile, lambda j, t: t + part(expert, mine, j * tile), total)
        return lax.dynamic_update_slice_in_dim(out, total, start, 0)  # a later block mends what lies beyond this one's

    out = lax.fori_loop(0, blocks.total, block, jnp.zeros((chosen.size + rows, hidden), jnp.float32))
    numbers = jnp.arange(chosen.size)
    return out, jnp.zeros(chosen.size, jnp.int32).at[blocks.order[: chosen.size]].set(numbers)


def _by_blocks(
    params: dict[str, Any],
    x: jax.Array,
    chosen: jax.Array,
    gated: Callable[[jax.Array, jax.Array], jax.Array],
    width_axis: str,
    kernels: Kernels,
) -> tuple[jax.Array, jax.Array]:
    """As ``_by_tiles``. Every block has rows of its own, padded: those of blocks that there are not are rubbish, and
    nobody's."""
    experts, _, width, hidden = params["gate_up"].shape
    flat = chosen.reshape(-1)
    twice = any(isinstance(params[name], quantization.MxArray) for name in ("gate_up", "down"))
    rows = kernel_rows(chosen.size, experts, KERNEL_BLOCKS[1] // (2 if twice else 1))
    blocks = cut(flat, experts, rows)
    sorted_at = blocks.start[:, None] + jnp.arange(rows)
    choice = blocks.order[jnp.minimum(sorted_at, chosen.size)]  # [B, rows]
    real = (jnp.arange(len(sorted_at)) < blocks.total)[:, None] & (sorted_at < chosen.size)
    real &= flat[choice] == blocks.expert[:, None]
    numbers = jnp.arange(choice.size, dtype=jnp.int32).reshape(choice.shape)
    place = jnp.zeros(chosen.size, jnp.int32).at[jnp.where(real, choice, chosen.size)].set(numbers, mode="drop")

    def product(rows: jax.Array, name: str) -> jax.Array:
        data, scale, sides, dtype = _matrices(params[name])
        return grouped_matmul.grouped_matmul(
            rows, data, scale, blocks.expert, blocks.total, blocks=sides, dtype=dtype, kernels=kernels
        )

    both = product(x[choice // chosen.shape[1]], "gate_up").reshape(*choice.shape, 2, width)
    if "gate_up_bias" in params:
        both = both + params["gate_up_bias"][blocks.expert][:, None]
    out = product(gated(both[:, :, 0], both[:, :, 1]), "down")
    if "down_bias" in params:
        out = out + params["down_bias"][blocks.expert][:, None] * (lax.axis_index(width_axis) == 0)
    return out.reshape(-1, hidden), place


Matrices = tuple[jax.Array, jax.Array | None, tuple[int, int], str]


def _matrices(weight: quantization.Weight) -> Matrices:
    """Weights ``[X, ..., in]`` as ``grouped_matmul`` takes them: ``[X, out, in]``, scales, blocks, dtype."""

    def matrices(array: jax.Array) -> jax.Array:
        return array.reshape(array.shape[0], -1, array.shape[-1])

    if isinstance(weight, quantization.QuantArray):
        return matrices(weight.data), matrices(weight.scale), weight.sides(1), weight.dtype
    if isinstance(weight, quantization.MxArray):
        return matrices(weight.data), matrices(weight.scale), (1, weight.block), str(weight.dtype)
    return matrices(weight), None, (1, 1), str(weight.dtype)


def kernel(weight: quantization.Weight, kernels: Kernels) -> bool:
    """Whether a kernel takes the products with one of the experts' weights. Raises ``KernelError`` as ``choose``."""
    return choose(grouped_matmul.__name__, case(weight), kernels).name != "reference"


def case(weight: quantization.Weight) -> grouped_matmul.Case:
    """The facts of products with one of the experts' weights, which may also be described."""
    data, blocks = weight, (1, 1)
    if isinstance(weight, quantization.QuantArray):
        data, blocks = weight.data, weight.sides(1)
    elif isinstance(weight, quantization.MxArray):
        data, blocks = weight.data, (1, weight.block)
    outputs, inputs = math.prod(weight.shape[1:-1]), weight.shape[-1]
    return grouped_matmul.Case(str(weight.dtype), str(data.dtype), outputs, inputs, blocks)


def tile_width(width: int, channel_bytes: int, block: int = 1) -> int:
    """The widest divisor of ``width`` that is a multiple of ``block`` and whose weights fit TILE_BYTES."""
    most = max(block, TILE_BYTES // channel_bytes)
    return next((size for size in range(min(width, most), 0, -1) if width % size == 0 and size % block == 0), width)


def _block(weight: quantization.Weight) -> int:
    """How many channels of an expert's width, axis 2 of both matrices, have to stay together."""
    if isinstance(weight, quantization.QuantArray):
        return weight.blocks[2]
    return weight.block if isinstance(weight, quantization.MxArray) and len(weight.shape) == 3 else 1
