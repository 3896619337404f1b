"""GLM-4.7 Flash: GLM's mixture under latent attention."""

from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.models.deepseek_moe import deepseek_ffn
from jaxserve.models.family import Family, decoder_config
from jaxserve.models.latent import latent


def _glm4_moe_lite(hf: dict[str, Any]) -> ModelConfig:
    hf = {"first_k_dense_replace": 1, **hf}
    attention, predictors = latent(hf), int(hf.get("num_nextn_predict_layers") or 0)
    return decoder_config(hf, ffn=deepseek_ffn(hf), mixer=lambda layer: attention, predictors=predictors)


FAMILIES = {"glm4_moe_lite": Family(_glm4_moe_lite)}
