"""What a family file declares, and reading the fields that nearly every config.json has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import ConfigError, ModelConfig
from jaxserve.layer_spec import Activation, Attention, Dense, LayerSpec, Mixer, Moe, PerLayer
from jaxserve.models.expert_weights import ExpertWeights, per_expert
from jaxserve.rope import RopeConfig, RopeError, parse_rope


@dataclass(frozen=True)
class Family:
    """How to read one ``model_type``."""

    config: Callable[[dict[str, Any]], ModelConfig]
    """From config.json. Raises ``ConfigError`` naming a field that is missing or not supported."""
    experts: ExpertWeights = field(default_factory=per_expert)
    """Names and layout on disk of a mixture of experts."""
    norm_plus: float = 0.0
    """Added to the weights of norms when they are read: 1 where the checkpoint keeps what they differ from 1."""
    unused: Callable[[ModelConfig], tuple[str, ...]] = lambda cfg: ()
    """Beginnings of the names of tensors that are let pass: parts of the model that the decoder does not run."""
    layer_types: tuple[str, ...] = ("full_attention",)
    """What ``layer_types`` of config.json may call a layer; ``WINDOWED`` where ``config`` minds what it does."""


WINDOWED = ("full_attention", "sliding_attention")


def need(hf: dict[str, Any], name: str) -> Any:
    """A field that must be there."""
    if hf.get(name) is None:
        raise ConfigError(f"config.json does not give {name!r}")
    return hf[name]


_ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(),
    "swish": Activation(),
    "gelu_pytorch_tanh": Activation("gelu_tanh"),
}


def activation(hf: dict[str, Any]) -> Activation:
    """What the config calls ``hidden_act`` or ``hidden_activation``."""
    name = hf.get("hidden_activation") or hf.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def dense(hf: dict[str, Any], *, bias: bool = False) -> Dense:
    """The feed-forward network that a config without experts describes."""
    return Dense(int(need(hf, "intermediate_size")), activation(hf), bias)


def decoder_config(
    hf: dict[str, Any],
    *,
    ffn: Callable[[int], Dense | Moe] | None = None,
    mixer: Callable[[int], Mixer] | None = None,
    window: Callable[[int], int | None] = lambda layer: None,
    rope: Callable[[int], RopeConfig] | None = None,
    sandwich: bool = False,
    per_layer: PerLayer | None = None,
    scaled: bool = False,
    predictors: int = 0,
    shared: Mapping[str, Any] | None = None,
    **traits: Any,
) -> ModelConfig:
    """A config of the usual fields. ``ffn(layer)``, ``window(layer)`` and ``rope(layer)`` say what differs between
    layers, ``traits`` what their attention has in common (see ``Attention``); or ``mixer(layer)`` all of a mixer.
    ``predictors`` are how many layers for multi-token prediction stand behind, ``shared`` further fields of
    ``ModelConfig``.

    Raises ``ConfigError`` naming a field that is missing or not supported.
    """
    ffn = ffn or _same(dense(hf))
    mixer = mixer or _attention(hf, window, rope, traits)
    size = int(need(hf, "num_hidden_layers"))
    traits_of_all = (sandwich, per_layer, scaled)
    layers = tuple(LayerSpec(mixer(number), ffn(number), *traits_of_all) for number in range(size + predictors))
    return ModelConfig(
        model_type=hf["model_type"],
        vocab_size=int(need(hf, "vocab_size")),
        hidden_size=int(need(hf, "hidden_size")),
        layers=layers[:size],
        predictors=layers[size:],
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        max_position=int(need(hf, "max_position_embeddings")),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        dtype=hf.get("dtype") or hf.get("torch_dtype"),
        **(shared or {}),
    )


def _attention(
    hf: dict[str, Any],
    window: Callable[[int], int | None],
    rope: Callable[[int], RopeConfig] | None,
    traits: Mapping[str, Any],
) -> Callable[[int], Attention]:
    heads = int(need(hf, "num_attention_heads"))
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    head_dim = head_size(hf)
    turn = rope or _same(read_rope(hf, head_dim))
    return lambda layer: Attention(heads, kv_heads, head_dim, turn(layer), window(layer), **traits)


def windows(hf: dict[str, Any]) -> Callable[[int], int | None]:
    """``sliding_window`` on the layers that ``layer_types`` says, on all where it does not."""
    kinds, window = hf.get("layer_types"), hf.get("sliding_window") or None
    return lambda layer: window if kinds is None or kinds[layer] == "sliding_attention" else None


def _same[T](value: T) -> Callable[[int], T]:
    return lambda layer: value


def head_size(hf: dict[str, Any]) -> int:
    """D."""
    return int(hf.get("head_dim") or need(hf, "hidden_size") // need(hf, "num_attention_heads"))


def read_rope(hf: dict[str, Any], head_dim: int) -> RopeConfig:
    """The config's rope. Raises ``ConfigError``."""
    try:
        return parse_rope(hf, head_dim)
    except RopeError as error:
        raise ConfigError(str(error)) from None
