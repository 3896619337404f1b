"""GLM-4.5 to 4.7: DeepSeek's mixture under grouped-query attention."""

from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.models.deepseek_moe import deepseek_ffn
from jaxserve.models.family import Family, decoder_config


def _glm4_moe(hf: dict[str, Any]) -> ModelConfig:
    bias, norm = bool(hf.get("attention_bias")), bool(hf.get("use_qk_norm"))
    predictors = int(hf.get("num_nextn_predict_layers") or 0)
    return decoder_config(hf, ffn=deepseek_ffn(hf), predictors=predictors, qkv_bias=bias, qk_norm=norm)


FAMILIES = {"glm4_moe": Family(_glm4_moe)}
