"""Weights made up from a config: the same for any number of devices, of sane sizes, and never without saying so."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import FIXTURES, tiny

import checkpoints
import jaxserve
from jaxserve import models, params
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.declare import declare
from jaxserve.models.weights import param_specs
from jaxserve.quantization import BlockFp8, QuantArray
from jaxserve.quantization.specs import E4M3
from jaxserve.random_weights import RandomWeights, promised
from jaxserve.sharding import Parallel, make_mesh

ONE = Parallel()
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def declared(source: checkpoints.Checkpoint, parallel: Parallel = ONE) -> params.Specs:
    return declare(models.model_config(source.config), parallel, source, "float32")


def random_source(family: str) -> checkpoints.Checkpoint:
    return checkpoints.open_config(str(FIXTURES / family))


@pytest.mark.parametrize("family", ["llama3", "gemma3_text", "glm4_moe", "qwen3_fp8_block", "gpt_oss_mxfp4"])
def test_a_config_declares_what_its_checkpoint_does(family: str) -> None:
    def leaves(source: checkpoints.Checkpoint) -> list[tuple[Any, ...]]:
        found = jax.tree.flatten(declared(source), is_leaf=lambda x: isinstance(x, params.ParamSpec))
        return [found[1], *((spec.shape, spec.axes, spec.dtype, dict(spec.pieces)) for spec in found[0])]

    with checkpoints.open_checkpoint(FIXTURES / family) as real:
        assert leaves(random_source(family)) == leaves(real)


def test_what_a_config_excepts_is_not_quantized() -> None:
    """Neither are the tensors of one parameter half quantized: q, k and v are one."""
    cfg = models.model_config(random_source("qwen3_fp8_block").config)
    specs = param_specs(cfg, models.FAMILIES[cfg.model_type], ONE, ())

    def fp8(*excepted: str) -> set[str]:
        config = {"quantization_config": {"modules_to_not_convert": list(excepted)}}
        found = promised(specs, BlockFp8(16), config)
        quantized = {name for name, info in found.items() if info.dtype == E4M3}
        assert {f"{name}_scale_inv" for name in quantized} == {name for name in found if name.endswith("_scale_inv")}
        return quantized

    everything = fp8()
    down = {name for name in everything if "mlp.down_proj" in name}
    qkv = {name for name in everything if any(f"layers.1.self_attn.{part}_proj" in name for part in "qkv")}
    assert down
    assert len(qkv) == 3
    assert fp8("mlp.down_proj") == everything - down
    assert fp8("layers.1.self_attn.k_proj", "lm_head") == everything - qkv


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_fp8_block", "gpt_oss_mxfp4"])
def test_what_weights_mean_is_of_variance_one_over_inputs_and_norms_are_one(family: str) -> None:
    specs = declared(random_source(family))
    weights = params.load(specs, RandomWeights(specs, "float32"), "float32", make_mesh(1))
    for layer in weights["layers"]:
        for name, weight in layer.items():
            if name.endswith("norm"):
                assert (np.asarray(weight) == 1).all(), name
            elif name in ("qkv", "gate", "up", "down", "gate_up"):
                meaning = np.asarray(weight.dequantize() if hasattr(weight, "dequantize") else weight, np.float32)
                deviation = meaning.std() * meaning.shape[-1] ** 0.5
                assert 0.7 < deviation < 1.4, name  # MXFP4: to the next power of two
                assert abs(meaning.mean()) < 0.1 * meaning.std(), name


def test_any_rows_are_rows_of_the_whole() -> None:
    specs = declared(random_source("llama3"))
    source = RandomWeights(specs, "bfloat16", seed=3)
    for name, tensor in source.tensors.items():
        whole = source.read(name)
        assert whole.shape == tensor.shape
        assert (source.read(name, slice(1, 5)) == whole[1:5]).all()
        rows = np.array([4, 5, 6, 2, 0, len(whole) - 1])
        assert (source.read(name, rows) == whole[rows]).all()
        assert source.read(name, rows[:0]).shape == (0, *whole.shape[1:])


def test_tensors_and_seeds_differ() -> None:
    specs = declared(random_source("llama3"))
    source = RandomWeights(specs, "float32")
    gate, up = (source.read(f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up"))
    assert abs(np.corrcoef(gate.ravel(), up.ravel())[0, 1]) < 0.1
    other = RandomWeights(specs, "float32", seed=1).read("model.layers.0.mlp.gate_proj.weight")
    assert abs(np.corrcoef(gate.ravel(), other.ravel())[0, 1]) < 0.1
    assert abs(np.corrcoef(gate[0], gate[1])[0, 1]) < 0.6


@pytest.mark.parametrize("family", ["llama3", "glm4_moe", "qwen3_fp8_block"])
def test_the_model_is_the_same_on_any_number_of_devices(family: str) -> None:
    """These have as many KV heads as the two devices divide, so that weights are laid out alike."""

    def meaning(count: int) -> list[np.ndarray]:
        specs = declared(random_source(family), Parallel(count))
        weights = params.load(specs, RandomWeights(specs, "float32"), "float32", make_mesh(count))
        parts = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, QuantArray))
        return [np.asarray(part.dequantize() if isinstance(part, QuantArray) else part) for part in parts]

    for one, two in zip(meaning(1), meaning(2), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_config_alone_runs_and_says_so(programs_dir: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "some_model.json"
    path.write_text((FIXTURES / "llama3" / "config.json").read_text())
    with tiny(programs_dir, str(path), load_format="random") as llm:
        assert "WEIGHTS ARE RANDOM" in llm.report()["model"]["weights"]
        assert "WEIGHTS ARE RANDOM" in caplog.text
        with pytest.raises(jaxserve.RequestError, match="no tokenizer"):
            llm.generate("a text", max_tokens=1)
        (output,) = llm.generate([PROMPT], max_tokens=3, temperature=0.0, ignore_eos=True)
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"load_format": "random", "sidecar": "auto"}, "sidecar does not go with load_format random"),
        ({"load_format": "random", "disk_kv_path": "kv"}, "disk_kv_path does not go with load_format random"),
        ({"load_format": "random", "sidecar_dir": "x"}, "sidecar_dir needs"),
        ({"model": "config.json"}, "runs with load_format random alone"),
        ({"model": "config.json", "load_format": "sidecar"}, "runs with load_format random alone"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig(**{"model": "some-folder", **options})


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"model_type": "llama"}), "\ud800"])
def test_a_config_that_cannot_be_used_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match="bad.json|does not give") as caught:
        jaxserve.LLM(str(path), load_format="random")
    assert type(caught.value) is not ValueError


def test_no_such_config() -> None:
    with pytest.raises(checkpoints.CheckpointError, match="nowhere.json: no such file"):
        jaxserve.LLM("/tmp/nowhere.json", load_format="random")
