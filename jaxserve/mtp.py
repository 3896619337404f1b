"""Multi-token prediction (DeepSeek V3, arXiv 2412.19437): layers behind the decoder's that each look one token further.

A predictor joins what the model has made of a token with the token that follows it, and says what comes after that
one. It is a layer like the others, with a plane of the cache to itself; a token stands there under the position of the
token whose hidden row it starts from. Embedding and head are the model's own: copies that a checkpoint has beside a
predictor are let pass. Pure functions; what uses them is still to come.
"""

import jax
import jax.numpy as jnp

from jaxserve import decoder
from jaxserve.context import Context, Setting, hidden
from jaxserve.layers import rms_norm
from jaxserve.params import Params


def predict(
    at: Setting,
    number: int,
    group: int,
    params: Params,
    pages: tuple[jax.Array, ...],
    rows: jax.Array,
    following: jax.Array,
    ctx: Context,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Predictor ``number`` over a step's tokens: the ``pages`` of its plane with the step's tokens in them, and float32
    ``[T, E]``, of which ``decoder.logits`` makes logits and the next predictor starts.

    rows: ``[T, E]``, the model's hidden rows behind its last norm, or what the predictor before has returned.
    following: int32 ``[T]``, the token that comes next. params: the whole tree.
    """
    cfg, mine = at.cfg, params["predictors"][number]
    token = decoder.embed(cfg, params["embed"], following)
    parts = rms_norm(token, mine["embed_norm"], cfg.norm_eps), rms_norm(rows, mine["hidden_norm"], cfg.norm_eps)
    start = hidden(at, at.linear(jnp.concatenate(parts, axis=-1), mine["join"]))
    pages, out = decoder.layer(at, cfg.predictors[number], group, mine, pages, start, ctx)
    return pages, rms_norm(out.x, mine["norm"], cfg.norm_eps)
