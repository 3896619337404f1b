"""Sparse latent attention in the engine: what is chosen is what is attended to, whatever became of the cache."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_quantization
from test_parity import Spy
from tiny import FIXTURES, LIMITS, idle, reference, tiny

import jaxserve
from jaxserve import build, models, params, quantization
from jaxserve.cache_spec import FP8, KeyPages, LatentPages
from jaxserve.config import ConfigError
from jaxserve.executables import ExecutableStore
from jaxserve.layer_spec import Latent
from jaxserve.programs import ProgramSet
from jaxserve.sharding import Parallel, make_mesh
from jaxserve.warmup import plan
from pallas_kernels.codecs import records

KINDS = ["auto", "fp8_ds_mla"]
PAGE = {
    ("deepseek_v32", "auto"): 8 * 3 * (160 + 64),
    ("deepseek_v32", "fp8_ds_mla"): 8 * 3 * (52 + 20),
    ("glm_moe_dsa", "auto"): 8 * (4 * 160 + 2 * 64),
    ("glm_moe_dsa", "fp8_ds_mla"): 8 * (4 * 52 + 2 * 20),
}
"""Bytes of a page of 8 tokens, of all planes: the same on every device."""


def prompts(family: str) -> list[list[int]]:
    """Of different lengths, two with a beginning in common; all but one longer than the 8 tokens that are chosen."""
    ids = reference(family)["input_ids"][0].tolist()
    return [ids, ids[:7], ids[3:40], ids[:32] + ids[1:9]]


def answers(llm: jaxserve.LLM, asked: list[list[int]]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(asked, max_tokens=40, temperature=0.0, ignore_eos=True)]


@pytest.mark.parametrize(
    ("family", "kind", "devices"),
    [
        ("deepseek_v32", "fp8_ds_mla", 4),
        ("glm_moe_dsa", "auto", 1),
    ],
)
def test_tokens_depend_on_nothing_that_became_of_the_cache(
    family: str, kind: str, devices: int, programs_dir: str
) -> None:
    """In company, in chunks, on several devices, preempted, spilled to the host, and from the prefix cache; as each
    prompt alone and cold, of fp8 records also whole: that plain ones are is in test_parity."""
    alone = {"max_num_batched_tokens": 64} if kind != "auto" else {}
    small = {"kv_cache_dtype": kind, "max_model_len": 96, "kv_cache_memory_bytes": 15 * PAGE[family, kind]}
    with tiny(programs_dir, family, prefix_caching=False, **small | alone) as llm:
        expected = [answers(llm, [prompt])[0] for prompt in prompts(family)]
    with tiny(programs_dir, family, tensor_parallel=devices, host_kv_gib=0.001, **small) as llm:
        assert answers(llm, prompts(family)) == expected
        assert answers(llm, prompts(family)) == expected
        scheduler = llm._built.engine.scheduler
        assert scheduler.preemptions > 0
        assert scheduler.cache.tier.counts.restored > 0
        (again,) = llm.generate([prompts(family)[0]], max_tokens=1)
        assert again.cached_tokens > 0
        idle(llm)


def logits(programs_dir: str, model: Path | str, prompt: list[int], **options) -> np.ndarray:
    """Of every token of the prompt, ``[T, V]``."""
    with jaxserve.LLM(str(model), **{**LIMITS, "cache_dir": programs_dir, **options}) as llm:
        spy = Spy(llm)
        llm.generate([prompt], max_tokens=1, temperature=0.0, prompt_logprobs=0)
    (last,) = (rows for rows in spy.rows if len(rows) == 1)  # what is sampled from
    blocks = np.concatenate([rows for rows in spy.rows if len(rows) > 1])
    return np.concatenate([blocks[: len(prompt) - 1], last])


def changed(tmp_path: Path, family: str, **fields) -> Path:
    """A copy of the fixture with other fields in its config."""
    folder = tmp_path / "changed"
    shutil.copytree(FIXTURES / family, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def test_a_wider_choice_gives_other_logits(programs_dir: str, tmp_path: Path) -> None:
    """As the reference says: the 40 positions behind the first 8 change if all is attended to, by more than 9."""
    family = "glm_moe_dsa"
    ref, meta = reference(family), json.loads((FIXTURES / family / "meta.json").read_text())["sparsity"]
    opened = changed(tmp_path, family, index_topk=256)
    error = np.abs(logits(programs_dir, opened, ref["input_ids"][0].tolist()) - ref["logits"]).max(axis=1)
    assert (error > 1e-3).sum() == meta["positions_changed"] == 40
    assert error[:8].max() < 1e-3
    assert error.max() == pytest.approx(meta["max_abs_diff"], abs=1e-2)


def test_shared_layers_go_by_the_choice_before_them(programs_dir: str) -> None:
    """Also across programs of one layer each: in the reference's numbers, and with all layers in one program."""
    ref = reference("glm_moe_dsa")
    prompt = ref["input_ids"][0].tolist()
    for layers in (0, 1):
        found = logits(programs_dir, FIXTURES / "glm_moe_dsa", prompt, layers_per_program=layers)
        assert np.abs(found - ref["logits"]).max() < 1e-3


def test_keys_are_kept_where_they_are_scored(programs_dir: str) -> None:
    """Layers that go by another's choice keep none; records have the published sizes."""
    with tiny(programs_dir, "glm_moe_dsa", kv_cache_dtype="fp8") as llm:
        planes = llm._built.programs.cache.planes
        table = llm.report()["kv cache"]
    latents, keys = LatentPages(32, 8, FP8), KeyPages(16, FP8)
    assert planes == ((latents, keys), (latents, keys), (latents,), (latents,))
    assert table["bytes_per_token"] == 4 * (32 + 4 + 2 * 8) + 2 * (16 + 4)
    assert (LatentPages(512, 64, FP8).token_bytes, KeyPages(128, FP8).token_bytes) == (656, 132)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_hold_what_the_layout_says(kind: str, programs_dir: str) -> None:
    """Page by page: latents that norm and rope have made, scales that fit, zeros where nothing was written."""
    prompt = reference("deepseek_v32")["input_ids"][0].tolist()[:20]
    with tiny(programs_dir, "deepseek_v32", kv_cache_dtype=kind) as llm:
        llm.generate([prompt], max_tokens=1, temperature=0.0)
        latents, keys = (np.asarray(pages) for pages in llm._built.runner.state.kv[0])
    size = LIMITS["page_size"]
    used = np.flatnonzero(latents.reshape(len(latents), -1).any(1))
    assert len(used) == 3
    if kind == "auto":
        assert (latents.shape[1:], keys.shape[1:]) == ((size, 40), (size, 16))
        return
    assert (latents.shape[1:], keys.shape[1:]) == ((size, 52), (size * 20,))
    record = records.unpack_latent(jnp.asarray(latents[used]), 32)
    np.testing.assert_array_equal(records.pack_latent(record), latents[used])
    data, scale = records.unpack_key_pages(jnp.asarray(keys[used]), 16)
    np.testing.assert_array_equal(records.pack_key_pages(data, scale), keys[used])
    for values, scales in ((record.data, record.scale), (data, scale)):
        written = np.asarray(scales)[..., 0] > 0
        assert written.sum() == 20
        assert (np.log2(np.asarray(scales)[written]) % 1 == 0).all()
        largest = np.abs(np.asarray(values, np.float32)).max(-1)[written]
        assert ((largest >= 224) & (largest <= 448)).all(), "a scale is the smallest that fits"
    plain = logits(programs_dir, FIXTURES / "deepseek_v32", prompt)
    packed = logits(programs_dir, FIXTURES / "deepseek_v32", prompt, kv_cache_dtype=kind)
    assert 1e-4 < np.abs(plain - packed).mean() < 0.3


def wide(programs_dir: str, family: str, devices: int, kind: str) -> ProgramSet:
    """The programs of an engine whose cache dwarfs all else."""
    limits = LIMITS | {"tensor_parallel": devices, "kv_cache_dtype": kind, "cache_dir": programs_dir}
    asked = jaxserve.EngineConfig(model=str(FIXTURES / family), **limits)
    mesh = build.mesh_of(asked)
    found = plan(asked, mesh, ExecutableStore(Path(programs_dir), mesh.devices.flat))
    return dataclasses.replace(found, num_pages=20_000)


@pytest.mark.parametrize(
    ("family", "devices", "kind"),
    [("deepseek_v32", 1, "auto"), ("deepseek_v32", 2, "fp8_ds_mla"), ("glm_moe_dsa", 2, "auto")],
)
def test_programs_copy_no_cache_and_gather_nothing(family: str, devices: int, kind: str, programs_dir: str) -> None:
    """Pages are changed in place; devices meet in sums alone: all make the same choice, heads stay where they are."""
    programs = wide(programs_dir, family, devices, kind)
    for bucket in (programs.buckets.step(2, 0), programs.buckets.step(2, 1)):
        (segment, *_) = programs.segments(bucket)
        program = programs.layers(bucket, segment)
        jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
        compiled = jitted.lower(*program.args).compile()
        arrays = [pages.size * pages.dtype.itemsize for pages in jax.tree.leaves(program.args[1])]
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= sum(arrays)
        assert memory.temp_size_in_bytes < min(arrays) / 2
        used = set(re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", compiled.as_text()))
        assert used <= {"all-reduce"}


def test_fp8_weights_of_the_indexer_mean_what_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the hub: all but what gates the heads is fp8 there, and stays so."""
    monkeypatch.setattr(
        test_quantization, "is_quantized", lambda name, array: array.ndim == 2 and bool(re.search(r"wq_b|wk\.", name))
    )
    one_layer = {"num_hidden_layers": 1, "index_head_dim": 12, "layer_types": None, "mlp_layer_types": None}
    cfg, parallel = models.model_config(BASE | one_layer), Parallel(2)
    block = test_quantization.BLOCK
    fp8, plain = test_quantization.checkpoints_of(cfg, "weight_scale_inv")
    specs = test_quantization.specs_of(cfg, parallel, fp8)
    specs = quantization.quantized(specs, quantization.BlockFp8(block), fp8.tensors, parallel, "float32")
    params.check(specs, fp8)
    mesh = make_mesh(2)
    (mine,) = params.load(specs, fp8, "float32", mesh)["layers"]
    (theirs,) = params.load(test_quantization.specs_of(cfg, parallel, plain), plain, "float32", mesh)["layers"]
    for name in ("index_q", "index_k"):
        assert isinstance(mine[name], quantization.QuantArray)
        np.testing.assert_array_equal(mine[name].dequantize(), theirs[name])
    assert mine["index_gates"].dtype == jnp.float32


def test_predictors_of_the_hub_are_let_pass() -> None:
    """Its layer has an indexer of its own, also where the layer before it goes by another's choice."""
    cfg = models.model_config(BASE | {"index_topk_pattern": "FSSS", "num_nextn_predict_layers": 1})
    assert cfg.num_layers == 4
    (predictor,) = cfg.predictors
    assert isinstance(predictor.mixer, Latent)
    assert predictor.mixer.indexer is not None


BASE = json.loads((FIXTURES / "glm_moe_dsa" / "config.json").read_text()) | {"indexer_types": None}


@pytest.mark.parametrize(
    ("fields", "chooses"),
    [
        ({"indexer_types": ["full", "shared", "full", "shared"]}, [1, 0, 1, 0]),
        ({"index_topk_pattern": "FSSF"}, [1, 0, 0, 1]),
        ({"num_hidden_layers": 12, "index_topk_freq": 4, "index_skip_topk_offset": 3}, [1, 1, 1, 0, 0, 0] * 2),
        ({}, [1, 1, 1, 1]),
    ],
)
def test_every_spelling_of_who_chooses(fields: dict, chooses: list[int]) -> None:
    cfg = models.model_config(BASE | {"layer_types": None, "mlp_layer_types": None} | fields)
    mixers = [layer.mixer for layer in cfg.layers]
    assert all(isinstance(mixer, Latent) for mixer in mixers)
    if fields.get("index_topk_freq"):
        chooses = [layer < 3 or (layer - 2) % 4 == 0 for layer in range(12)]
    assert [mixer.indexer is not None for mixer in mixers] == [bool(own) for own in chooses]
    assert [mixer.takes_choice for mixer in mixers] == [not own for own in chooses]
    assert cfg.handed_on == (8 if 0 in chooses else None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["full", "full"]}, "indexer_types has 2 entries for 4 layers"),
        ({"indexer_types": ["shared"] * 4}, "indexer_types: the first layer is 'shared'"),
        ({"index_topk_pattern": "FSXS"}, "index_topk_pattern: 'X' is neither 'F' nor 'S'"),
        ({"index_topk_freq": -1}, "index_topk_freq must be an integer of at least 1"),
        ({"index_topk": None}, "config.json does not give 'index_topk'"),
        ({"index_topk": 0}, "index_topk must be an integer of at least 1"),
        ({"q_lora_rank": None}, "config.json does not give 'q_lora_rank'"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 8"),
    ],
)
def test_bad_configs_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.model_config(BASE | fields)
