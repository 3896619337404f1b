"""Checking the fields of config.json that several families read, before any family reads one. Null is as good as not
there; who needs a field says so (see ``family.need``)."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from jaxserve.config import ConfigError
from jaxserve.layer_spec import Attention, LayerSpec, Mixer, Moe

MOST = 2**31 - 1
"""Sizes and positions are counted in 32 bits."""

POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "decoder_sparse_step",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "index_topk_freq",
    "original_max_position_embeddings",
)
COUNTS = (  # 0: there is none of it
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "max_window_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "experts_per_token",
    "top_k_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "num_nextn_predict_layers",
    "num_kv_shared_layers",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "global_head_dim",
    "num_global_key_value_heads",
    "index_skip_topk_offset",
)
NUMBERS = (  # of a rope's parameters too
    "rms_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "factor",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "routed_scaling_factor",
    "swiglu_limit",
    "swiglu_alpha",
)


def check_fields(hf: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` naming a field that is not the number it must be, and its value."""
    for names, least in ((POSITIVE, 1), (COUNTS, 0)):
        for name in names:
            value = hf.get(name)
            if value is not None and (type(value) is not int or not least <= value <= MOST):
                raise ConfigError(
                    f"{name} must be an integer of at least {least} and at most {MOST}, got {value!r:.80}"
                )
    if "rms_norm_eps" in hf and hf["rms_norm_eps"] is None:
        raise ConfigError("rms_norm_eps must be a positive finite number, got None")
    if not isinstance(hf.get("dtype") or hf.get("torch_dtype") or "", str):
        raise ConfigError("dtype must be a string")
    _check_numbers(hf, "")
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(hf.get(name), name)


def _check_rope(params: Any, name: str) -> None:
    """The parameters of one rope, or of one for each kind of layer."""
    if params is None:
        return
    if not isinstance(params, dict):
        raise ConfigError(f"{name} must be an object, got {params!r:.80}")
    _check_numbers(params, f"{name}: ")
    for kind, value in params.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: {kind} must be a finite number, got {value!r}")
        if isinstance(value, dict):
            _check_numbers(value, f"{name}: {kind}: ")


def _check_numbers(fields: Mapping[str, Any], where: str) -> None:
    for name in NUMBERS:
        value = fields.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ConfigError(f"{where}{name} must be a positive finite number, got {value!r:.80}")


def check_kinds(hf: Mapping[str, Any], name: str, known: Collection[str]) -> None:
    """``layer_types`` and its like: a ``known`` kind for each layer, where they are given. Those of layers for
    multi-token prediction may follow.

    Raises ``ConfigError`` naming the field, and a kind that is not known.
    """
    kinds, size = hf.get(name), hf.get("num_hidden_layers")
    if kinds is None or size is None:
        return
    words = " or ".join(known)
    if not isinstance(kinds, list) or len(kinds) not in (size, size + (hf.get("num_nextn_predict_layers") or 0)):
        raise ConfigError(f"{name} must name {size} layers, each {words}, got {kinds!r:.200}")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ConfigError(f"{name}: {unknown[0]!r:.80} is not supported for {hf['model_type']}; supported: {words}")
    if "sliding_attention" in kinds and not hf.get("sliding_window"):
        raise ConfigError(f"{name} names sliding_attention, and there is no sliding_window")


def check_layers(hf: Mapping[str, Any], layers: Iterable[LayerSpec]) -> None:
    """What a family made of the fields. Raises ``ConfigError`` where experts or a rope do not fit."""
    for spec in dict.fromkeys(layers):
        _check_turns(spec.mixer)
        if isinstance(spec.mixer, Attention) and spec.mixer.window == 0:
            raise ConfigError("sliding_window must be at least 1, got 0")
        if isinstance(spec.ffn, Moe):
            _check_experts(hf, spec.ffn)


def _check_turns(mixer: Mixer) -> None:
    turned = mixer.rope.dim
    have = mixer.head_dim if isinstance(mixer, Attention) else turned
    if turned % 2 or not 2 <= turned <= have:
        raise ConfigError(f"rope cannot turn {turned} of a head's {have} channels: see head_dim, partial_rotary_factor")
    with np.errstate(all="ignore"):
        if not np.isfinite(mixer.rope.inv_freq()).all():
            raise ConfigError("rope_parameters: they give frequencies that are not finite numbers")


def _check_experts(hf: Mapping[str, Any], moe: Moe) -> None:
    top_k = moe.router.top_k
    names = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
    name = next((name for name in names if hf.get(name) == top_k), names[0])
    if not 1 <= top_k <= moe.experts:
        raise ConfigError(f"{name} is {top_k}, and there are {moe.experts} experts")
    if moe.width < 1:
        raise ConfigError(f"moe_intermediate_size must be at least 1, got {moe.width}")
