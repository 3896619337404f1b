"""Qwen2 (biases on q, k and v) and Qwen3 (norms on q and k instead), dense and as a mixture of experts; windows on
layers where the config says so."""

from collections.abc import Callable
from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.layer_spec import Dense, Moe, Router
from jaxserve.models.expert_weights import per_expert
from jaxserve.models.family import WINDOWED, Family, activation, decoder_config, dense, need


def _qwen(hf: dict[str, Any], **differs: Any) -> ModelConfig:
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window")
    kinds = hf.get("layer_types")
    first = hf.get("max_window_layers", 0)

    def window(layer: int) -> int | None:
        sliding = kinds[layer] == "sliding_attention" if kinds else layer >= first
        return hf["sliding_window"] if windowed and sliding else None

    return decoder_config(hf, window=window, **differs)


def _qwen3(hf: dict[str, Any], **differs: Any) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    return _qwen(hf, qk_norm=True, qkv_bias=bias, o_bias=bias, **differs)


def _sparse(hf: dict[str, Any], **differs: Any) -> Callable[[int], Dense | Moe]:
    """The feed-forward part of each layer."""
    step, dense_layers = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    experts = int(hf.get("num_experts") or need(hf, "num_local_experts"))
    router = Router("softmax", int(need(hf, "num_experts_per_tok")), renormalize=bool(hf.get("norm_topk_prob")))
    sparse = Moe(experts, int(need(hf, "moe_intermediate_size")), router, activation(hf), **differs)

    def ffn(layer: int) -> Dense | Moe:
        return dense(hf) if layer in dense_layers or (layer + 1) % step else sparse

    return ffn


def _qwen2_moe(hf: dict[str, Any]) -> ModelConfig:
    shared = Dense(int(need(hf, "shared_expert_intermediate_size")), activation(hf))
    return _qwen(hf, qkv_bias=bool(hf.get("qkv_bias", True)), ffn=_sparse(hf, shared=shared, gated=True))


FAMILIES = {
    "qwen2": Family(lambda hf: _qwen(hf, qkv_bias=True), layer_types=WINDOWED),
    "qwen2_moe": Family(_qwen2_moe, per_expert(shared="shared_expert."), layer_types=WINDOWED),
    "qwen3": Family(_qwen3, layer_types=WINDOWED),
    "qwen3_moe": Family(lambda hf: _qwen3(hf, ffn=_sparse(hf)), layer_types=WINDOWED),
}
