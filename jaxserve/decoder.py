"""The generic decoder: embed, layers, pick, head. Pure functions over one step's token-flat batch.

A step holds R decode rows (one token each) followed by B blocks of Q prompt tokens (a block belongs to one sequence):
T = R + B * Q tokens, N = R + B rows with a page table each. ``Context`` is what every layer needs of the step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.buckets import StepBucket
from jaxserve.config import ModelConfig
from jaxserve.layer_spec import Attention, LayerSpec, Moe
from jaxserve.layers import linear, mlp, query_scale, rms_norm, rope_table, rotate
from jaxserve.moe import moe
from jaxserve.params import Params
from pallas_kernels.codecs.records import page_size
from pallas_kernels.kv_write import write_heads
from pallas_kernels.paged_attention import paged_attention


class Context(NamedTuple):
    """What the layers share in a step."""

    rope: jax.Array  # float32 [ropes, 2, T, dim / 2]
    where: jax.Array  # int32 [3, T]: page and offset each token is written to (page 0: padding), and its position
    tables: jax.Array  # int32 [N, W]: pages of each row's sequence
    spans: jax.Array  # int32 [2, N]: position of the row's first query, and how many queries are real


def copy_pages(kv: list[jax.Array], pairs: jax.Array) -> list[jax.Array]:
    """Every layer's pages ``pairs[0]`` copied to ``pairs[1]``, int32 ``[2, C]``; all are read before any is written."""
    source, target = pairs
    return [pages.at[target].set(pages[source]) for pages in kv]


def spill_pages(kv: list[jax.Array], pages: jax.Array, heads: jax.Array | None) -> jax.Array:
    """Pages int32 ``[N]`` of all layers as records ``[N, L, 2, K, ...]``; ``heads`` picks the KV heads where some are
    padding or replicas, so that a record does not depend on the number of devices."""

    def rows(array: jax.Array) -> jax.Array:
        if heads is not None:
            return array[pages][:, :, heads].reshape(len(pages), -1)
        return array.reshape(len(array), -1)[pages]  # a page as one row: XLA's CPU code copies long rows best

    _, parts, _, *head = kv[0].shape
    found = jnp.stack([rows(array) for array in kv], axis=1)
    return found.reshape(len(pages), len(kv), parts, -1, *head)


def restore_pages(
    kv: list[jax.Array], records: jax.Array, pages: jax.Array, heads: jax.Array | None
) -> list[jax.Array]:
    """Write records to pages int32 ``[N]`` of all layers; ``heads`` says which of a record's heads each KV head is."""
    if heads is not None:
        records = jax.device_put(records, jax.memory.Space.Device)[:, :, :, heads]
    records = records.reshape(*records.shape[:2], -1)

    def write(array: jax.Array, rows: jax.Array) -> jax.Array:
        return array.reshape(len(array), -1).at[pages].set(rows, mode="promise_in_bounds").reshape(array.shape)

    return [write(array, records[:, i]) for i, array in enumerate(kv)]


def ropes(cfg: ModelConfig) -> list:
    return list(dict.fromkeys(spec.mixer.rope for spec in cfg.layers))


def context(cfg: ModelConfig, bucket: StepBucket, page_size: int, tables: jax.Array, spans: jax.Array) -> Context:
    """Positions and page slots of every token, from the rows' page tables and spans. Padding goes to page 0."""
    starts, counts = spans
    rows, blocks = bucket.decodes, bucket.blocks
    row = jnp.concatenate([jnp.arange(rows), rows + jnp.repeat(jnp.arange(blocks), bucket.block)])
    offset = jnp.concatenate([jnp.zeros(rows, jnp.int32), jnp.tile(jnp.arange(bucket.block), blocks)])
    position = starts[row] + offset
    real = offset < counts[row]
    page = jnp.where(real, tables[row, jnp.minimum(position // page_size, tables.shape[1] - 1)], 0)
    where = jnp.stack([page, position % page_size, position]).astype(jnp.int32)
    return Context(rope_table(ropes(cfg), position), where, tables, spans)


def embed(cfg: ModelConfig, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Token embeddings, float32 ``[T, E]``."""
    rows = table[tokens].astype(jnp.float32)
    return rows if cfg.embed_scale == 1.0 else rows * jnp.asarray(cfg.embed_scale, table.dtype).astype(jnp.float32)


def layer(
    cfg: ModelConfig,
    spec: LayerSpec,
    bucket: StepBucket,
    mesh: Mesh,
    params: Params,
    kv: jax.Array,
    x: jax.Array,
    ctx: Context,
) -> tuple[jax.Array, jax.Array]:
    """One block over ``x [T, E]``; writes the step's keys and values into its pages ``kv`` (see ``CacheSpec``) and
    attends over them."""
    normed = rms_norm(x, params["attn_norm"], cfg.norm_eps)
    out, kv = _attention(cfg, spec.mixer, bucket, params, kv, normed, ctx)
    x = x + (rms_norm(out, params["attn_post_norm"], cfg.norm_eps) if spec.sandwich else out)
    normed = rms_norm(x, params["mlp_norm"], cfg.norm_eps)
    if isinstance(spec.ffn, Moe):
        out = moe(spec.ffn, mesh, params, normed, real=ctx.where[0] > 0)
    else:
        out = mlp(spec.ffn, params, normed)
    return x + (rms_norm(out, params["mlp_post_norm"], cfg.norm_eps) if spec.sandwich else out), kv


def _attention(
    cfg: ModelConfig, spec: Attention, bucket: StepBucket, params: Params, kv: jax.Array, x: jax.Array, ctx: Context
) -> tuple[jax.Array, jax.Array]:
    tokens = x.shape[0]
    fused = linear(x, params["qkv"])  # [T, K, g + 2, D]
    if spec.qkv_bias:
        fused = fused + params["qkv_bias"]
    q, k, v = fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]
    if spec.qk_norm:
        q, k = rms_norm(q, params["q_norm"], cfg.norm_eps), rms_norm(k, params["k_norm"], cfg.norm_eps)
    table = ctx.rope[ropes(cfg).index(spec.rope)]
    q, k = rotate(q, table), rotate(k, table)
    page, offset, position = ctx.where
    if spec.rope.query_scale_beta:
        q = q * query_scale(spec.rope, position)[:, None, None, None]
    kv = write_heads(kv, k, v, page * page_size(kv, cfg.head_dim) + offset)

    def attend(q: jax.Array, first: int, last: int) -> jax.Array:
        starts, counts = ctx.spans[:, first:last]
        rows = q.reshape(last - first, -1, *q.shape[1:])
        out = paged_attention(
            rows,
            kv,
            ctx.tables[first:last],
            starts,
            counts,
            scale=cfg.head_dim**-0.5 if spec.scale is None else spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=params["sinks"] if spec.sinks else None,
        )
        return out.reshape(q.shape)

    parts = []
    if bucket.decodes:
        parts.append(attend(q[: bucket.decodes], 0, bucket.decodes))
    if bucket.blocks:
        parts.append(attend(q[bucket.decodes :], bucket.decodes, bucket.rows))
    mixed = jnp.concatenate(parts).reshape(tokens, -1)
    out = linear(mixed, params["o"], inputs=3)
    return out + params["o_bias"] if spec.o_bias else out, kv


def head(cfg: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Logits ``[S, V]`` in float32 of hidden rows ``x [S, E]``; vocabulary rows added by padding are masked."""
    x = rms_norm(x, params["norm"], cfg.norm_eps)
    logits = linear(x, params["head"] if "head" in params else params["embed"])
    if cfg.logit_softcap is not None:
        logits = cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)
    if logits.shape[1] == cfg.vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[1]) < cfg.vocab_size, logits, -jnp.inf)
