"""Grouped-query attention over pages of keys and values: projections, rope, cache write, attention, output."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxserve.config import ModelConfig
from jaxserve.context import Context, Setting
from jaxserve.layer_spec import Attention
from jaxserve.layers import query_scale, rms_norm, rotate
from jaxserve.params import Params
from pallas_kernels.kv_write import write_heads
from pallas_kernels.paged_attention import paged_attention


def attend(
    at: Setting,
    spec: Attention,
    group: int,
    params: Params,
    pages: jax.Array,
    x: jax.Array,
    ctx: Context,
) -> tuple[jax.Array, jax.Array]:
    """What attention brings to ``x [T, E]``, and the layer's ``pages`` (see ``HeadPages``) with the step's keys and
    values in them, where it has its own. ``group`` is the layer's group of the cache."""
    cfg, bucket, tokens = at.cfg, at.bucket, x.shape[0]
    fused = at.linear(x, params["qkv"])  # [T, K, g + spec.own, D]
    if spec.qkv_bias:
        fused = fused + params["qkv_bias"]
    q = fused[:, :, : fused.shape[2] - spec.own]
    if spec.qk_norm:
        q = rms_norm(q, params["q_norm"], cfg.norm_eps)
    table = ctx.rope[cfg.ropes.index(spec.rope)]
    q = rotate(q, table)
    if spec.rope.query_scale_beta:
        q = q * query_scale(spec.rope, ctx.position)[:, None, None, None]
    wide = pages.shape[-1] - spec.head_dim if pages.ndim == 5 else 0  # made for wider heads, which others have
    heads = (None, None, "kv_heads")
    if not spec.borrows:
        k, v = keys_values(cfg, spec, params, fused, table)
        write = at.over(partial(write_heads, kernels=at.kernels), [heads, heads[1:], heads[1:], ()], heads)
        pages = write(pages, _widen(k, wide), _widen(v, wide), ctx.slots[group])
    q = _widen(q, wide)

    sinks = [params["sinks"]] if spec.sinks else []

    def local(q: jax.Array, pages: jax.Array, *rest: jax.Array) -> jax.Array:
        return paged_attention(
            q,
            pages,
            *rest[:3],
            kernels=at.kernels,
            scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=rest[3] if spec.sinks else None,
        )

    over_heads = at.over(local, [heads, heads, (), (), (), *[("kv_heads",) for _ in sinks]], heads)

    def part(q: jax.Array, first: int, last: int) -> jax.Array:
        starts, counts = ctx.spans[:, first:last]
        rows = q.reshape(last - first, -1, *q.shape[1:])
        out = over_heads(rows, pages, ctx.tables[group, first:last], starts, counts, *sinks)
        return out.reshape(q.shape)[..., : spec.head_dim]

    parts = []
    if bucket.decodes:
        parts.append(part(q[: bucket.decodes], 0, bucket.decodes))
    if bucket.blocks:
        parts.append(part(q[bucket.decodes :], bucket.decodes, bucket.rows))
    mixed = jnp.concatenate(parts).reshape(tokens, -1)
    out = at.linear(mixed, params["o"], inputs=3)
    return out + params["o_bias"] if spec.o_bias else out, pages


def keys_values(
    cfg: ModelConfig, spec: Attention, params: Params, fused: jax.Array, table: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values as they are kept, ``[T, K, D]`` each, out of what the projections made."""
    k, v = fused[:, :, -spec.own], fused[:, :, -1]
    if spec.v_norm:
        v = rms_norm(v, jnp.ones(()), cfg.norm_eps)
    if spec.qk_norm:
        k = rms_norm(k, params["k_norm"], cfg.norm_eps)
    return rotate(k, table), v


def _widen(x: jax.Array, channels: int) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, channels),)) if channels else x
