"""What the layers of a step share, and what passes from one to the next. Pure functions.

A step holds R decode rows (one token each) followed by B blocks of Q prompt tokens (a block belongs to one sequence):
T = R + B * Q tokens, N = R + B rows with page tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxserve.buckets import StepBucket
from jaxserve.config import ModelConfig
from jaxserve.layers import linear, rope_table
from jaxserve.quantization import QuantArray, Weight
from jaxserve.residency import HotShape
from jaxserve.sharding import RULES, partition
from pallas_kernels.dispatch import REFERENCE, Kernels

Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Setting:
    """What the layers of a step are made for: nothing of it is an array."""

    cfg: ModelConfig
    bucket: StepBucket
    mesh: Mesh
    kernels: Kernels = REFERENCE
    hot: HotShape | None = None
    """What the devices hold of latents whose home is the host; None: the devices are their home."""

    @property
    def cpu(self) -> bool:
        """Whether it is for a CPU, whose XLA lacks some products of 16-bit numbers."""
        return bool(self.mesh.devices.flat[0].platform == "cpu")

    def over(self, function: Callable[..., jax.Array], axes: Sequence[Axes], out: Axes) -> Callable[..., jax.Array]:
        """``function`` on every device's own part of its arguments, whose dimensions have the logical ``axes``: XLA
        does not divide a kernel."""
        if self.mesh.size == 1:
            return function
        specs = tuple(partition(each) for each in axes)
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=partition(out), check_vma=False)

    def linear(self, x: jax.Array, weight: Weight, inputs: int = 1) -> jax.Array:
        """``layers.linear`` by the setting's kernels, with a quantized weight on every device for its own part."""
        if self.mesh.size == 1 or not self.kernels.any or not isinstance(weight, QuantArray):
            return linear(x, weight, inputs, self.kernels)
        axes = weight.axes or (None,) * len(weight.shape)
        outer, summed = axes[:-inputs], axes[-inputs]

        def local(x: jax.Array, weight: Weight) -> jax.Array:
            out = linear(x, weight, inputs, self.kernels)
            return lax.psum(out, RULES[summed]) if summed in RULES else out

        return self.over(local, [(None, summed), axes], (None, *outer))(x, weight)


class Context(NamedTuple):
    """What the layers share in a step; ``groups`` are those of the cache, and where latents are the host's one more:
    the frames of the pages, or -1."""

    rope: tuple[jax.Array, ...]  # float32 [2, T, dim / 2]: cos and sin of each of the model's ropes
    slots: jax.Array  # int32 [groups, T]: page * G + offset that each token is written to; -1: padding
    position: jax.Array  # int32 [T]
    tables: jax.Array  # int32 [groups, N, W]: pages of each row's sequence
    spans: jax.Array  # int32 [2, N]: position of the row's first query, and how many queries are real
    tokens: jax.Array | None = None  # int32 [T], where layers have embeddings of their own
    embedded: jax.Array | None = None  # float32 [T, E]: what the first layer is handed, there too
    regions: jax.Array | None = None  # int32 [N]: of each row, where latents are the host's (see ``residency``)

    @property
    def real(self) -> jax.Array:
        """bool ``[T]``: whether it is a token, not padding."""
        return self.slots[0] >= 0


class Fetch(NamedTuple):
    """Where the chosen latents are on the devices, and which have to be brought there before: the same for every layer
    that uses a choice (see ``pallas_kernels.resolver``)."""

    rows: jax.Array  # int32 [T, k]: rows of the plane's latents, -1 for none
    moves: tuple[jax.Array, ...]  # int32 [2, n, M] of the decode rows, and of the blocks: rows of the host's pages,
    # and those of the plane's latents that they go to; -1 for none
    counts: jax.Array  # int32 [3]: rows that were there, rows that were not, and those found nowhere
    damaged: jax.Array | None = None  # bool [N]: which rows the layer brought something with a wrong checksum


class Selected(NamedTuple):
    """Which earlier tokens each token attends to, where an indexer chooses them."""

    positions: jax.Array  # int32 [T, k]: the chosen ones first, then -1
    counts: jax.Array  # int32 [T]: how many they are
    fetch: Fetch | None = None  # where latents are the host's


class Hidden(NamedTuple):
    """What a layer hands to the next."""

    x: jax.Array  # float32 [T, E]
    selected: Selected | None = None  # where layers use the choice of one before them
    fetched: jax.Array | None = None  # int32 [3]: the layers' ``Fetch.counts`` so far, where latents are the host's
    damaged: jax.Array | None = None  # bool [N]: rows that have read a latent with a wrong checksum, where those are


def context(cfg: ModelConfig, bucket: StepBucket, page_size: int, tables: jax.Array, spans: jax.Array) -> Context:
    """Positions and page slots of every token, from the rows' page tables and spans."""
    starts, counts = spans
    rows, blocks = bucket.decodes, bucket.blocks
    row = jnp.concatenate([jnp.arange(rows), rows + jnp.repeat(jnp.arange(blocks), bucket.block)])
    offset = jnp.concatenate([jnp.zeros(rows, jnp.int32), jnp.tile(jnp.arange(bucket.block), blocks)])
    position = (starts[row] + offset).astype(jnp.int32)
    real = offset < counts[row]
    page = tables[:, row, jnp.minimum(position // page_size, tables.shape[2] - 1)]
    slots = jnp.where(real, page * page_size + position % page_size, -1)
    return Context(tuple(rope_table(rope, position) for rope in cfg.ropes), slots, position, tables, spans)


def hidden(at: Setting, x: jax.Array) -> Hidden:
    """What the first layer is handed: embeddings, and an empty choice where choices are handed on."""
    hot, bucket, chosen = at.hot, at.bucket, at.cfg.handed_on
    fetched = None if hot is None else jnp.zeros(3, jnp.int32)
    damaged = jnp.zeros(bucket.rows, bool) if hot is not None and hot.checked else None
    if chosen is None:
        return Hidden(x, None, fetched, damaged)
    nothing = jnp.full((bucket.tokens, chosen), -1, jnp.int32)
    selected = Selected(nothing, jnp.zeros(bucket.tokens, jnp.int32))
    if hot is not None:
        parts = [(bucket.decodes, 1), (bucket.blocks, bucket.block)]
        shapes = [(2, rows, min(queries * chosen, hot.rows)) for rows, queries in parts if rows]
        moves = tuple(jnp.full(shape, -1, jnp.int32) for shape in shapes)
        selected = selected._replace(fetch=Fetch(nothing, moves, jnp.zeros(3, jnp.int32), damaged))
    return Hidden(x, selected, fetched, damaged)
