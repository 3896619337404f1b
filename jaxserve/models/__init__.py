"""Model families: each file declares which configs it reads and what its decoder looks like."""

import importlib
import pkgutil
from typing import Any

from jaxserve import quantization
from jaxserve.config import ConfigError, ModelConfig
from jaxserve.models.family import Family
from jaxserve.models.fields import check_fields, check_kinds, check_layers

FAMILIES: dict[str, Family] = {}
"""``model_type`` of config.json -> family: all that the files of this folder declare."""

for _file in pkgutil.iter_modules(__path__):
    FAMILIES |= getattr(importlib.import_module(f"{__name__}.{_file.name}"), "FAMILIES", {})


def model_config(hf: dict[str, Any]) -> ModelConfig:
    """Read a Hugging Face config.

    Raises ``ConfigError`` naming an unknown architecture, or a field that is missing, wrong or not supported.
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        names = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"unknown architecture {hf.get('architectures') or kind!r} (model_type {kind!r}); known: {names}"
        )
    try:
        rule, cfg = quantization.rule(hf), _read(hf, FAMILIES[kind])
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:  # of a field nobody checks
        raise ConfigError(f"config.json of {kind} cannot be read: {type(error).__name__}: {error}") from error
    if isinstance(rule, quantization.MxExperts) and not any(getattr(spec.ffn, "mxfp4", False) for spec in cfg.layers):
        raise ConfigError(f"quantization_config: quant_method 'mxfp4' is not supported for {kind}")
    return cfg


def _read(hf: dict[str, Any], family: Family) -> ModelConfig:
    check_fields(hf)
    check_kinds(hf, "layer_types", family.layer_types)
    check_kinds(hf, "mlp_layer_types", ("dense", "sparse"))
    cfg = family.config(hf)
    check_layers(hf, cfg.layers + cfg.predictors)
    return cfg
