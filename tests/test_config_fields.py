"""config.json: a field that is wrong is refused by name, by whatever family reads it, and never by a traceback."""

import contextlib
import json
import math
from typing import Any

import pytest
from tiny import FAMILIES, FIXTURES

from jaxserve.config import ConfigError
from jaxserve.models import model_config


def config(family: str, **changed: Any) -> dict[str, Any]:
    return json.loads((FIXTURES / family / "config.json").read_text()) | changed


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        (
            "glm_moe_dsa",
            {"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 0},
            "index_topk_freq 4 and index_skip_topk_offset 0: the first layer",
        ),
        ("deepseek_v32", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for deepseek_v32"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported for glm4_moe"),
        ("gemma4_dense", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "a rope for each kind"),
        ("llama3", {"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1 .*, got 0"),
        ("llama3", {"num_hidden_layers": 2.5}, "num_hidden_layers .* got 2.5"),
        ("llama3", {"num_attention_heads": True}, "num_attention_heads .* got True"),
        ("llama3", {"hidden_size": "64"}, "hidden_size .* got '64'"),
        ("llama3", {"hidden_size": -64}, "hidden_size .* got -64"),
        ("llama3", {"vocab_size": 0}, "vocab_size .* got 0"),
        ("llama3", {"vocab_size": 2**40}, "vocab_size .* at most 2147483647"),
        ("llama3", {"max_position_embeddings": [4]}, r"max_position_embeddings .* got \[4\]"),
        ("llama3", {"rms_norm_eps": None}, "rms_norm_eps must be a positive finite number, got None"),
        ("llama3", {"rms_norm_eps": math.nan}, "rms_norm_eps .* got nan"),
        ("llama3", {"rms_norm_eps": True}, "rms_norm_eps .* got True"),
        ("llama3", {"head_dim": 15}, "rope cannot turn 15 of a head's 15 channels"),
        ("llama3", {"partial_rotary_factor": 2}, "rope cannot turn 32 of a head's 16 channels"),
        ("llama3", {"rope_parameters": [1]}, r"rope_parameters must be an object, got \[1\]"),
        ("llama3", {"rope_parameters": {"rope_theta": math.inf}}, "rope_parameters: rope_theta .* got inf"),
        ("llama3", {"rope_parameters": None, "rope_theta": 0}, "rope_theta must be a positive finite number, got 0"),
        ("llama3", {"dtype": ["float32"]}, "dtype must be a string"),
        ("llama3", {"model_type": ["llama"]}, r"unknown architecture"),
        ("mistral", {"sliding_window": -1}, "sliding_window must be an integer of at least 0"),
        ("gemma3_text", {"sliding_window": 0}, "there is no sliding_window"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": "x"}}}, "full_attention: rope_theta"),
        ("qwen3_moe", {"num_experts_per_tok": 20}, "num_experts_per_tok is 20, and there are 8 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be at least 1"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        ("gemma4_moe", {"top_k_experts": 99}, "top_k_experts is 99"),
        ("gpt_oss", {"num_experts_per_tok": None, "experts_per_token": 9}, "experts_per_token is 9"),
        ("deepseek_v3", {"num_experts_per_tok": 20}, "20 a token"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "config.json of qwen3_moe cannot be read: TypeError"),
        ("qwen2", {"max_window_layers": "a"}, "max_window_layers"),
        ("llama3", {"hidden_act": ["silu"]}, "config.json of llama cannot be read: TypeError"),
        ("gpt_oss_mxfp4", {"swiglu_limit": "7"}, "swiglu_limit must be a positive finite number, got '7'"),
    ],
)
def test_a_wrong_field_is_named(family: str, changed: dict[str, Any], named: str) -> None:
    kind = {"model_type": "mistral"} if family == "mistral" else {}
    with pytest.raises(ConfigError, match=named):
        model_config(config("llama3" if kind else family, **kind, **changed))


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_of_layers_that_are_not_known_are_refused_by_name(family: str) -> None:
    hf = config(family)
    size = hf["num_hidden_layers"]
    for kind in ("linear_attention", "full", "", None, ["full_attention"], 1):
        kinds = [*(hf.get("layer_types") or ["full_attention"] * size)[1:], kind]
        with pytest.raises(ConfigError, match=r"^layer_types: .* is not supported for " + hf["model_type"]) as caught:
            model_config(hf | {"layer_types": kinds})
        assert repr(kind) in str(caught.value)
    for wrong in (["full_attention"] * (size - 1), ["full_attention"] * (size + 5), [], "full_attention", {}):
        with pytest.raises(ConfigError, match=f"^layer_types must name {size} layers"):
            model_config(hf | {"layer_types": wrong})


def test_windows_where_the_family_has_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="'sliding_attention' is not supported for llama"):
        model_config(config("llama3", layer_types=["sliding_attention"] * 3, sliding_window=8))


def test_kinds_of_feed_forward_parts_are_checked() -> None:
    for kinds in (["dense", "moe", "sparse"], ["dense"]):
        with pytest.raises(ConfigError, match="^mlp_layer_types"):
            model_config(config("glm4_moe_lite", mlp_layer_types=kinds))
    hf = config("glm4_moe_lite", num_nextn_predict_layers=1)
    behind = model_config(hf | {"mlp_layer_types": [*hf["mlp_layer_types"], "sparse"]})
    assert behind == model_config(hf)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_field_of_the_wrong_kind_leaks_another_error(family: str) -> None:
    """Every field in turn becomes what it is not: the config is read, or refused by ``ConfigError``."""
    hf = config(family)
    assert model_config(hf).num_layers == hf["num_hidden_layers"]
    wrongs: list[Any] = [None, True, -1, 0, 2.5, math.nan, 10**400, "x", [], [None], {}, {"a": []}]
    for name in hf:
        for wrong in wrongs:
            with contextlib.suppress(ConfigError):
                hash(model_config(hf | {name: wrong}))
