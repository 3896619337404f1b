"""What a checkpoint becomes in the engine: its dtype, its weights' declaration, checked against its tensors, and its
cache."""

import dataclasses

import checkpoints
from jaxserve import models, params, quantization
from jaxserve.cache_spec import FP8, CacheSpec, HeadPages, KeyPages, LatentPages, Pages
from jaxserve.config import ConfigError, EngineConfig, ModelConfig
from jaxserve.grouping import arrange
from jaxserve.layer_spec import Attention, Latent
from jaxserve.models.weights import IGNORED_TENSORS, param_specs, predictor_names
from jaxserve.random_weights import promised
from jaxserve.sharding import HeadLayout, Parallel


def parallel_of(config: EngineConfig) -> Parallel:
    """How the devices share the model."""
    return Parallel(config.tensor_parallel, config.expert_parallel)


def resolve_dtype(config: EngineConfig, source: checkpoints.Checkpoint, model: ModelConfig) -> str:
    """The engine's dtype. ``auto`` keeps float32 and bfloat16; float16 and quantized weights become bfloat16."""
    if isinstance(source, checkpoints.OrbaxCheckpoint) and config.dtype not in ("auto", model.dtype):
        raise ConfigError(
            f"dtype {config.dtype}: this folder was converted as {model.dtype}; leave dtype out, "
            f"or convert the original again with dtype {config.dtype}"
        )
    if config.dtype != "auto":
        return config.dtype
    if source.format == "gguf":
        encodings = {info.encoding for info in source.tensors.values() if len(info.shape) > 1}
        return "float32" if encodings == {"F32"} else "bfloat16"
    return model.dtype if model.dtype in ("float32", "bfloat16") else "bfloat16"


def declare(
    model: ModelConfig, parallel: Parallel, source: checkpoints.Checkpoint, dtype: str, *, predictors: bool = False
) -> params.Specs:
    """The model's parameters, checked against the checkpoint's tensors where it has any. ``dtype`` is the engine's."""
    family = models.FAMILIES[model.model_type]
    if predictors and not model.predictors:
        raise ConfigError(f"mtp: this {model.model_type} has no layers for multi-token prediction")
    if isinstance(source, checkpoints.OrbaxCheckpoint):
        if predictors:
            raise ConfigError("mtp: a converted folder has no layers for multi-token prediction")
        saved = (source.meta.get("layout") or {}).get("tensor_parallel")
        if not isinstance(saved, int) or saved < 1:
            raise ConfigError(f"{source.path}: jaxserve.json does not say which tensor_parallel it was converted for")
        model = dataclasses.replace(model, tie_embeddings="head" not in source.tensors)
        _check_layout(model, Parallel(saved), parallel)
        return param_specs(model, family, parallel, ())
    specs = param_specs(model, family, parallel, source.tensors, predictors=predictors)
    rule, alone = quantization.rule(source.config), isinstance(source, checkpoints.ConfigOnly)
    if isinstance(rule, quantization.BlockFp8):
        tensors = promised(specs, rule, source.config) if alone else source.tensors
        specs = quantization.quantized(specs, rule, tensors, parallel, dtype)
    if alone:
        return specs
    params.check(specs, source, IGNORED_TENSORS, family.unused(model) + predictor_names(model, loaded=predictors))
    return specs


def declare_cache(model: ModelConfig, config: EngineConfig, dtype: str) -> CacheSpec:
    """What the layers keep. ``dtype`` is the engine's. Raises ``ConfigError`` where the model has nothing that the
    ``kv_cache_dtype`` asked for is made for."""
    kept: list[tuple[Pages, ...]] = []
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, Latent):
            kept.append(_latents(mixer, config, dtype))
            continue
        if config.kv_cache_dtype == "fp8_ds_mla":
            raise ConfigError(
                "kv_cache_dtype fp8_ds_mla is for latents; this model keeps keys and values of heads: fp8"
            )
        layout = HeadLayout.of(mixer, config.tensor_parallel)
        pages = HeadPages(layout.kv_source, mixer.head_dim, FP8 if config.kv_cache_dtype == "fp8" else dtype)
        kept.append((pages,))
    windows = [layer.mixer.window if isinstance(layer.mixer, Attention) else None for layer in model.layers]
    owners = model.owners
    own = sorted(set(owners))
    spec = arrange([kept[n] for n in own], [windows[n] for n in own], config.max_model_len or model.max_position)
    return dataclasses.replace(spec, layers=tuple(spec.layers[own.index(number)] for number in owners))


def _latents(mixer: Latent, config: EngineConfig, dtype: str) -> tuple[Pages, ...]:
    """Latents, and an indexer's keys. ``fp8`` and ``fp8_ds_mla`` mean the same: latents have one kind of records."""
    kept = dtype if config.kv_cache_dtype == "auto" else FP8
    latents = LatentPages(mixer.rank, mixer.rope.dim, kept)
    return (latents,) if mixer.indexer is None else (latents, KeyPages(mixer.indexer.dim, kept))


def _check_layout(model: ModelConfig, saved: Parallel, wanted: Parallel) -> None:
    def layout(parallel: Parallel) -> tuple[list[HeadLayout], list[tuple[int, ...]]]:
        specs = param_specs(model, models.FAMILIES[model.model_type], parallel, ())
        return [HeadLayout.of(mixer, parallel.devices) for mixer in model.mixers], params.shapes(specs)

    if layout(saved) != layout(wanted):
        raise ConfigError(
            f"tensor_parallel {wanted.devices}: this folder was converted for tensor_parallel {saved.devices}, which "
            "lays heads out differently; convert the original again"
        )
