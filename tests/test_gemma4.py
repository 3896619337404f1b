"""Gemma 4's config: both spellings, which layer has whose keys and values, and what is refused. Its numbers are in
test_parity."""

import json
from typing import Any

import numpy as np
import pytest
from tiny import FIXTURES

from jaxserve.config import ConfigError, EngineConfig, ModelConfig
from jaxserve.declare import declare_cache
from jaxserve.layer_spec import Attention
from jaxserve.models import FAMILIES, model_config
from jaxserve.models.weights import param_specs
from jaxserve.rope import parse_rope
from jaxserve.sharding import Parallel


def config(family: str = "gemma4_dense", **changed: Any) -> dict[str, Any]:
    return json.loads((FIXTURES / family / "config.json").read_text()) | changed


def mixers(cfg: ModelConfig) -> list[Attention]:
    return [layer.mixer for layer in cfg.layers if isinstance(layer.mixer, Attention)]


@pytest.mark.parametrize("family", ["gemma4_dense", "gemma4_moe"])
def test_both_spellings_mean_the_same(family: str) -> None:
    new = config(family)
    kv_heads = 1 if family == "gemma4_moe" else None
    old = {name: value for name, value in new.items() if name != "per_layer_config"}
    old |= {"global_head_dim": 32, "num_global_key_value_heads": kv_heads}
    assert model_config(old) == model_config(new)


def test_what_the_hub_leaves_out_has_defaults() -> None:
    hf = config(layer_types=None, rope_parameters=None, num_kv_shared_layers=0, per_layer_config=None)
    full = [mixer.window is None for mixer in mixers(model_config(hf))]
    assert full == [False] * 5 + [True]
    last = mixers(model_config(hf))[-1]
    assert (last.head_dim, last.rope.type, last.rope.share, last.rope.theta) == (512, "proportional", 0.25, 1e6)


def test_the_last_layer_is_a_full_one() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    hf = config(layer_types=["full_attention", *kinds[:5]], per_layer_config={}, num_kv_shared_layers=0)
    assert mixers(model_config(hf))[-1].window is None


def test_layers_at_the_end_have_the_cache_of_the_last_of_their_kind() -> None:
    cfg = model_config(config())
    assert cfg.owners == (0, 1, 2, 3, 3, 2)
    cache = declare_cache(cfg, EngineConfig(model="x"), "float32")
    places = [(place.plane, place.group) for place in cache.layers]
    assert places[4] == places[3]
    assert places[5] == places[2]
    assert len(set(places)) == 4
    shapes = {name for name in ("k_proj", "v_proj", "k_norm") if f"model.layers.4.self_attn.{name}." in _let_pass(cfg)}
    assert shapes == {"k_proj", "v_proj", "k_norm"}


def _let_pass(cfg: ModelConfig) -> tuple[str, ...]:
    return FAMILIES["gemma4_text"].unused(cfg)


def test_layers_that_are_alike_share_a_program() -> None:
    """Two windowed layers with keys and values, a full one; borrowing ones of each kind."""
    assert len(set(model_config(config()).layers)) == 4


def test_only_some_channels_turn_and_the_exponent_counts_all() -> None:
    hf = {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}
    freq = parse_rope(hf, 32).inv_freq()
    np.testing.assert_allclose(freq[:4], 1e6 ** (-np.arange(0, 8, 2) / 32), rtol=1e-6)
    assert freq.shape == (16,)
    assert (freq[4:] == 0).all()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 6 layers"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types: 'chunked_attention' is not supported"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: no full_attention layer"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"enable_moe_block": True}, "top_k_experts"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        model_config(config(**changed))


@pytest.mark.parametrize("devices", [1, 8])
def test_a_table_for_all_layers_is_read_once_and_none_of_it_stays(devices: int) -> None:
    """Each layer has its columns; rows that only padding has are 0."""
    cfg = model_config(config(vocab_size_per_layer_input=250))
    whole = np.random.default_rng(0).standard_normal((250, 6 * 8), np.float32)
    reads = []

    class Source:
        def read(self, name: str, rows: slice) -> np.ndarray:
            reads.append(range(250)[rows])
            return whole[rows].copy()

    specs = param_specs(cfg, FAMILIES["gemma4_text"], Parallel(devices), ())["layers"]
    for _ in range(2):
        reads.clear()
        for number, layer in enumerate(specs):
            table = layer["per_layer_embed"]
            size = table.shape[0] // devices
            bounds = [slice(i * size, (i + 1) * size) for i in range(devices)]
            got = np.concatenate([table.fill(Source(), (part, slice(0, 8))) for part in bounds])
            np.testing.assert_array_equal(got[:250], whole[:, 8 * number : 8 * number + 8])
            assert (got[250:] == 0).all()
        assert sum(map(len, reads)) == 250
