"""Tiny models for engine tests: the reference checkpoints under fixtures/, and small limits that compile quickly."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

import jaxserve

FIXTURES = Path(__file__).parent / "fixtures" / "models"
FAMILIES = (
    "llama3",
    "smollm2",
    "qwen2",
    "qwen3",
    "ministral3",
    "qwen3_fp8_block",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "mixtral",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "gemma3_text",
    "gemma4_dense",
    "gemma4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
)

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


ROOM: dict[str, Any] = {**LIMITS, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def roomy(programs_dir: str, model: Path, **options: Any) -> jaxserve.LLM:
    """An engine for a model of ``write_model``; engines of the same limits share their programs."""
    return jaxserve.LLM(str(model), **{**ROOM, "cache_dir": programs_dir, **options})


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


def write_byte_tokenizer(path: Path) -> None:
    """A tokenizer whose 256 tokens are the bytes, under ids of their own value."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    found = tokenizers.Tokenizer(models.BPE(vocab={name: byte for byte, name in names.items()}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.save(str(path))


def write_model(folder: Path, family: str = "llama3") -> Path:
    """A copy of a tiny checkpoint that speaks: with a tokenizer of bytes and a chat template."""
    shutil.copytree(FIXTURES / family, folder)
    write_byte_tokenizer(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return folder
