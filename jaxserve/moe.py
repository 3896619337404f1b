"""Mixture-of-experts feed-forward: a router, the chosen experts, and the shared ones. Pure functions.

Every device holds some of the experts, or a slice of the width of all of them, or both, by the sharding rules; it adds
up what its part contributes to each token, and one sum over the devices makes the result.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxserve import experts
from jaxserve.layer_spec import Moe, Router
from jaxserve.layers import gated, linear, mlp
from jaxserve.sharding import DEVICES, partition
from pallas_kernels.dispatch import REFERENCE, Kernels

AXES: dict[str, tuple[str | None, ...]] = {
    "router": (None, None),
    "router_bias": (None,),
    "correction": (None,),
    "expert_scale": (None,),
    "gate_up": ("experts", None, "expert_ff", None),
    "gate_up_bias": ("experts", None, "expert_ff"),
    "down": ("experts", None, "expert_ff"),
    "down_bias": ("experts", None),
    "shared_gate": ("ff", None),
    "shared_up": ("ff", None),
    "shared_down": (None, "ff"),
    "shared_weight": (None, None),
}
"""Logical axes of every parameter of the block."""


def moe(
    spec: Moe,
    mesh: Mesh,
    params: dict[str, Any],
    x: jax.Array,
    real: jax.Array,
    asked: jax.Array | None = None,
    *,
    kernels: Kernels = REFERENCE,
) -> jax.Array:
    """The block's output, float32 ``[T, E]``, of rows ``x [T, E]``; rows that are not ``real`` (bool ``[T]``) get 0.

    ``asked``: what the router sees of each row, where that is not ``x``.
    """
    mine = {name: params[name] for name in AXES if name in params}
    specs = {name: partition(AXES[name]) for name in mine}
    whole = partition((None, None))
    block = functools.partial(_block, spec, kernels)
    run: Callable[..., jax.Array] = jax.shard_map(
        block, mesh=mesh, in_specs=(specs, whole, whole, partition((None,))), out_specs=whole, check_vma=False
    )
    return run(mine, x, x if asked is None else asked, real)


def _block(
    spec: Moe, kernels: Kernels, params: dict[str, Any], x: jax.Array, asked: jax.Array, real: jax.Array
) -> jax.Array:
    """One device's part, summed over the devices."""
    ids, weights = route(spec.router, router_logits(params, asked), params.get("correction"))
    if spec.router.expert_scale:
        weights = weights * params["expert_scale"][ids]
    held = params["gate_up"].shape[0]
    local = ids - lax.axis_index("expert") * held
    kept = real[:, None] & (local >= 0) & (local < held)
    join = functools.partial(gated, spec.activation)
    out = experts.mix(params, x, jnp.where(kept, local, held), weights, join, "tensor", kernels)
    if spec.shared is not None:
        names = ("gate", "up", "down")
        shared = {name: params[f"shared_{name}"] for name in names}
        brought = mlp(spec.shared, shared, x, functools.partial(linear, kernels=kernels))
        if spec.gated:
            brought = brought * jax.nn.sigmoid(linear(x, params["shared_weight"]))
        out = out + jnp.where(real[:, None], brought, 0.0)
    return lax.psum(out, DEVICES)


def router_logits(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """float32 ``[T, X]``, computed in float32 whatever the dtype of the model."""
    logits = jnp.einsum("te,xe->tx", x.astype(jnp.float32), params["router"], precision=lax.Precision.HIGHEST)
    return logits + params["router_bias"] if "router_bias" in params else logits


def route(router: Router, logits: jax.Array, correction: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Choose experts by ``logits [T, X]``: their numbers, int32 ``[T, k]``, and weights, float32 ``[T, k]``."""
    if router.score == "chosen_softmax":
        best, ids = lax.top_k(logits, router.top_k)
        return ids, jax.nn.softmax(best, axis=-1) * router.scale
    scores = _SCORES[router.score](logits)
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        choice = _limit_groups(router, choice)
    _, ids = lax.top_k(choice, router.top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * router.scale


_SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": functools.partial(jax.nn.softmax, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrt_softplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
}


def _limit_groups(router: Router, choice: jax.Array) -> jax.Array:
    """-inf for the experts of all but the best groups."""
    tokens, count = choice.shape
    size = count // router.groups
    grouped = choice.reshape(tokens, router.groups, size)
    best, _ = lax.top_k(grouped, 1 if router.group_score == "max" else min(2, size))
    _, kept = lax.top_k(best.sum(-1), router.top_groups)
    allowed = (kept[:, :, None] == jnp.arange(router.groups)).any(1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(tokens, count)
