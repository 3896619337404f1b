"""The weights of embeddings that a layer has for itself (Gemma 4). On disk those of all layers are one tensor each."""

import threading
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.layer_spec import LayerSpec
from jaxserve.models.latent_weights import whole
from jaxserve.params import Index, ParamSpec, Source, vector
from jaxserve.sharding import Parallel, pad_to_multiple

ROWS = 1 << 14
"""Rows of the table that are read at once."""


class Strips:
    """The table of all layers' embeddings, ``[V, L * width]``. Its rows are read once for all layers; what a layer has
    not fetched yet stays in memory."""

    name = "model.embed_tokens_per_layer.weight"

    def __init__(self, layers: int):
        self._layers = layers
        self._lock = threading.Lock()
        self._left: dict[tuple[int, int, int], list[np.ndarray]] = {}

    def take(self, source: Source, number: int, first: int, last: int) -> np.ndarray:
        """The rows' strip for layer ``number``."""
        with self._lock:
            if (number, first, last) not in self._left:
                for layer in range(self._layers):
                    self._left[layer, first, last] = []
                for at in range(first, last, ROWS) or [first]:
                    rows = source.read(self.name, slice(at, min(at + ROWS, last)))
                    for layer, strip in enumerate(np.split(rows, self._layers, axis=1)):
                        self._left[layer, first, last].append(strip.copy())
            parts = self._left.pop((number, first, last))
        return np.concatenate(parts)


def per_layer_specs(
    cfg: ModelConfig, spec: LayerSpec, number: int, parallel: Parallel, strips: Strips
) -> dict[str, Any]:
    """Declare what the layer ``number`` has beyond attention and feed-forward part."""
    prefix, hidden = f"model.layers.{number}.", cfg.hidden_size
    specs: dict[str, Any] = {}
    if spec.scaled:
        specs["scalar"] = vector(prefix + "layer_scalar", 1)
    if spec.per_layer is None:
        return specs
    width = spec.per_layer.width
    return specs | {
        "per_layer_embed": _table(cfg, spec.per_layer.vocab, number, width, parallel, strips),
        "per_layer_project": _strip(cfg, number, width),
        "per_layer_norm": vector("model.per_layer_projection_norm.weight", width),
        "per_layer_gate": whole(prefix + "per_layer_input_gate.weight", (width, hidden)),
        "per_layer_out": whole(prefix + "per_layer_projection.weight", (hidden, width)),
        "per_layer_post_norm": vector(prefix + "post_per_layer_input_norm.weight", hidden),
    }


def _table(cfg: ModelConfig, vocab: int, number: int, width: int, parallel: Parallel, strips: Strips) -> ParamSpec:
    """``[V, width]``, sharded by rows: the layer's strip."""
    padded = pad_to_multiple(vocab, parallel.devices)

    def fill(source: Source, index: Index) -> np.ndarray:
        first, last = (min(bound, vocab) for bound in (index[0].start, index[0].stop))
        part = strips.take(source, number, first, last)
        return np.pad(part, ((0, index[0].stop - index[0].start - len(part)), (0, 0)))

    return ParamSpec((padded, width), ("vocab", None), {strips.name: (vocab, cfg.num_layers * width)}, fill)


def _strip(cfg: ModelConfig, number: int, width: int) -> ParamSpec:
    """``[width, E]``, a layer's rows of the projection for all of them."""
    name, hidden = "model.per_layer_model_projection.weight", cfg.hidden_size

    def fill(source: Source, index: Index) -> np.ndarray:
        return source.read(name, slice(number * width, (number + 1) * width))[index]

    return ParamSpec((width, hidden), (None, None), {name: (cfg.num_layers * width, hidden)}, fill)
