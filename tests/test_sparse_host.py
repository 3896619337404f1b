"""Latents that are the host's: no token depends on where they are read from."""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import generate_latest
from test_sparse import answers, prompts
from tiny import idle, tiny

import jaxserve
from jaxserve import hot
from jaxserve.config import ConfigError
from jaxserve.request import Delta

SMALL = {"max_model_len": 96, "prefix_caching": True}


def asked(family: str) -> list[list[int]]:
    """More than run at once, some with a beginning in common."""
    return [*prompts(family), prompts(family)[0][8:30], prompts(family)[3]]


def abort_some(llm: jaxserve.LLM, some: list[list[int]]) -> None:
    """Requests that are left at their third token."""
    done = threading.Semaphore(0)

    def leave_at_third(delta: Delta) -> None:
        seen[delta.request_id] = seen.get(delta.request_id, 0) + len(delta.token_ids)
        if seen[delta.request_id] == 3:
            llm.abort(delta.request_id)
        if delta.request_done:
            done.release()

    seen: dict[str, int] = {}
    for prompt in some:
        llm.submit(prompt, jaxserve.SamplingParams(max_tokens=40, ignore_eos=True), on_delta=leave_at_third)
    for _ in some:
        assert done.acquire(timeout=60)


@pytest.mark.parametrize(
    ("family", "kind", "devices", "mode"),
    [
        ("glm_moe_dsa", "auto", 1, "always"),
        ("glm_moe_dsa", "auto", 1, "auto"),
        ("deepseek_v32", "fp8_ds_mla", 2, "always"),
    ],
)
def test_tokens_depend_on_no_place(family: str, kind: str, devices: int, mode: str, programs_dir: str) -> None:
    """The smallest buffer, so that hardly a row is there; or frames for one sequence, of two that run. From the prefix
    cache, whose pages may be the host's alone, beside others that are left, and again."""
    with tiny(programs_dir, family, kv_cache_dtype=kind, **SMALL) as llm:
        expected = answers(llm, asked(family))
    few = {"hot_buffer_tokens": 8} if mode == "always" else {"kv_cache_memory_bytes": 60_000}
    with tiny(
        programs_dir, family, kv_cache_dtype=kind, tensor_parallel=devices, sparse_host=mode, **SMALL | few
    ) as llm:
        residency = llm._built.engine.scheduler.residency
        for _ in range(2):
            assert answers(llm, asked(family)) == expected
            abort_some(llm, asked(family))
        assert residency.moved_out > 0
        assert (residency.moved_in > 0) == (mode == "auto")
        idle(llm)
        metrics = generate_latest(llm.metrics).decode()
        assert residency.host_backed == 0
    rows = dict(re.findall(r'sparse_host_rows_total{.*found="(\w+)".*} (\S+)', metrics))
    assert float(rows["hit"]) > 0
    assert float(rows["miss"]) > 0


def test_a_damaged_page_is_found_and_hurts_nobody_else(programs_dir: str) -> None:
    """One bit of one latent: whoever reads it from the host, row by row or page by page, ends, and it is not reused."""
    ids = prompts("glm_moe_dsa")[0]
    with tiny(
        programs_dir, "glm_moe_dsa", sparse_host="always", hot_buffer_tokens=8, kv_checksums=True, **SMALL
    ) as llm:
        expected = answers(llm, [ids, ids[3:40]])
        runner, cache = llm._built.runner, llm._built.engine.cache

        def harm(position: int) -> None:
            page = cache._by_key[cache.chain(ids).keys[0][position // 8]]
            llm._built.engine.scheduler.residency.drop(page)
            pages, *others = runner.state.kv[2]
            latents = np.array(pages)
            latents.view(np.uint32)[page, position % 8, 5] ^= 1
            runner.state.kv[2] = (jax.device_put(latents, pages.sharding), *others)

        for position in range(len(ids)):
            harm(position)
        found = llm.generate([ids, ids[3:40]], max_tokens=40, temperature=0.0, ignore_eos=True)
        assert found[0].outputs[0].finish_reason == "error"
        assert "checksum is wrong" in found[0].error
        assert found[1].outputs[0].token_ids == expected[1]
        assert answers(llm, [ids]) == expected[:1], "computed again"
        idle(llm)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama3", {"sparse_host": "auto"}, "sparse_host auto: llama attends to all tokens"),
        ("deepseek_v3", {"sparse_host": "always"}, "deepseek_v3 attends to all tokens"),
        ("glm_moe_dsa", {"sparse_host": "auto", "hot_buffer_tokens": 7}, "hot_buffer_tokens must be at least 8"),
        ("glm_moe_dsa", {"sparse_host": "auto", "sparse_host_gib": 1e-6}, "sparse_host_gib is too small"),
        ("glm_moe_dsa", {"sparse_host": "auto", "sparse_host_gib": 1e4}, "sparse_host_gib 10000 does not fit"),
        ("glm_moe_dsa", {"sparse_host": "auto", "kv_cache_memory_bytes": 9000}, "9000 bytes of KV cache are too few"),
        ("glm_moe_dsa", {"hot_buffer_tokens": 16}, "hot_buffer_tokens needs sparse_host"),
        ("glm_moe_dsa", {"sparse_host": "on"}, "sparse_host must be one of off, auto, always"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(family: str, options: dict, message: str, programs_dir: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        tiny(programs_dir, family, **options)


def test_pages_that_come_to_frames_are_compared_with_their_checksums() -> None:
    rng = np.random.default_rng(0)
    host = jnp.asarray(rng.integers(0, 256, (5, 4, 52)), jnp.uint8)
    plane = hot.HotPlane(jnp.zeros((3, 4, 52), jnp.uint8), None, jnp.zeros(20, jnp.uint32))
    (sealed,) = hot.seal([(host, plane)], jnp.arange(5))
    pairs = jnp.array([[2, 4, 0], [1, 2, 0]])
    ((_, filled),), wrong = hot.fill_frames([sealed], pairs)
    np.testing.assert_array_equal(filled.latents[1:], host[jnp.array([2, 4])])
    assert wrong.tolist() == [False] * 3
    harmed = (host.at[4, 3, 51].set(host[4, 3, 51] ^ 128), sealed[1])
    assert hot.fill_frames([harmed], pairs)[1].tolist() == [False, True, False]
    swapped = (host.at[2, 0, :8].set(jnp.roll(host[2, 0, :8], 4)), sealed[1])
    assert hot.fill_frames([swapped], pairs)[1].tolist() == [True, False, False]
