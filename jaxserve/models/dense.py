"""What the dense families share: reading the common fields of a config, and the names of their tensors on disk."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.config import ConfigError, LayerSpec, ModelConfig
from jaxserve.params import Index, ParamSpec, Source, Specs, columns, rows, vector
from jaxserve.rope import RopeError, parse_rope
from jaxserve.sharding import HeadLayout, head_layout, pad_to_multiple

IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Endings of tensors that some checkpoints carry and no model needs."""


def dense_config(
    hf: dict[str, Any], *, window: Callable[[int], int | None] = lambda layer: None, **traits: Any
) -> ModelConfig:
    """The common part of every dense config; ``window(layer)`` is the layer's sliding window, ``traits`` the rest.

    Raises ``ConfigError`` naming a field that is missing or not supported.
    """

    def need(name: str) -> Any:
        if hf.get(name) is None:
            raise ConfigError(f"config.json does not give {name!r}")
        return hf[name]

    activation = hf.get("hidden_act", hf.get("hidden_activation", "silu"))
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported (silu is)")
    heads = int(need("num_attention_heads"))
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    head_dim = int(hf.get("head_dim") or need("hidden_size") // heads)
    try:
        rope = parse_rope(hf, head_dim)
    except RopeError as error:
        raise ConfigError(str(error)) from None
    return ModelConfig(
        model_type=hf["model_type"],
        vocab_size=int(need("vocab_size")),
        hidden_size=int(need("hidden_size")),
        intermediate_size=int(need("intermediate_size")),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerSpec(rope, window(layer)) for layer in range(int(need("num_hidden_layers")))),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        max_position=int(need("max_position_embeddings")),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        dtype=hf.get("dtype") or hf.get("torch_dtype"),
        **traits,
    )


def param_specs(cfg: ModelConfig, tensor_parallel: int, tensors: Any) -> Specs:
    """Declare every weight of a dense decoder.

    ``tensors`` are the names on disk: a head that is there though the config ties it is used, since it may differ from
    the embedding.
    """
    layout = head_layout(cfg.num_heads, cfg.num_kv_heads, tensor_parallel)
    vocab = pad_to_multiple(cfg.vocab_size, tensor_parallel)
    table = (cfg.vocab_size, cfg.hidden_size)
    specs = {
        "embed": rows("model.embed_tokens.weight", table, vocab, "vocab"),
        "norm": vector("model.norm.weight", cfg.hidden_size),
        "layers": [_layer(cfg, layout, tensor_parallel, f"model.layers.{i}.") for i in range(cfg.num_layers)],
    }
    if not cfg.tie_embeddings or "lm_head.weight" in tensors:
        specs["head"] = rows("lm_head.weight", table, vocab, "vocab")
    return specs


def _layer(cfg: ModelConfig, layout: HeadLayout, tensor_parallel: int, prefix: str) -> dict[str, ParamSpec]:
    hidden, ff = cfg.hidden_size, cfg.intermediate_size
    wide = pad_to_multiple(ff, tensor_parallel)
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    specs = {
        "attn_norm": vector(prefix + "input_layernorm.weight", hidden),
        "qkv": _qkv(cfg, layout, attn, "weight", (hidden,)),
        "o": _output(cfg, layout, attn + "o_proj.weight"),
        "mlp_norm": vector(prefix + "post_attention_layernorm.weight", hidden),
        "gate": rows(mlp + "gate_proj.weight", (ff, hidden), wide, "ff"),
        "up": rows(mlp + "up_proj.weight", (ff, hidden), wide, "ff"),
        "down": columns(mlp + "down_proj.weight", (hidden, ff), wide, "ff"),
    }
    if cfg.qkv_bias:
        specs["qkv_bias"] = _qkv(cfg, layout, attn, "bias", ())
    if cfg.o_bias:
        specs["o_bias"] = vector(attn + "o_proj.bias", hidden)
    if cfg.mlp_bias:
        specs["gate_bias"] = rows(mlp + "gate_proj.bias", (ff,), wide, "ff")
        specs["up_bias"] = rows(mlp + "up_proj.bias", (ff,), wide, "ff")
        specs["down_bias"] = vector(mlp + "down_proj.bias", hidden)
    if cfg.qk_norm:
        specs["q_norm"] = vector(attn + "q_norm.weight", cfg.head_dim)
        specs["k_norm"] = vector(attn + "k_norm.weight", cfg.head_dim)
    return specs


def _qkv(cfg: ModelConfig, layout: HeadLayout, prefix: str, kind: str, tail: tuple[int, ...]) -> ParamSpec:
    """q, k and v fused as ``[K, group + 2, D, ...]``: a KV head beside its query heads, so that one axis shards all."""
    names = [f"{prefix}{p}_proj.{kind}" for p in "qkv"]
    dim = cfg.head_dim
    counts = (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)

    def fill(source: Source, index: Index) -> np.ndarray:
        kept = range(index[0].start, index[0].stop)
        q_heads = [h for j in kept for h in layout.q_source[j]]
        kv_heads = [layout.kv_source[j] for j in kept]
        q, k, v = (_heads(source, n, h, dim) for n, h in zip(names, (q_heads, kv_heads, kv_heads), strict=True))
        q = q.reshape(len(kept), layout.group, dim, *tail)
        return np.concatenate([q, k[:, None], v[:, None]], axis=1)

    shape = (layout.kv_heads, layout.group + 2, dim, *tail)
    axes = ("kv_heads", *(None,) * (len(shape) - 1))
    return ParamSpec(shape, axes, {n: (c * dim, *tail) for n, c in zip(names, counts, strict=True)}, fill)


def _heads(source: Source, name: str, heads: list[int], dim: int) -> np.ndarray:
    """Rows of the given heads as ``[len(heads), dim, ...]``; head -1 is zero."""
    real = [h for h in heads if h >= 0]
    rows = np.concatenate([np.arange(h * dim, (h + 1) * dim) for h in real]) if real else np.zeros(0, np.int64)
    data = source.read(name, rows)
    data = data.reshape(len(real), dim, *data.shape[1:])
    if len(real) == len(heads):
        return data
    out = np.zeros((len(heads), *data.shape[1:]), data.dtype)
    out[[i for i, h in enumerate(heads) if h >= 0]] = data
    return out


def _output(cfg: ModelConfig, layout: HeadLayout, name: str) -> ParamSpec:
    """The output projection ``[E, K, group, D]``, columns in the order of the physical heads."""
    shape = (cfg.hidden_size, cfg.num_heads * cfg.head_dim)

    def fill(source: Source, index: Index) -> np.ndarray:
        data = source.read(name).reshape(cfg.hidden_size, cfg.num_heads, cfg.head_dim)
        data = np.concatenate([data, np.zeros_like(data[:, :1])], axis=1)  # head -1 is this last, zero one
        wanted = np.array(layout.q_source[index[1].start : index[1].stop])
        return data[:, wanted]

    full = (cfg.hidden_size, layout.kv_heads, layout.group, cfg.head_dim)
    return ParamSpec(full, (None, "kv_heads", None, None), {name: shape}, fill)
