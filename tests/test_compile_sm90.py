"""Kernels for Hopper without one: all are lowered, here; a few are compiled, where the compiler is."""

import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernel_cases import HOPPER, KERNELS, Kernel
from pallas_kernels.indexer import select
from pallas_kernels.kv_write import write_heads
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.sparse_mla import sparse_mla

QUICK = ("paged_attention decode bf16 64", "sparse_mla bf16", "kv_write fp8_ds_mla")
"""Cases of a few seconds."""


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name.replace(" ", "-"))
def test_every_kernel_is_lowered(kernel: Kernel) -> None:
    """To Mosaic's dialect, where shapes, tiles, layouts and copies are checked."""
    call = kernel.call()
    jitted = jax.jit(partial(call.function, HOPPER), donate_argnums=call.donated)
    lowered = jitted.trace(*call.shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
ROWS = (((3, 4), I32), ((3,), I32), ((3,), I32))
"""Tables, starts, counts."""


def heads(dim: int, page: int, dtype: Any = BF16) -> tuple[Any, ...]:
    head = (page, dim) if dtype != jnp.uint8 else (page * (dim + 4),)
    args = (((3, 1, 2, 4, dim), F32), ((13, 2, 2, *head), dtype), *ROWS)
    return partial(paged_attention, kernels=HOPPER, scale=1.0), args


def latents(rank: int, count: int) -> tuple[Any, ...]:
    args = (((3, count, rank + 64), F32), ((5, 16, rank + 64), BF16), ((3, 70), I32), ((3,), I32))
    return partial(sparse_mla, kernels=HOPPER, rank=rank, scale=1.0), args


def keys(count: int, dim: int, page: int, dtype: Any = BF16, queries: int = 2) -> tuple[Any, ...]:
    kept = (page, dim) if dtype != jnp.uint8 else (page * (dim + 4),)
    args = (((3, queries, count, dim), F32), ((3, queries, count), F32), ((13, *kept), dtype), *ROWS)
    return partial(select, kernels=HOPPER, top_k=4), args


def written(count: int, dim: int, dtype: Any) -> tuple[Any, ...]:
    kept = (16, dim) if dtype != jnp.uint8 else (16 * (dim + 4),)
    args = (((5, 2, count, *kept), dtype), *[((3, count, dim), F32)] * 2, ((3,), I32))
    return partial(write_heads, kernels=HOPPER), args


TAKEN = {
    **{f"heads of {dim}, pages of {page}": heads(dim, page) for dim, page in ((16, 8), (48, 16), (192, 64), (256, 64))},
    **{f"heads of {dim}, large pages": heads(dim, 128, dtype) for dim, dtype in ((128, BF16), (128, jnp.uint8))},
    **{f"latents of {rank}, {count} heads": latents(rank, count) for rank, count in ((128, 1), (256, 65), (384, 16))},
    **{
        f"{count} keys of {dim}": keys(count, dim, page)
        for count, dim, page in ((1, 32, 8), (33, 64, 16), (64, 128, 256))
    },
    "keys of records": keys(3, 128, 64, jnp.uint8, queries=1),
    **{
        f"{count} heads written": written(count, dim, dtype)
        for count, dim, dtype in ((40, 96, BF16), (1, 80, jnp.uint8))
    },
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_is_lowered(name: str) -> None:
    """Sizes of no large model's: what no kernel can do it must decline, or a server does not start."""
    function, args = TAKEN[name]
    shapes = [jax.ShapeDtypeStruct(*arg) for arg in args]
    assert "mosaic_gpu" in jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin, XLA's compiler for GPUs, is not installed: docs/kernels.md",
)
def test_kernels_compile_and_spill_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_sm90", *QUICK, "--json", str(report)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(report.read_text())
    assert len(outcomes) == len(QUICK)
    assert all(outcome["kernels"] == 1 and 0 < outcome["registers"] <= 232 for outcome in outcomes), outcomes
    assert not any(outcome["spilled_bytes"] for outcome in outcomes)
