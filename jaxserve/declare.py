"""What a checkpoint becomes in the engine: its dtype, and its weights' declaration, checked against its tensors."""

import dataclasses

import checkpoints
from jaxserve import params
from jaxserve.config import ConfigError, EngineConfig, ModelConfig
from jaxserve.models import dense
from jaxserve.sharding import HeadLayout, head_layout


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


def declare(model: ModelConfig, tensor_parallel: int, source: checkpoints.Checkpoint) -> params.Specs:
    """The model's parameters, checked against the checkpoint's tensors."""
    if isinstance(source, checkpoints.OrbaxCheckpoint):
        saved = (source.meta.get("layout") or {}).get("tensor_parallel")
        if not isinstance(saved, int) or saved < 1:
            raise ConfigError(f"{source.path}: jaxserve.json does not say which tensor_parallel it was converted for")
        _check_layout(model, saved, tensor_parallel)
        tied = "head" not in source.tensors
        return dense.param_specs(dataclasses.replace(model, tie_embeddings=tied), tensor_parallel, ())
    specs = dense.param_specs(model, tensor_parallel, source.tensors)
    params.check(specs, source, dense.IGNORED_TENSORS)
    return specs


def _check_layout(model: ModelConfig, saved: int, wanted: int) -> None:
    def layout(devices: int) -> tuple[HeadLayout, int, int]:
        heads = head_layout(model.num_heads, model.num_kv_heads, devices)
        return heads, -model.vocab_size % devices, -model.intermediate_size % devices

    if layout(saved) != layout(wanted):
        raise ConfigError(
            f"tensor_parallel {wanted}: this folder was converted for tensor_parallel {saved}, which lays heads out "
            "differently; convert the original again"
        )
