"""Model families: each file declares which configs it reads and what its decoder looks like."""

import importlib
import pkgutil
from typing import Any

from jaxserve import quantization
from jaxserve.config import ConfigError, ModelConfig
from jaxserve.models.family import Family

FAMILIES: dict[str, Family] = {}
"""``model_type`` of config.json -> family: all that the files of this folder declare."""

for _file in pkgutil.iter_modules(__path__):
    FAMILIES |= getattr(importlib.import_module(f"{__name__}.{_file.name}"), "FAMILIES", {})


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """Read a Hugging Face config. Raises ``ConfigError`` naming an unknown architecture or an unsupported field."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        names = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"unknown architecture {hf.get('architectures') or kind!r} (model_type {kind!r}); known: {names}"
        )
    rule, cfg = quantization.rule(hf), FAMILIES[kind].config(hf)
    if isinstance(rule, quantization.MxExperts) and not any(getattr(spec.ffn, "mxfp4", False) for spec in cfg.layers):
        raise ConfigError(f"quantization_config: quant_method 'mxfp4' is not supported for {kind}")
    return cfg
