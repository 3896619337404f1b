"""Gemma 4, the text model: windowed layers and full ones with heads of another size, values that are normed (and may be
the keys), layers at the end that attend to others' keys and values, an embedding for each layer."""

from typing import Any

import numpy as np

from jaxserve.config import ConfigError, ModelConfig
from jaxserve.layer_spec import Attention, Dense, Moe, PerLayer, Router
from jaxserve.models.expert_weights import Place, down_spec, gate_up_spec, router_specs
from jaxserve.models.family import WINDOWED, Family, activation, decoder_config, need, read_rope
from jaxserve.params import Source, columns, rows, vector
from jaxserve.rope import RopeConfig
from jaxserve.sharding import pad_to_multiple

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _gemma4(hf: dict[str, Any]) -> ModelConfig:
    if hf.get("attention_bias"):
        raise ConfigError("attention_bias is not supported for gemma4_text")
    if hf.get("use_bidirectional_attention") == "all":
        raise ConfigError("use_bidirectional_attention is not supported: queries see what stands before them")
    kinds = _kinds(hf)
    first = len(kinds) - int(hf.get("num_kv_shared_layers") or 0)
    if missing := set(kinds[first:]) - set(kinds[: max(first, 0)]):
        raise ConfigError(
            f"num_kv_shared_layers: no {min(missing)} layer before the last {len(kinds) - first} has keys"
        )
    width, kind = int(need(hf, "intermediate_size")), activation(hf)
    wide = 2 if hf.get("use_double_wide_mlp") else 1
    channels, vocab = hf.get("hidden_size_per_layer_input"), hf.get("vocab_size_per_layer_input")
    own = PerLayer(int(channels), int(vocab or need(hf, "vocab_size")), kind) if channels else None
    return decoder_config(
        {"tie_word_embeddings": True, **hf},
        ffn=lambda layer: _ffn(hf, Dense(width * wide if layer >= first else width, kind)),
        mixer=lambda layer: _mixer(hf, kinds[layer], layer, borrows=layer >= first),
        sandwich=True,
        per_layer=own,
        scaled=True,
        shared={
            "embed_scale": float(need(hf, "hidden_size")) ** 0.5,
            "logit_softcap": hf.get("final_logit_softcapping"),
        },
    )


def _ffn(hf: dict[str, Any], plain: Dense) -> Dense | Moe:
    if not hf.get("enable_moe_block"):
        return plain
    router = Router("softmax", int(need(hf, "top_k_experts")), renormalize=True, expert_scale=True)
    experts, width = int(need(hf, "num_experts")), int(need(hf, "moe_intermediate_size"))
    return Moe(experts, width, router, plain.activation, beside=plain)


def _kinds(hf: dict[str, Any]) -> list[str]:
    """Of each layer; the last is always a full one."""
    size = int(need(hf, "num_hidden_layers"))
    kinds = hf.get("layer_types") or ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(size)]
    return [*kinds[: size - 1], "full_attention"]


def _mixer(hf: dict[str, Any], kind: str, layer: int, *, borrows: bool) -> Attention:
    full = kind == "full_attention"
    heads, kv_heads, dim = int(need(hf, "num_attention_heads")), _kv_heads(hf), int(need(hf, "head_dim"))
    same = full and bool(hf.get("attention_k_eq_v"))
    if (differs := hf.get("per_layer_config")) is not None:  # the spelling of later libraries
        own = differs.get(str(layer), {})
        kv_heads, dim = int(own.get("num_key_value_heads") or kv_heads), int(own.get("head_dim") or dim)
    elif full:
        dim = int(hf.get("global_head_dim") or 512)
        kv_heads = int(hf.get("num_global_key_value_heads") or kv_heads) if same else kv_heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    return Attention(
        heads,
        kv_heads,
        dim,
        _rope(hf, kind, dim),
        None if full else int(need(hf, "sliding_window")),
        qk_norm=True,
        scale=1.0,
        v_norm=True,
        v_is_k=same,
        borrows=borrows,
    )


def _kv_heads(hf: dict[str, Any]) -> int:
    return int(hf.get("num_key_value_heads") or need(hf, "num_attention_heads"))


def _rope(hf: dict[str, Any], kind: str, dim: int) -> RopeConfig:
    ropes = hf.get("rope_parameters") or {}
    if not isinstance(ropes, dict) or not all(isinstance(rope, dict) for rope in ropes.values() if rope is not None):
        raise ConfigError(f"rope_parameters must have a rope for each kind of layer, got {ropes!r}")
    return read_rope({**hf, "rope_parameters": ropes.get(kind) or ROPES[kind]}, dim)


def _experts(at: Place) -> dict[str, Any]:
    """A mixture, and what stands beside it. All experts are one tensor on disk, the gates before the ups."""
    prefix, experts, width, hidden = at.prefix, at.spec.experts, at.spec.width, at.hidden
    both, down = prefix + "experts.gate_up_proj", prefix + "experts.down_proj"

    def read_both(source: Source, wanted: range, channels: range) -> np.ndarray:
        data = source.read(both, slice(wanted.start, wanted.stop)).reshape(len(wanted), 2, width, hidden)
        return data[:, :, channels.start : channels.stop]

    def read_down(source: Source, wanted: range, channels: range) -> np.ndarray:
        return source.read(down, slice(wanted.start, wanted.stop))[:, :, channels.start : channels.stop]

    assert at.spec.beside is not None
    wide = at.spec.beside.width
    padded = pad_to_multiple(wide, at.parallel.devices)
    norm = prefix + "{}_feedforward_layernorm_{}.weight"
    return router_specs(at, prefix + "router.proj") | {
        "router_norm": vector(prefix + "router.scale", hidden),
        "expert_scale": vector(prefix + "router.per_expert_scale", experts),
        "gate_up": gate_up_spec(at, {both: (experts, 2 * width, hidden)}, read_both),
        "down": down_spec(at, {down: (experts, hidden, width)}, read_down),
        "moe_norm": vector(norm.format("pre", 2), hidden),
        "moe_post_norm": vector(norm.format("post", 2), hidden),
        "beside_post_norm": vector(norm.format("post", 1), hidden),
        "beside_gate": rows(prefix + "mlp.gate_proj.weight", (wide, hidden), padded, "ff"),
        "beside_up": rows(prefix + "mlp.up_proj.weight", (wide, hidden), padded, "ff"),
        "beside_down": columns(prefix + "mlp.down_proj.weight", (hidden, wide), padded, "ff"),
    }


def _unused(cfg: ModelConfig) -> tuple[str, ...]:
    """Keys and values of layers that do not use their own, which some checkpoints have."""
    borrowing = (n for n, layer in enumerate(cfg.layers) if isinstance(layer.mixer, Attention) and layer.mixer.borrows)
    names = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return tuple(f"model.layers.{number}.self_attn.{name}" for number in borrowing for name in names)


FAMILIES = {"gemma4_text": Family(_gemma4, _experts, unused=_unused, layer_types=WINDOWED)}
