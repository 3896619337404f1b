"""The mixture that DeepSeek V3 brought and others took over: dense layers first, then experts chosen by sigmoid scores
plus a bias that balances them, in groups, beside shared experts."""

from collections.abc import Callable
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.layer_spec import Dense, Moe, Router
from jaxserve.models.family import activation, dense, need


def deepseek_ffn(hf: dict[str, Any], **differs: Any) -> Callable[[int], Dense | Moe]:
    """The feed-forward part of each layer, from the fields that the kin of DeepSeek V3 share; ``differs`` are traits of
    a router that is not V3's (see ``Router``).

    Raises ``ConfigError`` naming a field that is missing or does not fit.
    """
    experts, groups = int(need(hf, "n_routed_experts")), int(hf.get("n_group") or 1)
    top_k, top_groups = int(need(hf, "num_experts_per_tok")), int(hf.get("topk_group") or 1)
    if experts % groups or not 1 <= top_groups <= groups or experts // groups * top_groups < top_k:
        raise ConfigError(f"n_group {groups} and topk_group {top_groups} do not fit {experts} experts, {top_k} a token")
    if "score" not in differs:
        only(hf, "scoring_func", "sigmoid")
        only(hf, "topk_method", "noaux_tc")
    traits: dict[str, Any] = {
        "score": "sigmoid",
        "renormalize": bool(hf.get("norm_topk_prob", True)),
        "correction": True,
        **differs,
    }
    scale = float(hf.get("routed_scaling_factor") or 1.0)
    router = Router(top_k=top_k, scale=scale, groups=groups, top_groups=top_groups, **traits)
    width, shared = int(need(hf, "moe_intermediate_size")), int(hf.get("n_shared_experts") or 0)
    kind = activation(hf)
    sparse = Moe(experts, width, router, kind, shared=Dense(width * shared, kind) if shared else None)
    plain, is_dense = dense(hf), _dense_layers(hf)
    return lambda layer: plain if is_dense(layer) else sparse


def only(hf: dict[str, Any], name: str, known: Any) -> None:
    """Raise ``ConfigError`` where the config has another value than the one that is known."""
    if hf.get(name) not in (None, known):
        raise ConfigError(f"{name} {hf[name]!r} is not supported for {hf['model_type']} ({known!r} is)")


def _dense_layers(hf: dict[str, Any]) -> Callable[[int], bool]:
    """Which layers have no experts; those behind the last of a list have."""
    kinds = hf.get("mlp_layer_types")
    if kinds is not None:
        return lambda layer: layer < len(kinds) and kinds[layer] == "dense"
    first, step = int(hf.get("first_k_dense_replace") or 0), hf.get("moe_layer_freq") or 1
    if isinstance(step, list) and all(kind in (0, 1) for kind in step):
        return lambda layer: layer < len(step) and step[layer] == 0
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ConfigError(f"moe_layer_freq must be a number of layers or a list of 0 and 1, got {step!r}")
    return lambda layer: layer < first or layer % step != 0
