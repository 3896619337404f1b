"""The generic decoder: embed, layers, pick, head. Pure functions over one step's token-flat batch (see ``context``)."""

import jax
import jax.numpy as jnp

from jaxserve import mla, sparse
from jaxserve.attention import attend
from jaxserve.config import ModelConfig
from jaxserve.context import Context, Hidden, Setting
from jaxserve.layer_spec import Dense, Latent, LayerSpec, Moe, PerLayer
from jaxserve.layers import gated, linear, mlp, rms_norm
from jaxserve.moe import moe
from jaxserve.params import Params


def embed(cfg: ModelConfig, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Token embeddings, float32 ``[T, E]``."""
    rows = table[tokens].astype(jnp.float32)
    return rows if cfg.embed_scale == 1.0 else rows * jnp.asarray(cfg.embed_scale, table.dtype).astype(jnp.float32)


def layer(
    at: Setting,
    spec: LayerSpec,
    group: int,
    params: Params,
    pages: tuple[jax.Array, ...],
    hidden: Hidden,
    ctx: Context,
) -> tuple[tuple[jax.Array, ...], Hidden]:
    """One block; writes what it keeps of the step's tokens into the ``pages`` of its plane and attends over them.
    ``group`` is its group of the cache."""
    cfg, x = at.cfg, hidden.x
    normed = rms_norm(x, params["attn_norm"], cfg.norm_eps)
    if isinstance(spec.mixer, Latent) and spec.mixer.sparse:
        chosen = hidden.selected
        out, pages, chosen = sparse.attend(at, spec.mixer, group, params, pages, normed, ctx, chosen)
        if hidden.fetched is not None and chosen.fetch is not None:
            hidden = hidden._replace(fetched=hidden.fetched + chosen.fetch.counts)
            if hidden.damaged is not None and chosen.fetch.damaged is not None:
                hidden = hidden._replace(damaged=hidden.damaged | chosen.fetch.damaged)
        hidden = hidden if cfg.handed_on is None else hidden._replace(selected=chosen)
    elif isinstance(spec.mixer, Latent):
        out, pages = mla.attend(at, spec.mixer, group, params, pages, normed, ctx)
    else:
        out, kept = attend(at, spec.mixer, group, params, pages[0], normed, ctx)
        pages = (kept,)
    x = x + (rms_norm(out, params["attn_post_norm"], cfg.norm_eps) if spec.sandwich else out)
    normed = rms_norm(x, params["mlp_norm"], cfg.norm_eps)
    if isinstance(spec.ffn, Moe) and spec.ffn.beside is not None:
        out = both(at, spec.ffn, spec.ffn.beside, params, x, ctx)
    elif isinstance(spec.ffn, Moe):
        out = moe(spec.ffn, at.mesh, params, normed, ctx.real, kernels=at.kernels)
    else:
        out = mlp(spec.ffn, params, normed, at.linear)
    x = x + (rms_norm(out, params["mlp_post_norm"], cfg.norm_eps) if spec.sandwich else out)
    if spec.per_layer is not None:
        x = x + per_layer(cfg, spec.per_layer, params, x, ctx)
    if spec.scaled:
        x = x * params["scalar"]
    return pages, hidden._replace(x=x)


def both(at: Setting, spec: Moe, beside: Dense, params: Params, x: jax.Array, ctx: Context) -> jax.Array:
    """What a mixture and a network beside it make of ``x [T, E]``, before the norm over their sum."""
    cfg = at.cfg
    plain = {name: params[f"beside_{name}"] for name in ("gate", "up", "down")}
    out = mlp(beside, plain, rms_norm(x, params["mlp_norm"], cfg.norm_eps), at.linear)
    asked = rms_norm(x, params["router_norm"], cfg.norm_eps) * cfg.hidden_size**-0.5
    normed = rms_norm(x, params["moe_norm"], cfg.norm_eps)
    mixed = moe(spec, at.mesh, params, normed, ctx.real, asked, kernels=at.kernels)
    norms = params["beside_post_norm"], params["moe_post_norm"]
    return rms_norm(out, norms[0], cfg.norm_eps) + rms_norm(mixed, norms[1], cfg.norm_eps)


def per_layer(cfg: ModelConfig, spec: PerLayer, params: Params, x: jax.Array, ctx: Context) -> jax.Array:
    """What the layer's own embedding of each token brings to ``x [T, E]``."""
    table = params["per_layer_embed"]
    assert ctx.tokens is not None
    assert ctx.embedded is not None
    rows = table[ctx.tokens].astype(jnp.float32) * jnp.asarray(spec.width**0.5, table.dtype).astype(jnp.float32)
    made = linear(ctx.embedded, params["per_layer_project"]) * cfg.hidden_size**-0.5
    mixed = (rms_norm(made, params["per_layer_norm"], cfg.norm_eps) + rows) * 2**-0.5
    out = linear(gated(spec.activation, linear(x, params["per_layer_gate"]), mixed), params["per_layer_out"])
    return rms_norm(out, params["per_layer_post_norm"], cfg.norm_eps)


def head(cfg: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Logits ``[S, V]`` in float32 of hidden rows ``x [S, E]``; vocabulary rows added by padding are masked."""
    return logits(cfg, params, rms_norm(x, params["norm"], cfg.norm_eps))


def logits(cfg: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """The same of rows that have passed the last norm."""
    out = linear(x, params["head"] if "head" in params else params["embed"])
    if cfg.logit_softcap is not None:
        out = cfg.logit_softcap * jnp.tanh(out / cfg.logit_softcap)
    if out.shape[1] == cfg.vocab_size:
        return out
    return jnp.where(jnp.arange(out.shape[1]) < cfg.vocab_size, out, -jnp.inf)
