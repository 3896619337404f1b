"""The weights of a decoder: shape, sharding and names on disk of every one, in Hugging Face's usual spelling."""

from collections.abc import Collection
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.layer_spec import Attention, Dense, Latent, LayerSpec, Moe
from jaxserve.models.expert_weights import Place
from jaxserve.models.family import Family
from jaxserve.models.index_weights import index_specs
from jaxserve.models.latent_weights import latent_specs, whole
from jaxserve.models.per_layer_weights import Strips, per_layer_specs
from jaxserve.params import Index, ParamSpec, Source, Specs, columns, rows, vector
from jaxserve.sharding import HeadLayout, Parallel, pad_to_multiple

IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Endings of tensors that some checkpoints carry and no model needs."""


def param_specs(
    cfg: ModelConfig, family: Family, parallel: Parallel, tensors: Collection[str], *, predictors: bool = False
) -> Specs:
    """Declare every weight of a decoder, and of the predictors behind it where they are wanted.

    ``tensors`` are the names on disk: a head that is there though the config ties it is used, since it may differ from
    the embedding.
    """
    vocab = pad_to_multiple(cfg.vocab_size, parallel.devices)
    table = (cfg.vocab_size, cfg.hidden_size)
    plus = family.norm_plus
    strips = Strips(cfg.num_layers)

    def layer(number: int, spec: LayerSpec) -> dict[str, Any]:
        prefix = f"model.layers.{number}."
        specs, place = _norms(cfg, spec, prefix, plus), prefix + "self_attn."
        if isinstance(spec.mixer, Latent):
            specs |= latent_specs(cfg.hidden_size, spec.mixer, parallel, place)
            specs |= index_specs(cfg.hidden_size, spec.mixer, place + "indexer.")
        else:
            specs |= _attention(cfg, spec.mixer, parallel, place, plus)
        specs |= per_layer_specs(cfg, spec, number, parallel, strips)
        if isinstance(spec.ffn, Moe):
            return specs | family.experts(Place(spec.ffn, cfg.hidden_size, parallel, prefix, tensors))
        return specs | _dense(cfg, spec.ffn, parallel, prefix + "mlp.")

    specs = {
        "embed": rows("model.embed_tokens.weight", table, vocab, "vocab"),
        "norm": vector("model.norm.weight", cfg.hidden_size, plus),
        "layers": [layer(number, spec) for number, spec in enumerate(cfg.layers)],
    }
    if not cfg.tie_embeddings or "lm_head.weight" in tensors:
        specs["head"] = rows("lm_head.weight", table, vocab, "vocab")
    if predictors:
        behind = enumerate(cfg.predictors, cfg.num_layers)
        specs["predictors"] = [layer(number, spec) | _predictor(cfg, number, plus) for number, spec in behind]
    return specs


def predictor_names(cfg: ModelConfig, *, loaded: bool) -> tuple[str, ...]:
    """Beginnings of the names of predictors' tensors that are let pass: all, or where they are ``loaded`` their copies
    of the embedding and the head."""
    names = ("embed_tokens.", "shared_head.head.") if loaded else ("",)
    layers = range(cfg.num_layers, cfg.num_layers + len(cfg.predictors))
    return tuple(f"model.layers.{number}.{name}" for number in layers for name in names)


def _predictor(cfg: ModelConfig, number: int, plus: float) -> dict[str, ParamSpec]:
    """What a layer for multi-token prediction has beside."""
    prefix, hidden = f"model.layers.{number}.", cfg.hidden_size
    return {
        "embed_norm": vector(prefix + "enorm.weight", hidden, plus),
        "hidden_norm": vector(prefix + "hnorm.weight", hidden, plus),
        "join": whole(prefix + "eh_proj.weight", (hidden, 2 * hidden)),
        "norm": vector(prefix + "shared_head.norm.weight", hidden, plus),
    }


def _norms(cfg: ModelConfig, spec: LayerSpec, prefix: str, plus: float) -> dict[str, ParamSpec]:
    names = {"attn_norm": "input", "mlp_norm": "post_attention"}
    if spec.sandwich:
        names = {"attn_norm": "input", "attn_post_norm": "post_attention"}
        names |= {"mlp_norm": "pre_feedforward", "mlp_post_norm": "post_feedforward"}
    return {ours: vector(f"{prefix}{name}_layernorm.weight", cfg.hidden_size, plus) for ours, name in names.items()}


def _dense(cfg: ModelConfig, spec: Dense, parallel: Parallel, prefix: str) -> dict[str, ParamSpec]:
    hidden, ff = cfg.hidden_size, spec.width
    wide = pad_to_multiple(ff, parallel.devices)
    specs = {
        "gate": rows(prefix + "gate_proj.weight", (ff, hidden), wide, "ff"),
        "up": rows(prefix + "up_proj.weight", (ff, hidden), wide, "ff"),
        "down": columns(prefix + "down_proj.weight", (hidden, ff), wide, "ff"),
    }
    if spec.bias:
        specs["gate_bias"] = rows(prefix + "gate_proj.bias", (ff,), wide, "ff")
        specs["up_bias"] = rows(prefix + "up_proj.bias", (ff,), wide, "ff")
        specs["down_bias"] = vector(prefix + "down_proj.bias", hidden)
    return specs


def _attention(cfg: ModelConfig, spec: Attention, parallel: Parallel, prefix: str, plus: float) -> dict[str, ParamSpec]:
    layout = HeadLayout.of(spec, parallel.devices)
    specs = {
        "qkv": _qkv(spec, layout, prefix, "weight", (cfg.hidden_size,)),
        "o": _output(cfg.hidden_size, spec, layout, prefix + "o_proj.weight"),
    }
    if spec.qkv_bias:
        specs["qkv_bias"] = _qkv(spec, layout, prefix, "bias", ())
    if spec.o_bias:
        specs["o_bias"] = vector(prefix + "o_proj.bias", cfg.hidden_size)
    if spec.sinks:
        specs["sinks"] = _sinks(spec, layout, prefix + "sinks")
    if spec.qk_norm:
        specs["q_norm"] = vector(prefix + "q_norm.weight", spec.head_dim, plus)
    if spec.qk_norm and not spec.borrows:
        specs["k_norm"] = vector(prefix + "k_norm.weight", spec.head_dim, plus)
    return specs


def _qkv(spec: Attention, layout: HeadLayout, prefix: str, kind: str, tail: tuple[int, ...]) -> ParamSpec:
    """q, k and v (those that the layer has) fused as ``[K, group + own, D, ...]``: a KV head beside its query heads, so
    that one axis shards all."""
    names = [f"{prefix}{p}_proj.{kind}" for p in "qkv"[: 1 + spec.own]]
    dim = spec.head_dim
    counts = (spec.heads, spec.kv_heads, spec.kv_heads)[: 1 + spec.own]

    def fill(source: Source, index: Index) -> np.ndarray:
        kept = range(index[0].start, index[0].stop)
        q_heads = [h for j in kept for h in layout.q_source[j]]
        kv_heads = [layout.kv_source[j] for j in kept]
        q = _heads(source, names[0], q_heads, dim).reshape(len(kept), layout.group, dim, *tail)
        return np.concatenate([q, *(_heads(source, name, kv_heads, dim)[:, None] for name in names[1:])], axis=1)

    shape = (layout.kv_heads, layout.group + spec.own, dim, *tail)
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


def _sinks(spec: Attention, layout: HeadLayout, name: str) -> ParamSpec:
    """A score a query head, float32 ``[K, group]``."""

    def fill(source: Source, index: Index) -> np.ndarray:
        data = np.append(source.read(name).astype(np.float32), np.float32(0))  # head -1 is this last one
        return data[np.array(layout.q_source[index[0].start : index[0].stop])]

    shape = (layout.kv_heads, layout.group)
    return ParamSpec(shape, ("kv_heads", None), {name: (spec.heads,)}, fill, dtype="float32")


def _output(hidden: int, spec: Attention, layout: HeadLayout, name: str) -> ParamSpec:
    """The output projection ``[E, K, group, D]``, columns in the order of the physical heads."""
    shape = (hidden, spec.heads * spec.head_dim)

    def fill(source: Source, index: Index) -> np.ndarray:
        data = source.read(name).reshape(hidden, spec.heads, spec.head_dim)
        data = np.concatenate([data, np.zeros_like(data[:, :1])], axis=1)  # head -1 is this last, zero one
        wanted = np.array(layout.q_source[index[1].start : index[1].stop])
        return data[:, wanted]

    full = (hidden, layout.kv_heads, layout.group, spec.head_dim)
    return ParamSpec(full, (None, "kv_heads", None, None), {name: shape}, fill, inputs=3)
