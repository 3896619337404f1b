"""Gemma 3, the text model: five windowed layers to a full one, a rope for each kind, norms around both parts of a layer
(kept as their difference from 1), scaled embeddings, a GELU gate."""

from typing import Any

from jaxserve.config import ConfigError, ModelConfig
from jaxserve.models.family import WINDOWED, Family, decoder_config, head_size, need, read_rope
from jaxserve.rope import RopeConfig


def _gemma3(hf: dict[str, Any]) -> ModelConfig:
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is not supported: queries see what stands before them")
    size = int(need(hf, "num_hidden_layers"))
    pattern = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6)
    kinds = hf.get("layer_types") or [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(size)
    ]
    ropes = {kind: _rope(hf, kind) for kind in dict.fromkeys(kinds)}
    return decoder_config(
        {"tie_word_embeddings": True, **hf},
        window=lambda layer: need(hf, "sliding_window") if kinds[layer] == "sliding_attention" else None,
        rope=lambda layer: ropes[kinds[layer]],
        sandwich=True,
        shared={
            "embed_scale": float(need(hf, "hidden_size")) ** 0.5,
            "logit_softcap": hf.get("final_logit_softcapping"),
        },
        qk_norm=True,
        scale=float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
        softcap=hf.get("attn_logit_softcapping"),
    )


def _rope(hf: dict[str, Any], kind: str) -> RopeConfig:
    """In the new spelling a dictionary for each kind of layer; in the old one scaling is for full layers alone."""
    by_kind = hf.get("rope_parameters") or {}
    if kind in by_kind:
        return read_rope({**hf, "rope_parameters": by_kind[kind]}, head_size(hf))
    if kind == "sliding_attention":
        return read_rope({**hf, "rope_theta": hf.get("rope_local_base_freq", 1e4), "rope_scaling": None}, head_size(hf))
    return read_rope({"rope_theta": 1e6, **hf}, head_size(hf))


FAMILIES = {"gemma3_text": Family(_gemma3, norm_plus=1.0, layer_types=WINDOWED)}
