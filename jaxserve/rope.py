"""Rotary position embedding: the configuration, and the frequencies of every scaling we implement.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), and the llama3 rule published with Llama 3.1.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "factors", "proportional")


class RopeError(ValueError):
    """A rope type or parameter that is not implemented; the message names it."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotation of the first ``dim`` channels of a head, channel i paired with channel i + dim/2."""

    theta: float
    dim: int
    type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """cos and sin are multiplied by it."""
    factors: tuple[float, ...] = ()
    """Divisor of every frequency (GGUF's ``rope_freqs``), for type ``factors``."""
    share: float = 1.0
    """Of the channels, those that turn; the others' angles are 0, for type ``proportional`` (Gemma 4)."""
    query_scale_beta: float = 0.0
    """Queries are multiplied by 1 + beta * ln(1 + floor(position / original_max_position)) (Llama 4, Ministral 3)."""

    def inv_freq(self) -> np.ndarray:
        """Angles per position, float32 ``[dim / 2]``."""
        plain = self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        return _SCALINGS[self.type](self, plain).astype(np.float32)


def _linear(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    return freq / rope.factor


def _llama3(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by ``factor``, short ones left alone, a linear blend between."""
    turns = rope.original_max_position * freq / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return freq / rope.factor * (1 - blend) + freq * blend


def _yarn(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    """Interpolate channels of less than ``beta_slow`` turns in the original context, keep those above ``beta_fast``."""

    def channel(turns: float) -> float:
        return rope.dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return freq / rope.factor * ramp + freq * (1 - ramp)


def _factors(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    return freq / np.asarray(rope.factors, np.float64)


def _proportional(rope: RopeConfig, freq: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(freq)) < int(rope.share * rope.dim / 2), freq / rope.factor, 0.0)


_SCALINGS = {
    "default": lambda _, f: f,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": _factors,
    "proportional": _proportional,
}


def parse_rope(hf: dict[str, Any], head_dim: int) -> RopeConfig:
    """Read ``rope_parameters`` (new spelling) or ``rope_theta`` with ``rope_scaling`` (old) of a Hugging Face config.

    Raises ``RopeError`` for a rope type that is not implemented and for a parameter that is missing.
    """
    params = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = params.get("rope_type", params.get("type", "default")) or "default"
    if kind not in ROPE_TYPES:
        raise RopeError(f"rope type {kind!r} is not implemented; implemented: {', '.join(ROPE_TYPES)}")
    theta = params.get("rope_theta", hf.get("rope_theta", 10000.0))
    share = float(params.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)))
    dim = head_dim if kind == "proportional" else int(head_dim * share)

    def need(name: str) -> Any:
        if params.get(name) is None:
            raise RopeError(f"rope type {kind!r} needs {name!r}, which the config does not give")
        return params[name]

    original = int(
        params.get("original_max_position_embeddings")
        or hf.get("original_max_position_embeddings")
        or hf.get("max_position_embeddings", 0)
    )
    beta = float(params.get("llama_4_scaling_beta") or 0.0)
    common: dict[str, Any] = {
        "theta": float(theta),
        "dim": dim,
        "query_scale_beta": beta,
        "original_max_position": original,
    }
    if kind == "default":
        return RopeConfig(**common)
    if kind == "factors":
        return RopeConfig(type=kind, factors=tuple(float(f) for f in need("factors")), **common)
    if kind == "proportional":
        return RopeConfig(type=kind, share=share, factor=float(params.get("factor") or 1.0), **common)
    common |= {"type": kind, "factor": float(need("factor"))}
    if kind == "linear":
        return RopeConfig(**common)
    if kind == "llama3":
        need("original_max_position_embeddings")
        low, high = float(need("low_freq_factor")), float(need("high_freq_factor"))
        return RopeConfig(low_freq_factor=low, high_freq_factor=high, **common)
    return RopeConfig(
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(params.get("truncate", True)),
        attention_factor=_yarn_attention_factor(params),
        **common,
    )


def _yarn_attention_factor(params: dict[str, Any]) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def mscale(weight: float) -> float:
        factor = float(params["factor"])
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(float(params["mscale"])) / mscale(float(params["mscale_all_dim"]))
    return mscale(1.0)
