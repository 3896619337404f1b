"""Latents that are the host's: no token depends on where they are read from."""

import re
import threading

import pytest
from prometheus_client import generate_latest
from test_sparse import answers, prompts
from tiny import idle, tiny

import jaxserve
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


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama3", {"sparse_host": "auto"}, "sparse_host auto: llama attends to all tokens"),
        ("deepseek_v3", {"sparse_host": "always"}, "deepseek_v3 attends to all tokens"),
        ("glm_moe_dsa", {"sparse_host": "auto", "hot_buffer_tokens": 7}, "hot_buffer_tokens must be at least 8"),
        ("glm_moe_dsa", {"sparse_host": "auto", "sparse_host_gib": 1e-6}, "sparse_host_gib is too small"),
        ("glm_moe_dsa", {"sparse_host": "auto", "sparse_host_gib": 1e4}, "sparse_host_gib 10000 does not fit"),
        ("glm_moe_dsa", {"sparse_host": "auto", "kv_cache_memory_bytes": 9000}, "are too few for hot buffers"),
        ("glm_moe_dsa", {"hot_buffer_tokens": 16}, "hot_buffer_tokens needs sparse_host"),
        ("glm_moe_dsa", {"sparse_host": "on"}, "sparse_host must be one of off, auto, always"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(family: str, options: dict, message: str, programs_dir: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        tiny(programs_dir, family, **options)
