"""Multi-head latent attention (DeepSeek V2, arXiv 2405.04434): keys and values of all heads come from one latent a
token, and the cache keeps that and a few rotated channels (see ``LatentPages``). Pure functions.

Decode is absorbed: what makes keys of latents is applied to the query instead, and what makes values to the mixed
latents. Blocks of prompt tokens make keys and values of heads, once for each sequence.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.context import Context, Setting
from jaxserve.layer_spec import Latent
from jaxserve.layers import rms_norm, rotate
from jaxserve.params import Params
from jaxserve.quantization import QuantArray
from pallas_kernels.kv_write import write_latent
from pallas_kernels.mla_attention import mla_attention, mla_prefill


class Inputs(NamedTuple):
    """What attention starts from, float32. H are the device's heads, padding among them."""

    q_nope: jax.Array  # [T, H, n]
    q_rope: jax.Array  # [T, H, r], rotated
    latent: jax.Array  # [T, R], normed
    k_rope: jax.Array  # [T, r], rotated
    q_latent: jax.Array | None  # [T, q_rank], normed, where queries are made from a latent


def inputs(at: Setting, spec: Latent, params: Params, x: jax.Array, ctx: Context) -> Inputs:
    """Queries and the tokens' latents, from ``x [T, E]``."""
    q_latent = None
    if spec.q_rank is not None:
        q_latent = rms_norm(_linear(at, params, "q_a", x), params["q_norm"], spec.eps)
    q = at.linear(x if q_latent is None else q_latent, params["q"])  # [T, H, n + r]
    joint = _linear(at, params, "kv_a", x)  # [T, R + r]
    latent = rms_norm(joint[:, : spec.rank], params["kv_norm"], spec.eps)
    table = ctx.rope[at.cfg.ropes.index(spec.rope)]
    q_rope = rotate(q[:, :, spec.nope :], table, pairs=spec.pairs)
    k_rope = rotate(joint[:, spec.rank :], table, pairs=spec.pairs)
    return Inputs(q[:, :, : spec.nope], q_rope, latent, k_rope, q_latent)


def attend(
    at: Setting,
    spec: Latent,
    group: int,
    params: Params,
    pages: tuple[jax.Array, ...],
    x: jax.Array,
    ctx: Context,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """What attention to all tokens so far brings to ``x [T, E]``, and the ``pages`` of the layer's plane with the
    step's latents in them. ``group`` is the layer's group of the cache."""
    bucket = at.bucket
    found = inputs(at, spec, params, x, ctx)
    latents, *others = pages
    write = at.over(partial(write_latent, kernels=at.kernels), [()] * 4, ())
    latents = write(latents, found.latent, found.k_rope, ctx.slots[group])

    def rows(first: int, last: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        return ctx.tables[group, first:last], *ctx.spans[:, first:last]

    parts = []
    if count := bucket.decodes:
        q = absorb(at, params, found.q_nope[:count], found.q_rope[:count])
        local = partial(mla_attention, rank=spec.rank, scale=spec.scale, kernels=at.kernels)
        heads = (None, None, "heads")
        mixed = at.over(local, [heads, (), (), (), ()], heads)(q[:, None], latents, *rows(0, count))
        parts.append(lift(at, params, mixed[:, 0]))
    if bucket.blocks:

        def expand(latent: jax.Array) -> tuple[jax.Array, jax.Array]:
            return at.linear(latent, params["k_up"]), at.linear(latent, params["v_up"])

        q = jnp.concatenate([found.q_nope[count:], found.q_rope[count:]], axis=-1)
        q = q.reshape(bucket.blocks, bucket.block, *q.shape[1:])
        span = rows(count, bucket.rows)
        out = mla_prefill(q, latents, *span, expand, rank=spec.rank, values=spec.value, scale=spec.scale)
        parts.append(out.reshape(-1, *out.shape[2:]))
    return output(at, params, jnp.concatenate(parts)), (latents, *others)


def absorb(at: Setting, params: Params, q_nope: jax.Array, q_rope: jax.Array) -> jax.Array:
    """Queries that meet latents, ``[T, H, R + r]``."""
    return jnp.concatenate([_each_head(at, "thn,hnr->thr", q_nope, params["k_up"]), q_rope], axis=-1)


def lift(at: Setting, params: Params, mixed: jax.Array) -> jax.Array:
    """Values of heads ``[T, H, D]`` from mixed latents ``[T, H, R]``."""
    return _each_head(at, "thr,hdr->thd", mixed, params["v_up"])


def output(at: Setting, params: Params, mixed: jax.Array) -> jax.Array:
    """``[T, E]`` from what the heads have mixed, ``[T, H, D]``."""
    out = at.linear(mixed.reshape(len(mixed), -1), params["o"], inputs=2)
    return out + params["o_bias"] if "o_bias" in params else out


def _linear(at: Setting, params: Params, name: str, x: jax.Array) -> jax.Array:
    out = at.linear(x, params[name])
    return out + params[f"{name}_bias"] if f"{name}_bias" in params else out


def _each_head(at: Setting, axes: str, x: jax.Array, weight: Any) -> jax.Array:
    """A product for each head, in float32. XLA's CPU backend has none of 16-bit matrices that are contracted over
    their first axis."""
    matrices = weight.dequantize() if isinstance(weight, QuantArray) else weight
    if at.cpu:
        matrices = matrices.astype(jnp.float32)
    return jnp.einsum(axes, x.astype(matrices.dtype), matrices, preferred_element_type=jnp.float32)
