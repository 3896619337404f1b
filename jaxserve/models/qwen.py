"""Qwen2 (biases on q, k and v) and Qwen3 (norms on q and k instead); windows on layers where the config says so."""

from typing import Any

from jaxserve.models.dense import dense_config


def _qwen(hf: dict[str, Any], **traits: bool):
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window")
    kinds = hf.get("layer_types")
    first = hf.get("max_window_layers", 0)

    def window(layer: int) -> int | None:
        sliding = kinds[layer] == "sliding_attention" if kinds else layer >= first
        return hf["sliding_window"] if windowed and sliding else None

    return dense_config(hf, window=window, **traits)


FAMILIES = {
    "qwen2": lambda hf: _qwen(hf, qkv_bias=True),
    "qwen3": lambda hf: _qwen(
        hf, qk_norm=True, qkv_bias=bool(hf.get("attention_bias")), o_bias=bool(hf.get("attention_bias"))
    ),
}
