"""An fp8 KV cache: what it costs in accuracy and bytes, and that nothing else depends on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_parity import Spy
from tiny import LIMITS, idle, reference, tiny

import jaxserve
from jaxserve.cache_spec import FP8, HeadPages
from jaxserve.config import ConfigError
from pallas_kernels.codecs import records
from pallas_kernels.kv_write import write_heads
from pallas_kernels.paged_attention import paged_attention

FAMILY = "qwen3"
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}


def prompts() -> list[list[int]]:
    ids = reference(FAMILY)["input_ids"][0].tolist()
    return [ids, ids[:7], ids[3:40], ids[:32] + ids[1:9]]


def answers(llm: jaxserve.LLM, asked: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(asked, **GREEDY)]


@pytest.fixture(scope="module")
def expected(programs_dir: str) -> list[list[int]]:
    """Each prompt alone, whole, and cold."""
    with tiny(programs_dir, FAMILY, kv_cache_dtype="fp8", prefix_caching=False, max_num_batched_tokens=64) as llm:
        return [answers(llm, [prompt])[0] for prompt in prompts()]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_tokens_depend_on_no_chunk_hit_or_device(expected: list[list[int]], devices: int, programs_dir: str) -> None:
    """In company, in chunks, sharded; then once more, from the prefix cache."""
    with tiny(programs_dir, FAMILY, kv_cache_dtype="fp8", tensor_parallel=devices) as llm:
        assert answers(llm, prompts()) == expected
        assert answers(llm, prompts()) == expected
        idle(llm)


def test_logits_stay_near(programs_dir: str) -> None:
    """The error is that of 3 bits of mantissa: seen, and small against logits that spread by 2."""
    ref = reference(FAMILY)
    with tiny(programs_dir, FAMILY, kv_cache_dtype="fp8") as llm:
        spy = Spy(llm)
        llm.generate([ref["input_ids"][0].tolist()], max_tokens=1, temperature=0.0, prompt_logprobs=0)
    seen = np.concatenate(spy.rows)
    errors = [np.abs(seen - row).mean(axis=1).min() for row in ref["logits"]]
    assert 1e-4 < np.mean(errors) < 0.1


def test_bytes_are_counted_and_reported(programs_dir: str) -> None:
    with tiny(programs_dir, FAMILY, kv_cache_dtype="fp8") as llm:
        table = llm.report()["kv cache"]
        held = llm._built.runner.state.kv
        cfg = llm._built.model
    pages = LIMITS["page_size"] * (table["pages"] + 1)
    assert table["bytes_per_token"] == 2 * cfg.num_layers * cfg.mixers[0].kv_heads * (cfg.mixers[0].head_dim + 4)
    assert (
        table["total_bytes"] == pages * table["bytes_per_token"] == sum(pages.nbytes for pages in jax.tree.leaves(held))
    )
    assert table["dtype"].startswith("fp8")
    assert HeadPages((0, 1), 64, FP8).token_bytes * 2 < HeadPages((0, 1), 64, "float32").token_bytes


@pytest.mark.parametrize("devices", [1, 8])
def test_records_come_back_bit_for_bit(devices: int, programs_dir: str) -> None:
    """Every byte, those of NaN and of padding among them; on 8 devices heads are replicas of each other."""
    options = {"kv_cache_dtype": "fp8", "tensor_parallel": devices, "host_kv_gib": 0.001}
    with tiny(programs_dir, FAMILY, **options) as llm:
        programs, compiled = llm._built.programs, llm._built.runner.compiled
        rng = np.random.default_rng(0)
        (kind,) = programs.cache.kinds
        sharding = programs.pages(kind).sharding
        shape = (programs.num_pages, *kind.record(programs.page_size))
        heads = np.array(kind.kv_source)
        filled = [rng.integers(0, 256, shape, np.uint8)[:, :, heads] for _ in range(programs.cfg.num_layers)]
        kv = [(jax.device_put(pages, sharding),) for pages in filled]
        empty = [(jax.device_put(np.zeros_like(pages), sharding),) for pages in filled]
        source, target = np.array([3, 1, 7, 2], np.int32), np.array([4, 5, 6, 8], np.int32)
        place = lambda ids: jax.device_put(ids, programs.array((4,), jnp.int32).sharding)  # noqa: E731
        given = (compiled["blank 4"](),) if programs.spills_in_turn else ()
        block = compiled["spill 4"](*given, kv, place(source))
        assert block[0].dtype == jnp.uint8
        assert block[0].nbytes == 4 * programs.record_bytes
        back = compiled["restore 4"](empty, block, place(target))
        for before, (after,) in zip(filled, back, strict=True):
            np.testing.assert_array_equal(np.asarray(after)[target], before[source])


def test_attention_reads_what_the_records_mean() -> None:
    """Equal to attention over pages of the numbers that the records stand for."""
    rng = np.random.default_rng(1)
    pages, size, heads, dim = 9, 4, 2, 16
    tables = jnp.asarray(rng.permutation(np.arange(1, 9)).reshape(2, 4), jnp.int32)
    k, v = rng.standard_normal((2, pages * size, heads, dim), np.float32)
    slots = jnp.arange(pages * size)
    packed = write_heads(jnp.full((pages, 2, heads, size * (dim + 4)), 0x11, jnp.uint8), k, v, slots)
    meant = records.dequantize_heads(*records.unpack_head_pages(packed, dim))
    for queries in (1, 8):
        q = jnp.asarray(rng.standard_normal((2, queries, heads, 3, dim)), jnp.float32)
        starts, counts = jnp.array([5, 16 - queries]), jnp.full(2, queries)
        for window in (None, 3):
            got = paged_attention(q, packed, tables, starts, counts, scale=0.25, window=window)
            want = paged_attention(q, meant, tables, starts, counts, scale=0.25, window=window)
            np.testing.assert_allclose(got, want, atol=1e-6 if queries == 1 else 0.02)


def test_what_cannot_be_is_refused(programs_dir: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8_ds_mla is for latents"):
        tiny(programs_dir, FAMILY, kv_cache_dtype="fp8_ds_mla")
    for value in ("fp4", "fp8_e5m2", "", None, 8):
        with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, fp8_ds_mla"):
            jaxserve.EngineConfig(model="x", kv_cache_dtype=value)
