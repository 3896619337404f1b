"""Mistral (a sliding window on every layer, where the config sets one), Ministral (on some), and Ministral 3 (yarn,
position-scaled queries)."""

from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.models.family import Family, decoder_config


def _mistral(hf: dict[str, Any]) -> ModelConfig:
    kinds = hf.get("layer_types")

    def window(layer: int) -> int | None:
        return hf.get("sliding_window") if kinds is None or kinds[layer] == "sliding_attention" else None

    return decoder_config(hf, window=window)


FAMILIES = {kind: Family(_mistral) for kind in ("mistral", "ministral", "ministral3")}
