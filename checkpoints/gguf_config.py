"""Config.json and generation_config.json from the metadata of a GGUF file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import CheckpointError
from .gguf_format import GgufTensor

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral3": ("ministral3", "Ministral3ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""general.architecture -> model_type and class name of the Hugging Face model. Mistral models come as "llama"."""

_PERMUTED = ("llama", "mistral", "ministral3")
"""Model types whose q and k rows a GGUF keeps with rotary pairs side by side (llama.cpp's rope type "norm")."""

_NEUTRAL = {
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "expert_count": 0,
}
"""Keys that change the arithmetic in a way these families do not have; any other value is refused."""


def config_from_metadata(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    rope_factors: list[float] | None,
) -> dict[str, Any]:
    """What Hugging Face's config.json would say of this model.

    ``rope_factors`` (the tensor rope_freqs.weight, divisors of the rotary frequencies) becomes rope type "factors": it
    is exactly what the file says, while the parameters it was computed from are not in the file.

    Raises:
        CheckpointError: an unknown architecture, a missing key, or a feature these families do not have.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{path}: architecture {name!r} is not supported in GGUF; supported: {known}")
    keys = _Keys(path, name, metadata)
    for key, neutral in _NEUTRAL.items():
        if keys.get(key, neutral) != neutral:
            raise CheckpointError(f"{path}: {name}.{key} = {keys.get(key)!r} is not supported")
    model_type, class_name = ARCHITECTURES[name]
    heads = keys.positive("attention.head_count")
    hidden = keys.positive("embedding_length")
    head_dim = keys.positive("attention.key_length", hidden // heads)
    if keys.positive("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{path}: {name}.attention.value_length differs from key_length; not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: no tensor token_embd.weight of two dimensions")
    window = keys.integer("attention.sliding_window", 0)
    if window and name == "llama":
        model_type, class_name = "mistral", "MistralForCausalLM"
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.positive("feed_forward_length"),
        "num_hidden_layers": keys.positive("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.positive("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(keys.number("attention.layer_norm_rms_epsilon")),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": keys.positive("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
    }
    rope = _rope(keys, config, rope_factors)
    config["rope_parameters"] = rope
    config["rope_theta"] = rope["rope_theta"]
    partial = keys.positive("rope.dimension_count", head_dim)
    if partial != head_dim:
        config["partial_rotary_factor"] = partial / head_dim
    generation = generation_config_from_metadata(path, metadata)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[key] = generation.get(key)
    return config


def optional_integer(path: Path, metadata: Mapping[str, Any], key: str) -> int | None:
    value = metadata.get(key)
    if value is not None and type(value) is not int:
        raise CheckpointError(f"{path}: {key} must be an integer, is {value!r}")
    return value


def generation_config_from_metadata(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos, pad, and every token that ends a turn or a text (eos, eot, eom)."""
    names = ("bos", "eos", "eot", "eom", "padding")
    ids = {name: optional_integer(path, metadata, f"tokenizer.ggml.{name}_token_id") for name in names}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    result = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }
    return {key: value for key, value in result.items() if value is not None}


def permuted_head_dim(config: Mapping[str, Any], name: str) -> int:
    """The head size by which the rows of HF tensor ``name`` are interleaved on disk; 0 where they are not."""
    if config["model_type"] in _PERMUTED and ".self_attn." in name and name.split(".")[-2] in ("q_proj", "k_proj"):
        return config["head_dim"]
    return 0


def _rope(keys: "_Keys", config: Mapping[str, Any], factors: list[float] | None) -> dict[str, Any]:
    theta = _shortest(keys.number("rope.freq_base", 10000.0))
    kind = keys.get("rope.scaling.type", "none")
    legacy = keys.get("rope.scale_linear")
    if legacy not in (None, 1.0) and kind == "none":
        kind = "linear"
    if factors is not None:
        if kind != "none":
            raise CheckpointError(
                f"{keys.path}: rope_freqs.weight together with rope scaling {kind!r} is not supported"
            )
        expected = keys.positive("rope.dimension_count", config["head_dim"]) // 2
        if len(factors) != expected or not all(math.isfinite(f) and f > 0 for f in factors):
            raise CheckpointError(f"{keys.path}: tensor rope_freqs.weight must hold {expected} positive numbers")
        return {"rope_type": "factors", "rope_theta": theta, "factors": factors}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _shortest(keys.number("rope.scaling.factor", legacy))
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise CheckpointError(f"{keys.path}: rope scaling {kind!r} is not supported in GGUF; none, linear and yarn are")
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "beta_fast": _shortest(keys.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": _shortest(keys.number("rope.scaling.yarn_beta_slow", 1.0)),
    }
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"):
        if keys.get(key, 1.0) not in (1.0, -1.0):
            raise CheckpointError(f"{keys.path}: {keys.arch}.{key} = {keys.get(key)!r} is not supported")
    log_multiplier = keys.get("rope.scaling.yarn_log_multiplier")
    if log_multiplier is not None:
        rope["mscale"], rope["mscale_all_dim"] = 1.0, _shortest(log_multiplier)
    temperature = keys.get("attention.temperature_scale")
    if temperature is not None:
        rope["llama_4_scaling_beta"] = _shortest(temperature)
    return rope


class _Keys:
    """Typed access to the keys of one architecture; a missing or mistyped key is an error that names it."""

    def __init__(self, path: Path, arch: str, metadata: Mapping[str, Any]):
        self.path, self.arch, self.metadata = path, arch, metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.arch}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if type(value) is not int:
            raise CheckpointError(f"{self.path}: {self.arch}.{key} must be an integer, is {value!r}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value <= 0:
            raise CheckpointError(f"{self.path}: {self.arch}.{key} must be positive, is {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self.path}: {self.arch}.{key} must be a number, is {value!r}")
        return float(value)


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
