"""Tiny models for engine tests: the reference checkpoints under fixtures/, and small limits that compile quickly."""

from pathlib import Path
from typing import Any

import numpy as np

import jaxserve

FIXTURES = Path(__file__).parent / "fixtures" / "models"
FAMILIES = ("llama3", "smollm2", "qwen2", "qwen3", "ministral3")

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "kv_cache_memory_bytes": 4 << 20,
    "load_progress": False,
    "forbid_compile": True,
}


def tiny(programs_dir: str, family: str = "qwen3", **options: Any) -> jaxserve.LLM:
    """An engine for a family's tiny checkpoint."""
    return jaxserve.LLM(str(FIXTURES / family), **{**LIMITS, "cache_dir": programs_dir, **options})


def reference(family: str) -> dict[str, np.ndarray]:
    """The family's reference numbers (see fixtures)."""
    with np.load(FIXTURES / family / "reference.npz") as data:
        return dict(data)


def idle(llm: jaxserve.LLM) -> None:
    """Assert that every page and slot has come back."""
    import time

    deadline = time.monotonic() + 5
    scheduler = llm._built.engine.scheduler
    while not (scheduler.idle and llm.health().idle):
        assert time.monotonic() < deadline, "the engine does not come to rest"
        time.sleep(0.01)
    scheduler.check()
    assert scheduler.pool.free == scheduler.pool.usable
    assert llm.health().waiting == 0
