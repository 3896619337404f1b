"""The weights of embeddings that a layer has for itself (Gemma 4). On disk those of all layers are one tensor each."""

from typing import Any

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.layer_spec import LayerSpec
from jaxserve.models.latent_weights import whole
from jaxserve.params import Index, ParamSpec, Source, vector
from jaxserve.sharding import Parallel, pad_to_multiple

ROWS = 1 << 14
"""Rows of the table that are read at once: a layer takes a strip of each."""


def per_layer_specs(cfg: ModelConfig, spec: LayerSpec, number: int, parallel: Parallel) -> dict[str, Any]:
    """Declare what the layer ``number`` has beyond attention and feed-forward part."""
    prefix, hidden = f"model.layers.{number}.", cfg.hidden_size
    specs: dict[str, Any] = {}
    if spec.scaled:
        specs["scalar"] = vector(prefix + "layer_scalar", 1)
    if spec.per_layer is None:
        return specs
    width = spec.per_layer.width
    return specs | {
        "per_layer_embed": _table(cfg, spec.per_layer.vocab, number, width, parallel),
        "per_layer_project": _strip(cfg, number, width),
        "per_layer_norm": vector("model.per_layer_projection_norm.weight", width),
        "per_layer_gate": whole(prefix + "per_layer_input_gate.weight", (width, hidden)),
        "per_layer_out": whole(prefix + "per_layer_projection.weight", (hidden, width)),
        "per_layer_post_norm": vector(prefix + "post_per_layer_input_norm.weight", hidden),
    }


def _table(cfg: ModelConfig, vocab: int, number: int, width: int, parallel: Parallel) -> ParamSpec:
    """``[V, width]``, sharded by rows: a strip of a table for all layers, which is read once for each of them."""
    name, padded = "model.embed_tokens_per_layer.weight", pad_to_multiple(vocab, parallel.devices)

    def fill(source: Source, index: Index) -> np.ndarray:
        first, last = index[0].start, min(index[0].stop, vocab)
        strip = slice(number * width, (number + 1) * width)
        parts = [source.read(name, slice(at, min(at + ROWS, last)))[:, strip] for at in range(first, last, ROWS)]
        part = np.concatenate(parts) if parts else source.read(name, slice(0, 0))[:, strip]
        return np.pad(part, ((0, index[0].stop - index[0].start - len(part)), (0, 0)))

    return ParamSpec((padded, width), ("vocab", None), {name: (vocab, cfg.num_layers * width)}, fill)


def _strip(cfg: ModelConfig, number: int, width: int) -> ParamSpec:
    """``[width, E]``, a layer's rows of the projection for all of them."""
    name, hidden = "model.per_layer_model_projection.weight", cfg.hidden_size

    def fill(source: Source, index: Index) -> np.ndarray:
        return source.read(name, slice(number * width, (number + 1) * width))[index]

    return ParamSpec((width, hidden), (None, None), {name: (cfg.num_layers * width, hidden)}, fill)
