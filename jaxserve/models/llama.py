"""Llama 2 and 3, SmolLM2, and the many models that share their layout."""

from jaxserve.models.dense import dense_config

FAMILIES = {
    "llama": lambda hf: dense_config(
        hf,
        qkv_bias=bool(hf.get("attention_bias")),
        o_bias=bool(hf.get("attention_bias")),
        mlp_bias=bool(hf.get("mlp_bias")),
    )
}
