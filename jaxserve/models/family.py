"""What a family file declares, and reading the fields that nearly every config.json has."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import ConfigError, ModelConfig
from jaxserve.layer_spec import Attention, Dense, LayerSpec, Moe
from jaxserve.models.expert_weights import ExpertWeights, per_expert
from jaxserve.rope import RopeConfig, RopeError, parse_rope


@dataclass(frozen=True)
class Family:
    """How to read one ``model_type``."""

    config: Callable[[dict[str, Any]], ModelConfig]
    """From config.json. Raises ``ConfigError`` naming a field that is missing or not supported."""
    experts: ExpertWeights = field(default_factory=per_expert)
    """Names and layout on disk of a mixture of experts."""
    unused: Callable[[ModelConfig], tuple[str, ...]] = lambda cfg: ()
    """Beginnings of the names of tensors that are let pass: parts of the model that the decoder does not run."""


def need(hf: dict[str, Any], name: str) -> Any:
    """A field that must be there."""
    if hf.get(name) is None:
        raise ConfigError(f"config.json does not give {name!r}")
    return hf[name]


def dense(hf: dict[str, Any], *, bias: bool = False) -> Dense:
    """The feed-forward network that a config without experts describes."""
    return Dense(int(need(hf, "intermediate_size")), bias=bias)


def decoder_config(
    hf: dict[str, Any],
    *,
    ffn: Callable[[int], Dense | Moe] | None = None,
    window: Callable[[int], int | None] = lambda layer: None,
    **traits: Any,
) -> ModelConfig:
    """A config of the usual fields. ``ffn(layer)`` and ``window(layer)`` say what differs between layers, ``traits`` is
    what their attention has in common (see ``Attention``).

    Raises ``ConfigError`` naming a field that is missing or not supported.
    """
    activation = hf.get("hidden_act", hf.get("hidden_activation", "silu"))
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {activation!r} is not supported (silu is)")
    heads = int(need(hf, "num_attention_heads"))
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    hidden = int(need(hf, "hidden_size"))
    head_dim = int(hf.get("head_dim") or hidden // heads)
    rope = read_rope(hf, head_dim)
    if ffn is None:
        same = dense(hf)
        ffn = lambda layer: same  # noqa: E731
    layers = range(int(need(hf, "num_hidden_layers")))
    return ModelConfig(
        model_type=hf["model_type"],
        vocab_size=int(need(hf, "vocab_size")),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerSpec(Attention(rope, window(i), **traits), ffn(i)) for i in layers),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        max_position=int(need(hf, "max_position_embeddings")),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        dtype=hf.get("dtype") or hf.get("torch_dtype"),
    )


def read_rope(hf: dict[str, Any], head_dim: int) -> RopeConfig:
    """The config's rope. Raises ``ConfigError``."""
    try:
        return parse_rope(hf, head_dim)
    except RopeError as error:
        raise ConfigError(str(error)) from None
