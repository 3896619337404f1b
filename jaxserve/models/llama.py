"""Llama 2 and 3, SmolLM2, and the many models that share their layout."""

from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.models.family import Family, decoder_config, dense


def _llama(hf: dict[str, Any]) -> ModelConfig:
    bias = bool(hf.get("attention_bias"))
    ffn = dense(hf, bias=bool(hf.get("mlp_bias")))
    return decoder_config(hf, ffn=lambda layer: ffn, qkv_bias=bias, o_bias=bias)


FAMILIES = {"llama": Family(_llama)}
