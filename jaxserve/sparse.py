"""Latent attention to chosen tokens (DeepSeek V3.2's sparse attention): an indexer scores all tokens so far by keys of
its own, and only the best are attended to. Pure functions.

The indexer is computed on every device, so that all agree; heads of attention are divided as ever. A choice are
positions in the sequence (``Selected``), so that layers after the one that chose can use it with pages of their own.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve import hot
from jaxserve.buckets import StepBucket
from jaxserve.context import Context, Selected, Setting
from jaxserve.layer_spec import Latent
from jaxserve.layers import layer_norm, rotate
from jaxserve.mla import absorb, inputs, lift, output
from jaxserve.params import Params
from pallas_kernels import indexer
from pallas_kernels.kv_write import write_keys, write_latent
from pallas_kernels.sparse_mla import sparse_mla

Pages = tuple[Any, ...]
"""Arrays of pages, and a ``hot.HotPlane`` behind them where latents are the host's."""


def attend(
    at: Setting,
    spec: Latent,
    group: int,
    params: Params,
    pages: Pages,
    x: jax.Array,
    ctx: Context,
    chosen: Selected | None,
) -> tuple[jax.Array, Pages, Selected]:
    """What attention to the chosen tokens brings to ``x [T, E]``, the ``pages`` of the layer's plane with the step's
    latents and index keys in them, and the choice: the layer's own where it has an indexer, otherwise ``chosen``.
    ``group`` is the layer's group of the cache."""
    found = inputs(at, spec, params, x, ctx)
    latents, *others = pages
    plane = others.pop() if at.hot is not None else None
    if plane is None:
        write = at.over(partial(write_latent, kernels=at.kernels), [()] * 4, ())
        latents = write(latents, found.latent, found.k_rope, ctx.slots[group])
    else:
        plane, latents = hot.write(plane, latents, found.latent, found.k_rope, ctx.slots[group], ctx.slots[-1])
    if spec.indexer is not None:
        assert found.q_latent is not None
        keys, chosen = _choose(at, spec, group, params, others[0], x, found.q_latent, ctx)
        others = [keys]
    assert chosen is not None
    if plane is None:
        near, rows = latents, cache_rows(at.bucket, ctx.tables[group], latents.shape[1], chosen)
    else:
        plane, chosen = hot.place(at, group, plane, latents, ctx, chosen, own=spec.indexer is not None)
        assert chosen.fetch is not None
        near, rows = plane.latents, chosen.fetch.rows
        others.append(plane)
    q = absorb(at, params, found.q_nope, found.q_rope)
    local = partial(sparse_mla, rank=spec.rank, scale=spec.scale, kernels=at.kernels)
    heads = (None, "heads")
    mixed = at.over(local, [heads, (), (), ()], heads)(q, near, rows, chosen.counts)
    return output(at, params, lift(at, params, mixed)), (latents, *others), chosen


def _choose(
    at: Setting,
    spec: Latent,
    group: int,
    params: Params,
    pages: jax.Array,
    x: jax.Array,
    q_latent: jax.Array,
    ctx: Context,
) -> tuple[jax.Array, Selected]:
    """The ``pages`` (see ``KeyPages``) with the step's index keys in them, and what every token attends to."""
    cfg, bucket, how = at.cfg, at.bucket, spec.indexer
    assert how is not None
    table = ctx.rope[cfg.ropes.index(spec.rope)]
    keys = layer_norm(at.linear(x, params["index_k"]), params["index_k_norm"], params["index_k_bias"], how.eps)
    keys = rotate(keys[:, None], table, pairs=how.pairs)[:, 0]
    pages = at.over(partial(write_keys, kernels=at.kernels), [()] * 3, ())(pages, keys, ctx.slots[group])
    q = rotate(at.linear(q_latent, params["index_q"]), table, pairs=how.pairs)  # [T, Hi, Di]
    gates = at.linear(x, params["index_gates"]) * how.heads**-0.5

    local: Any = partial(indexer.select, top_k=how.top_k, kernels=at.kernels)
    select = at.over(local, [()] * 6, ())

    def part(first: int, last: int, token: int, queries: int) -> tuple[jax.Array, jax.Array]:
        rows = last - first
        here = slice(token, token + rows * queries)
        positions, counts = select(
            q[here].reshape(rows, queries, *q.shape[1:]),
            gates[here].reshape(rows, queries, -1),
            pages,
            ctx.tables[group, first:last],
            *ctx.spans[:, first:last],
        )
        return positions.reshape(rows * queries, -1), counts.reshape(-1)

    parts = []
    if bucket.decodes:
        parts.append(part(0, bucket.decodes, 0, 1))
    if bucket.blocks:
        parts.append(part(bucket.decodes, bucket.rows, bucket.decodes, bucket.block))
    positions, counts = (jnp.concatenate(column) for column in zip(*parts, strict=True))
    return pages, Selected(positions, counts)


def cache_rows(bucket: StepBucket, tables: jax.Array, size: int, chosen: Selected) -> jax.Array:
    """Where the chosen tokens' latents are: int32 ``[T, k]``, ``page * size + offset``, or -1. ``tables [N, W]``."""
    blocks = bucket.decodes + jnp.repeat(jnp.arange(bucket.blocks), bucket.block)
    row = jnp.concatenate([jnp.arange(bucket.decodes), blocks])
    page = tables[row[:, None], jnp.maximum(chosen.positions, 0) // size]
    return jnp.where(chosen.positions < 0, -1, page * size + chosen.positions % size)
