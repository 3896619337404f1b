"""Latent attention in the engine: its weights, its programs, its cache, and what is refused."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_quantization import BLOCK, E4M3, checkpoints_of, model, specs_of
from tiny import FIXTURES, LIMITS, idle, reference, tiny

import checkpoints
import jaxserve
from jaxserve import build, decoder, models, params, quantization
from jaxserve.buckets import StepBucket
from jaxserve.config import ConfigError
from jaxserve.context import Setting, context, hidden
from jaxserve.declare import declare, declare_cache
from jaxserve.executables import ExecutableStore
from jaxserve.programs import ProgramSet
from jaxserve.quantization import BlockFp8, QuantArray
from jaxserve.sharding import Parallel, make_mesh
from jaxserve.warmup import plan

FAMILY = "deepseek_v3"
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def config(**fields: Any) -> dict[str, Any]:
    """Sizes of which hardly any is a multiple of a block; heads that meet borders of blocks nowhere."""
    base = {
        "model_type": "deepseek_v3",
        "vocab_size": 40,
        "hidden_size": 20,
        "intermediate_size": 28,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 3,
        "q_lora_rank": 18,
        "kv_lora_rank": 22,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4,
        "v_head_dim": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "max_position_embeddings": 64,
    }
    return base | fields


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("fields", [{}, {"q_lora_rank": None}, {"qk_nope_head_dim": 16, "v_head_dim": 16}])
def test_fp8_weights_mean_what_is_on_disk(fields: dict[str, Any], devices: int) -> None:
    """Also those whose rows on disk take turns, keys' and values' of each head: bit for bit, fp8 on the devices."""
    cfg, parallel = model(config(**fields)), Parallel(devices)
    fp8, plain = checkpoints_of(cfg, "weight_scale_inv")
    specs = quantization.quantized(specs_of(cfg, parallel, fp8), BlockFp8(BLOCK), fp8.tensors, parallel, "float32")
    params.check(specs, fp8)
    mesh = make_mesh(devices)
    loaded = params.load(specs, fp8, "float32", mesh)
    expected = params.load(specs_of(cfg, parallel, plain), plain, "float32", mesh)
    quantized = set()
    for mine, theirs in zip(loaded["layers"], expected["layers"], strict=True):
        assert set(mine) == set(theirs)
        for name, weight in mine.items():
            if isinstance(weight, QuantArray):
                quantized.add(name)
                assert weight.data.dtype == E4M3
                weight = weight.dequantize()
            np.testing.assert_array_equal(np.asarray(weight), np.asarray(theirs[name]), err_msg=name)
    made = {"q", "kv_a", "k_up", "v_up", "o"} | ({"q_a"} if cfg.mixers[0].q_rank else set())
    assert made < quantized
    blocks = loaded["layers"][0]["v_up"].blocks
    assert blocks == (1, 8 if fields.get("v_head_dim") == 16 else 4, BLOCK), "kept where heads leave them whole"


PAGES = 4096


def wide(programs_dir: str, devices: int, **options: Any) -> ProgramSet:
    """The programs of an engine whose cache dwarfs all else."""
    asked = jaxserve.EngineConfig(
        model=str(FIXTURES / FAMILY), tensor_parallel=devices, cache_dir=programs_dir, **LIMITS | options
    )
    mesh = build.mesh_of(asked)
    found = plan(asked, mesh, ExecutableStore(Path(programs_dir), mesh.devices.flat))
    return dataclasses.replace(found, num_pages=PAGES)


@pytest.mark.parametrize(("devices", "kind"), [(1, "auto"), (2, "auto"), (2, "fp8_ds_mla")])
def test_programs_copy_no_cache_and_gather_nothing(devices: int, kind: str, programs_dir: str) -> None:
    """Pages are changed in place; devices meet in sums alone: latents are everywhere, heads stay where they are."""
    programs = wide(programs_dir, devices, kv_cache_dtype=kind)
    for bucket in (programs.buckets.step(1, 0), programs.buckets.step(1, 1)):
        (segment, *_) = programs.segments(bucket)
        program = programs.layers(bucket, segment)
        jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
        compiled = jitted.lower(*program.args).compile()
        kept = sum(pages.size * pages.dtype.itemsize for pages in jax.tree.leaves(program.args[1]))
        assert kept > 1 << 20
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= kept
        assert memory.temp_size_in_bytes < kept / len(segment.specs) / 4
        used = set(re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", compiled.as_text()))
        assert used == {"all-reduce"} or (devices == 1 and not used)


def test_queries_without_a_latent() -> None:
    """DeepSeek V2 Lite's kind, and a greedy router that knows no groups: 40 tokens in blocks, then one by one."""
    ref, mesh, page, block = reference("deepseek_v2_lite"), make_mesh(1), 8, 32
    with checkpoints.open_checkpoint(FIXTURES / "deepseek_v2_lite") as source:
        cfg = models.model_config(source.config)
        weights = params.load(declare(cfg, Parallel(), source, "float32"), source, "float32", mesh)
    cache = declare_cache(cfg, jaxserve.EngineConfig(model="x"), "float32")
    kv = [(jnp.zeros((9, *kind.page(page))),) for (kind,) in cache.planes]

    def run(bucket, kv, tokens, starts, counts):
        tables = jnp.broadcast_to(jnp.arange(8, 0, -1), (1, bucket.rows, 8))
        ctx = context(cfg, bucket, page, tables, jnp.array([starts, counts]))
        at = Setting(cfg, bucket, mesh)
        state, kept = hidden(at, decoder.embed(cfg, weights["embed"], tokens)), []
        for spec, weight, pages in zip(cfg.layers, weights["layers"], kv, strict=True):
            pages, state = decoder.layer(at, spec, 0, weight, pages, state, ctx)
            kept.append(pages)
        return kept, decoder.head(cfg, weights, state.x)

    step, ids = jax.jit(run, static_argnums=0), ref["input_ids"][0]
    kv, logits = step(StepBucket(0, 2, block), kv, np.pad(ids[:40], (0, 24)), [0, block], [block, 8])
    seen = [logits[:40]]
    for position in range(40, len(ids)):
        kv, logits = step(StepBucket(1, 0, block), kv, ids[position : position + 1], [position], [1])
        seen.append(logits)
    np.testing.assert_allclose(np.concatenate(seen), ref["logits"], atol=1e-3)


def prompts() -> list[list[int]]:
    ids = reference(FAMILY)["input_ids"][0].tolist()
    return [ids, ids[:7], ids[3:40], ids[:32] + ids[1:9], ids[9:30] * 2, ids[5:]]


def answers(llm: jaxserve.LLM, asked: list[list[int]]) -> list[list[int]]:
    found = [output.outputs[0].token_ids for output in llm.generate(asked, **GREEDY)]
    idle(llm)
    return found


@pytest.fixture(scope="module")
def expected(programs_dir: str) -> Iterator[list[list[int]]]:
    """Each prompt alone, whole, and cold."""
    with tiny(programs_dir, FAMILY, prefix_caching=False, max_num_batched_tokens=64) as llm:
        yield [answers(llm, [prompt])[0] for prompt in prompts()]


def test_tokens_depend_on_no_chunk_or_hit(expected: list[list[int]], programs_dir: str) -> None:
    """In company, in chunks; then once more, from the prefix cache."""
    with tiny(programs_dir, FAMILY) as llm:
        assert answers(llm, prompts()) == expected
        again = llm.generate(prompts(), **GREEDY)
        assert [output.outputs[0].token_ids for output in again] == expected
        assert [output.cached_tokens for output in again] == [len(prompt) - 1 for prompt in prompts()]
        idle(llm)


@pytest.mark.parametrize(("host", "devices"), [(0, 1), (0.001, 2)])
def test_too_little_device_memory_changes_no_token(
    expected: list[list[int]], host: float, devices: int, programs_dir: str
) -> None:
    """Preempted and recomputed, or spilled to the host and restored: a latent is the same on every device."""
    room = 16 * 8 * 3 * 40 * 4
    limits = {"kv_cache_memory_bytes": room, "host_kv_gib": host, "tensor_parallel": devices, "max_num_seqs": 4}
    with tiny(programs_dir, FAMILY, **limits) as llm:
        for _ in range(2):
            assert answers(llm, prompts()) == expected
        scheduler = llm._built.engine.scheduler
        assert scheduler.preemptions > 0
        if host:
            assert scheduler.cache.tier.counts.spilled > 0
            assert scheduler.cache.tier.counts.restored > 0


def test_bytes_of_latents() -> None:
    """A copy on every device, however many there are; 576 numbers or 656 bytes of the published sizes."""
    cfg = model(config(kv_lora_rank=512, qk_rope_head_dim=64))
    for kind, size in (("auto", 576 * 2), ("fp8_ds_mla", 656)):
        asked = jaxserve.EngineConfig(model="x", tensor_parallel=8, kv_cache_dtype=kind)
        cache = declare_cache(cfg, asked, "bfloat16")
        assert cache.device_bytes(8) == cache.token_bytes == size * cfg.num_layers


def test_what_cannot_be_is_refused() -> None:
    refused = {
        "scoring_func 'softmax' is not supported for deepseek_v3": {"scoring_func": "softmax"},
        "topk_method 'greedy' is not supported for deepseek_v3": {"topk_method": "greedy"},
        "config.json does not give 'kv_lora_rank'": {"kv_lora_rank": None},
        "n_group 3 and topk_group 1 do not fit 4 experts": {"n_group": 3},
        "topk_method 'best' is not supported": {"model_type": "deepseek_v2", "topk_method": "best"},
        "norm_topk_prob True is not supported for deepseek_v2": {"model_type": "deepseek_v2", "norm_topk_prob": True},
    }
    for message, fields in refused.items():
        with pytest.raises(ConfigError, match=message):
            model(config(**fields))
    assert model(config(model_type="kimi_k2")).layers == model(config()).layers


def test_what_a_stretched_rope_multiplies() -> None:
    """Scores, by the square, where the config says mscale_all_dim; in cos and sin it cancels out."""
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.707}
    stretched = model(config(rope_scaling=yarn | {"mscale_all_dim": 0.707})).mixers[0]
    assert stretched.scale == pytest.approx(16**-0.5 * (0.0707 * np.log(40) + 1) ** 2)
    assert stretched.rope.attention_factor == 1
    assert model(config(rope_scaling=yarn)).mixers[0].scale == 16**-0.5
    assert model(config()).mixers[0].scale == 16**-0.5
