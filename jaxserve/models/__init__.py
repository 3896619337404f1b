"""Model families: each file declares which configs it reads and what its decoder looks like."""

from typing import Any

from jaxserve.config import ConfigError, ModelConfig
from jaxserve.models import llama, mistral, qwen

FAMILIES = {kind: family for module in (llama, mistral, qwen) for kind, family in module.FAMILIES.items()}
"""``model_type`` of config.json -> function from the config to ``ModelConfig``."""


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """Read a Hugging Face config. Raises ``ConfigError`` naming an unknown architecture or an unsupported field."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        names = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"unknown architecture {hf.get('architectures') or kind!r} (model_type {kind!r}); known: {names}"
        )
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise ConfigError(f"quantization_config: quantized checkpoints (quant_method {method!r}) are not supported yet")
    return FAMILIES[kind](hf)
