"""Quantized checkpoints: which are read, and that what is kept in memory means what is on disk, sharded or not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny import FIXTURES, LIMITS, idle, reference, tiny

import checkpoints
import jaxserve
from checkpoints import TensorInfo
from jaxserve import models, params, quantization
from jaxserve.buckets import StepBucket
from jaxserve.config import ConfigError, ModelConfig
from jaxserve.context import Setting
from jaxserve.declare import declare
from jaxserve.layers import linear
from jaxserve.models import FAMILIES
from jaxserve.models.weights import param_specs
from jaxserve.params import ParamSpec, WeightError
from jaxserve.quantization import BlockFp8, QuantArray
from jaxserve.sharding import Parallel, make_mesh
from pallas_kernels.dispatch import Kernels

E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = 8


@dataclass
class Memory:
    """A checkpoint of arrays."""

    arrays: dict[str, np.ndarray]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {n: TensorInfo(a.shape, a.dtype, a.nbytes, a.dtype.name) for n, a in self.arrays.items()}

    def read(self, name: str, rows: Any = None) -> np.ndarray:
        array = self.arrays[name]
        return (array if rows is None else array[rows]).copy()


def config(**fields: Any) -> dict[str, Any]:
    """Sizes of which hardly any is a multiple of a block."""
    base = {
        "model_type": "llama",
        "vocab_size": 40,
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 12,
        "max_position_embeddings": 64,
    }
    return base | fields


def model(hf: dict[str, Any]) -> ModelConfig:
    return FAMILIES[hf["model_type"]].config(hf)


def specs_of(cfg: ModelConfig, parallel: Parallel, source: Memory) -> Any:
    return param_specs(cfg, FAMILIES[cfg.model_type], parallel, source.tensors)


def is_quantized(name: str, array: np.ndarray) -> bool:
    return array.ndim == 2 and "proj" in name


def checkpoints_of(cfg: ModelConfig, spelling: str) -> tuple[Memory, Memory]:
    """The same weights twice: quantized, and dequantized by hand."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {}
    empty = Memory({})
    for spec in jax.tree.leaves(specs_of(cfg, Parallel(), empty), is_leaf=lambda x: isinstance(x, ParamSpec)):
        shapes.update(spec.pieces)
    fp8, plain = {}, {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        if not is_quantized(name, values):
            fp8[name] = plain[name] = values
            continue
        data = (values * 100).astype(E4M3)
        scale = rng.uniform(0.5, 2, [-(-size // BLOCK) for size in shape]).astype(np.float32)
        fp8[name] = data
        if spelling == "scale":
            scale = np.exp2(np.round(np.log2(scale))).astype(ml_dtypes.float8_e8m0fnu)
            fp8[name.removesuffix(".weight") + ".scale"] = scale
        else:
            fp8[name + "_scale_inv"] = scale
        wide = np.kron(scale.astype(np.float32), np.ones((BLOCK, BLOCK), np.float32))
        plain[name] = data.astype(np.float32) * wide[: shape[0], : shape[1]]
    return Memory(fp8), Memory(plain)


@pytest.mark.parametrize("spelling", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_what_is_loaded_means_what_is_on_disk(devices: int, spelling: str) -> None:
    """Bit for bit, with blocks cut short by edges, heads and devices; and it is fp8 on the devices."""
    cfg = model(config())
    parallel = Parallel(devices)
    mesh = make_mesh(parallel.devices, parallel.expert_groups)
    fp8, plain = checkpoints_of(cfg, spelling)
    specs = quantization.quantized(specs_of(cfg, parallel, fp8), BlockFp8(BLOCK), fp8.tensors, parallel, "float32")
    params.check(specs, fp8)
    loaded = params.load(specs, fp8, "float32", mesh)
    expected = params.load(specs_of(cfg, parallel, plain), plain, "float32", mesh)
    described = params.abstract(specs, "float32", mesh)
    assert jax.tree.structure(described) == jax.tree.structure(loaded)
    kinds = {}
    for name, weight in loaded["layers"][0].items():
        want = np.asarray(expected["layers"][0][name])
        if isinstance(weight, QuantArray):
            assert weight.data.dtype == E4M3
            kinds[name] = weight.blocks
            assert weight.scale.sharding.spec == weight.data.sharding.spec
            weight = jax.jit(QuantArray.dequantize)(weight)
        np.testing.assert_array_equal(weight, want)
    assert set(kinds) == {"qkv", "o", "gate", "up", "down"}
    if devices == 1:
        assert kinds["gate"] == (BLOCK, BLOCK)


EXPERTS = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "glm4_moe": {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1},
}


@pytest.mark.parametrize("spelling", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize(("devices", "groups"), [(1, 1), (4, 1), (4, 4), (8, 4)])
@pytest.mark.parametrize("family", list(EXPERTS))
def test_experts_too_mean_what_is_on_disk(family: str, devices: int, groups: int, spelling: str) -> None:
    """Experts are cut by number and by width, and padded; their router stays in float32."""
    cfg, parallel = model(config(model_type=family, **EXPERTS[family])), Parallel(devices, groups)
    mesh = make_mesh(devices, groups)
    fp8, plain = checkpoints_of(cfg, spelling)
    specs = quantization.quantized(specs_of(cfg, parallel, fp8), BlockFp8(BLOCK), fp8.tensors, parallel, "float32")
    params.check(specs, fp8)
    layer = params.load(specs, fp8, "float32", mesh)["layers"][0]
    expected = params.load(specs_of(cfg, parallel, plain), plain, "float32", mesh)["layers"][0]
    assert layer["router"].dtype == jnp.float32
    quantized = {name for name, weight in layer.items() if isinstance(weight, QuantArray)}
    shared = {"shared_gate", "shared_up", "shared_down"} if family == "glm4_moe" else set()
    assert quantized == {"qkv", "o", "gate_up", "down"} | shared
    for name, weight in layer.items():
        meant = jax.jit(QuantArray.dequantize)(weight) if name in quantized else weight
        np.testing.assert_array_equal(meant, np.asarray(expected[name]), err_msg=name)


def test_an_engine_runs_fp8_experts(programs_dir: str, tmp_path: Path) -> None:
    """The fixture, quantized here, beside the same numbers dequantized."""
    from safetensors.numpy import load_file, save_file

    known = json.loads((FIXTURES / "qwen3_moe" / "config.json").read_text())
    table = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    fp8, plain = {}, {}
    for name, weight in load_file(FIXTURES / "qwen3_moe" / "model.safetensors").items():
        if weight.ndim != 2 or "_proj" not in name:
            fp8[name] = plain[name] = weight
            continue
        rows, columns = (-(-size // 16) for size in weight.shape)
        padded = np.pad(weight, [(0, 16 * n - size) for n, size in zip((rows, columns), weight.shape, strict=True)])
        scale = np.abs(padded.reshape(rows, 16, columns, 16)).max((1, 3)) / 448
        wide = np.kron(scale, np.ones((16, 16)))[: weight.shape[0], : weight.shape[1]].astype(np.float32)
        data = (weight / wide).astype(E4M3)
        fp8 |= {name: data, f"{name}_scale_inv": scale.astype(np.float32)}
        plain[name] = data.astype(np.float32) * wide
    found = []
    for kind, weights, more in (("fp8", fp8, {"quantization_config": table}), ("plain", plain, {})):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(known | more))
        save_file(weights, folder / "model.safetensors")
        with jaxserve.LLM(str(folder), **LIMITS, cache_dir=programs_dir) as llm:
            assert ("fp8" in llm.report()["run"]["quantization"]) == (kind == "fp8")
            (output,) = llm.generate([[3, 1, 4, 1, 5, 9]], max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
            found.append([(token.token_id, token.logprob) for token in output.outputs[0].logprobs])
    for (token, logprob), (other, expected) in zip(*found, strict=True):
        assert token == other
        assert logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_equal_those_of_dequantized_weights(dtype: str, rows: int) -> None:
    """The same rounding as if the weights had been dequantized when they were loaded."""
    cfg = model(config())
    fp8, plain = checkpoints_of(cfg, "weight_scale_inv")
    one = Parallel()
    specs = quantization.quantized(specs_of(cfg, one, fp8), BlockFp8(BLOCK), fp8.tensors, one, dtype)
    layer = params.load(specs, fp8, dtype, make_mesh(1))["layers"][0]
    exact = params.load(specs_of(cfg, one, plain), plain, dtype, make_mesh(1))["layers"][0]
    product = jax.jit(linear, static_argnums=2)
    for name, inputs in (("qkv", 1), ("o", 3), ("down", 1)):
        width = int(np.prod(exact[name].shape[-inputs:]))
        x = np.random.default_rng(1).standard_normal((rows, width), np.float32)
        got, want = product(x, layer[name], inputs), product(x, exact[name], inputs)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
        assert got.shape == want.shape


@pytest.mark.parametrize(("devices", "groups"), [(2, 1), (8, 4)])
def test_devices_multiply_their_own_parts(devices: int, groups: int) -> None:
    """As for kernels, which XLA does not divide: outputs, or inputs, are cut as the weight is, and parts are summed."""
    cfg, parallel, mesh = model(config()), Parallel(devices, groups), make_mesh(devices, groups)
    fp8, _ = checkpoints_of(cfg, "weight_scale_inv")
    specs = quantization.quantized(specs_of(cfg, parallel, fp8), BlockFp8(BLOCK), fp8.tensors, parallel, "float32")
    layer = params.load(specs, fp8, "float32", mesh)["layers"][0]
    at = Setting(cfg, StepBucket(5, 0, 0), mesh, Kernels("auto", "NVIDIA H200", "9.0"))
    for name, inputs in (("qkv", 1), ("o", 3), ("gate", 1), ("down", 1)):
        weight = layer[name]
        width = int(np.prod(weight.shape[-inputs:]))
        x = np.random.default_rng(1).standard_normal((5, width), np.float32)
        got = jax.jit(at.linear, static_argnums=2)(x, weight, inputs)
        want = jax.jit(linear, static_argnums=2)(x, weight, inputs)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
        assert got.sharding.is_fully_replicated == (name in ("o", "down"))


def test_a_cut_of_a_weight_is_a_cut_of_what_it_means() -> None:
    rng = np.random.default_rng(2)
    data = jnp.asarray(rng.standard_normal((4, 2, 24, 20)), E4M3)
    weight = QuantArray(data, jnp.asarray(rng.random((4, 2, 3, 3)), jnp.float32), (1, 1, 8, 8), "float32")
    whole = weight.dequantize()
    part = jax.jit(lambda w, e, f: quantization.cut(w, (e, 0, f, 0), (1, 2, 8, 20)))(weight, 3, 16)
    np.testing.assert_array_equal(part.dequantize(), whole[3:, :, 16:])
    np.testing.assert_array_equal(quantization.cut(whole, (1, 0, 0, 0), (1, 2, 8, 20)), whole[1:2, :, :8])


def test_a_checkpoint_that_does_not_fit_is_refused_by_name() -> None:
    cfg = model(config())
    fp8, plain = checkpoints_of(cfg, "weight_scale_inv")
    one = Parallel()

    def read(**changed: np.ndarray | None) -> None:
        arrays = {**fp8.arrays, **{name.replace("__", "."): a for name, a in changed.items()}}
        source = Memory({name: a for name, a in arrays.items() if a is not None})
        specs = specs_of(cfg, one, source)
        params.check(quantization.quantized(specs, BlockFp8(BLOCK), source.tensors, one, "float32"), source)

    read()
    prefix = "model__layers__0__"
    q = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(WeightError, match=f"tensor {q} is float8_e4m3fn and has no scales: neither {q}_scale_inv"):
        read(**{f"{prefix}self_attn__q_proj__weight_scale_inv": None})
    with pytest.raises(WeightError, match="of tensors .*k_proj.weight, float32, and .*q_proj.weight, float8_e4m3fn"):
        read(**{f"{prefix}self_attn__k_proj__weight": plain.arrays["model.layers.0.self_attn.k_proj.weight"]})
    with pytest.raises(WeightError, match=r"gate_proj.weight_scale_inv has shape \[3, 3\], expected \[4, 3\]"):
        read(**{f"{prefix}mlp__gate_proj__weight_scale_inv": np.ones((3, 3), np.float32)})
    with pytest.raises(WeightError, match=r"embed_tokens.weight is float8_e4m3fn: this parameter is not read"):
        table = fp8.arrays["model.embed_tokens.weight"].astype(E4M3)
        read(model__embed_tokens__weight=table, model__embed_tokens__weight_scale_inv=np.ones((5, 3), np.float32))
    with pytest.raises(WeightError, match="unexpected tensor model.norm.weight_scale_inv"):
        read(model__norm__weight_scale_inv=np.ones(1, np.float32))


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq', bits 4 is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "quant_method 'awq', bits 4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'compressed-tensors', format 'pack-q"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt', quant_algo 'NVFP4'"),
        ({"bits": 4}, "quant_method None, bits 4"),
        ({**FP8, "weight_block_size": None}, "weight_block_size None is not supported"),
        ({**FP8, "weight_block_size": [1, 128]}, r"weight_block_size \[1, 128\] is not supported"),
        ({**FP8, "weight_block_size": [0, 0]}, r"weight_block_size \[0, 0\] is not"),
        ({**FP8, "weight_block_size": ["128", "128"]}, "weight_block_size .* is not"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme 'static' is not supported"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ([1], "must be an object"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantization.rule(config(quantization_config=table))


def test_what_is_supported() -> None:
    assert quantization.rule(config()) is None
    assert quantization.rule(config(quantization_config=FP8)) == BlockFp8(128)
    assert quantization.rule(config(quantization_config={**FP8, "weight_block_size": [32, 32]})) == BlockFp8(32)
    with pytest.raises(ConfigError, match="expert_dtype 'fp4'"):
        quantization.rule(config(quantization_config=FP8, expert_dtype="fp4"))


def test_fp8_stays_in_memory(programs_dir: str) -> None:
    """What the engine holds is the bytes on disk; the report says so."""
    with tiny(programs_dir, "qwen3_fp8_block") as llm:
        held = [leaf for leaf in jax.tree.leaves(llm._built.runner.weights) if leaf.dtype == E4M3]
        assert sum(leaf.nbytes for leaf in held) == 2 * (256 * (128 + 64 + 64) + 256 * 128 + 3 * 256 * 384)
        run = llm.report()["run"]
        assert run["quantization"] == "fp8, a scale for 128x128 weights"
        assert run["weight_bytes"] < 1.01 * sum(leaf.nbytes for leaf in jax.tree.leaves(llm._built.runner.weights))
        prompt = reference("qwen3_fp8_block")["input_ids"][0].tolist()
        (output,) = llm.generate([prompt], max_tokens=16, temperature=0.0, ignore_eos=True)
        assert output.outputs[0].token_ids == reference("qwen3_fp8_block")["greedy_ids"].tolist()
        idle(llm)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("family", ["llama3", "smollm2", "gpt_oss", "gpt_oss_mxfp4", "qwen3_fp8_block", "gemma4_dense"])
def test_parameters_are_the_numbers_of_the_checkpoint(family: str, devices: int) -> None:
    """Whatever padding devices bring, and however many numbers a byte holds; scales are none."""
    with checkpoints.open_checkpoint(FIXTURES / family) as source:
        specs = declare(models.model_config(source.config), Parallel(devices), source, "float32")
        expected = sum(
            int(np.prod(info.shape)) * (2 if name.endswith("_blocks") else 1)
            for name, info in source.tensors.items()
            if not name.endswith(("_scales", "_scale_inv"))
        )
    assert quantization.count_numbers(specs) == expected
