"""DeepSeek V2 and V3, and Kimi K2, which is V3 with other sizes: latent attention, and experts beside shared ones."""

from typing import Any

from jaxserve.config import ConfigError, ModelConfig
from jaxserve.models.deepseek_moe import deepseek_ffn, only
from jaxserve.models.family import Family, decoder_config
from jaxserve.models.latent import latent


def _deepseek_v2(hf: dict[str, Any]) -> ModelConfig:
    """Experts by softmax, without a bias for balance; groups are as good as their best expert."""
    method = hf.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(f"topk_method {method!r} is not supported; supported: greedy, group_limited_greedy")
    only(hf, "scoring_func", "softmax")
    only(hf, "norm_topk_prob", False)  # implementations differ in whether routed_scaling_factor counts then
    grouped = hf if method == "group_limited_greedy" else {**hf, "n_group": 1, "topk_group": 1}
    ffn = deepseek_ffn(grouped, score="softmax", renormalize=False, correction=False, group_score="max")
    attention = latent(hf)
    return decoder_config(hf, ffn=ffn, mixer=lambda layer: attention)


def _deepseek_v3(hf: dict[str, Any]) -> ModelConfig:
    attention, predictors = latent(hf), int(hf.get("num_nextn_predict_layers") or 0)
    return decoder_config(hf, ffn=deepseek_ffn(hf), mixer=lambda layer: attention, predictors=predictors)


FAMILIES = {
    "deepseek_v2": Family(_deepseek_v2),
    "deepseek_v3": Family(_deepseek_v3),
    "kimi_k2": Family(_deepseek_v3),
}
