"""``jaxserve convert``: write a checkpoint as the engine keeps it, so that serving it needs no conversion."""

from collections.abc import Callable
from pathlib import Path

import checkpoints
from jaxserve import models, params, quantization
from jaxserve.build import mesh_of
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.declare import declare, parallel_of, resolve_dtype


def convert(
    src: str,
    dst: str | Path,
    *,
    tensor_parallel: int = 1,
    dtype: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Load ``src`` as an engine with these options would and write the tree to the new folder ``dst`` (orbax).

    The folder remembers the layout of its heads: it serves at this ``tensor_parallel``, and at others that lay them out
    alike. Raises ``ConfigError``, ``checkpoints.CheckpointError`` or ``WeightError`` naming what is
    wrong.
    """
    config = EngineConfig(model=src, tensor_parallel=tensor_parallel, dtype=dtype)
    with checkpoints.open_checkpoint(checkpoints.resolve_model(src)) as source:
        if source.format == "orbax":
            raise ConfigError(f"{src} is a converted folder already")
        model = models.model_config(source.config)
        mesh = mesh_of(config)
        if quantization.rule(source.config) is not None:
            raise ConfigError(f"{src} is quantized: it is served as it is, without conversion")
        kind = resolve_dtype(config, source, model)
        specs = declare(model, parallel_of(config), source, kind)
        weights = params.load(specs, source, kind, mesh, progress)
        meta = {
            "config": {**source.config, "dtype": kind},
            "generation_config": source.generation_config,
            "layout": {"tensor_parallel": tensor_parallel, "dtype": kind},
        }
        assets = {name: data for name in checkpoints.TOKENIZER_ASSETS if (data := source.asset(name)) is not None}
        checkpoints.save_tree(dst, weights, meta, assets)
