"""Mistral (a sliding window on every layer, where the config sets one), Ministral (on some), and Ministral 3 (yarn,
position-scaled queries)."""

from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.models.family import WINDOWED, Family, decoder_config, windows


def _mistral(hf: dict[str, Any]) -> ModelConfig:
    return decoder_config(hf, window=windows(hf))


FAMILIES = {kind: Family(_mistral, layer_types=WINDOWED) for kind in ("mistral", "ministral", "ministral3")}
