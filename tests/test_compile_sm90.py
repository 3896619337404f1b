"""Kernels for Hopper without one: all are lowered, here; a few are compiled, where the compiler is."""

import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import pytest

from benchmarks.kernel_cases import HOPPER, KERNELS, Kernel

QUICK = ("paged_attention decode bf16 64", "sparse_mla bf16", "kv_write fp8_ds_mla")
"""Cases of a few seconds."""


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name.replace(" ", "-"))
def test_every_kernel_is_lowered(kernel: Kernel) -> None:
    """To Mosaic's dialect, where shapes, tiles, layouts and copies are checked."""
    call = kernel.call()
    jitted = jax.jit(partial(call.function, HOPPER), donate_argnums=call.donated)
    lowered = jitted.trace(*call.shapes).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


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
