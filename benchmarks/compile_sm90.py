"""Compile every kernel for an H200 on a machine without a GPU, and print the registers, spills and shared memory.

    python -m benchmarks.compile_sm90 [NAME ...] [--json FILE]

XLA's compiler with a description of the device (see ``jaxserve.targets``) and NVIDIA's assembler do the work; nothing
is run. Exits with 1 where something does not compile, or where a decode kernel spills.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.compile_steps import STEPS, Step
from jaxserve import experts, targets
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.executables import Program
from jaxserve.quantization import MxArray, QuantArray
from jaxserve.sharding import sharding
from pallas_kernels import indexer
from pallas_kernels.dispatch import Kernels
from pallas_kernels.kv_write import write_heads, write_keys, write_latent
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.sparse_mla import sparse_mla

HOPPER = Kernels("mosaic", "NVIDIA H200", "9.0")
Call = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A function, its abstract arguments, and which of them are donated."""


@dataclass(frozen=True)
class Kernel:
    """A case that is compiled: ``call()`` gives the function, the shapes and dtypes of its arguments, and which are
    donated."""

    name: str
    call: Callable[[], Call]
    may_spill: bool = False

    def programs(self, mesh: Mesh) -> list[Program]:
        function, shapes, donated = self.call()
        placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding(mesh)), shapes)
        return [Program(self.name, function, placed, donated)]


@dataclass(frozen=True)
class Outcome:
    """What compiling brought. Registers a thread; bytes of the kernel that takes most."""

    name: str
    seconds: float
    registers: int
    spilled_bytes: int
    temp_bytes: int
    kernels: int
    error: str = ""


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def attention(rows: int, queries: int, dim: int, dtype: Any = jnp.bfloat16, **options: Any) -> Call:
    """Llama 3 8B's heads (32 over 8) or SmolLM2's (9 over 3), pages of 32 tokens, contexts of 4,096."""
    heads, group = (8, 4) if dim == 128 else (3, 3)
    head = (32, dim) if dtype != jnp.uint8 else (32 * (dim + 4),)

    def call(q, pages, tables, starts, counts):
        return paged_attention(q, pages, tables, starts, counts, kernels=HOPPER, scale=dim**-0.5, **options)

    shapes = (
        array(rows, queries, heads, group, dim, dtype=jnp.float32),
        array(8193, 2, heads, *head, dtype=dtype),
        array(rows, 128, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
    )
    return call, shapes, ()


def sparse(tokens: int, heads: int, dtype: Any) -> Call:
    """DeepSeek V3.2's latents: 2,048 of them for each token."""

    def call(q, pages, rows, counts):
        return sparse_mla(q, pages, rows, counts, kernels=HOPPER, rank=512, scale=192**-0.5)

    shapes = (
        array(tokens, heads, 576, dtype=jnp.float32),
        array(8193, 32, 656 if dtype == jnp.uint8 else 576, dtype=dtype),
        array(tokens, 2048, dtype=jnp.int32),
        array(tokens, dtype=jnp.int32),
    )
    return call, shapes, ()


def latents(rows: int, dtype: Any) -> Call:
    """DeepSeek V3's heads and latents, contexts of 4,096."""

    def call(q, pages, tables, starts, counts):
        return mla_attention(q, pages, tables, starts, counts, kernels=HOPPER, rank=512, scale=192**-0.5)

    shapes = (
        array(rows, 1, 128, 576, dtype=jnp.float32),
        array(8193, 32, 656 if dtype == jnp.uint8 else 576, dtype=dtype),
        array(rows, 128, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
    )
    return call, shapes, ()


def writes(write: Callable[..., Any], pages: Any, *new: tuple[int, ...]) -> Call:
    """``pages``, donated, get the ``new`` numbers of tokens."""

    def call(pages, *new):
        return write(pages, *new, kernels=HOPPER)

    tokens = array(new[0][0], dtype=jnp.int32)
    return call, (pages, *(array(*shape, dtype=jnp.float32) for shape in new), tokens), (0,)


def heads_written(tokens: int, dtype: Any) -> Call:
    """Llama 3 8B's heads."""
    head = (32, 128) if dtype != jnp.uint8 else (32 * 132,)
    return writes(write_heads, array(8193, 2, 8, *head, dtype=dtype), *[(tokens, 8, 128)] * 2)


E4M3 = jnp.float8_e4m3fn


def quantized(tokens: int, outputs: int = 2048, inputs: int = 7168) -> Call:
    """One of DeepSeek V3's projections, a scale for 128x128 weights."""

    def call(x, data, scale):
        return quant_matmul(x, data, scale, blocks=(128, 128), dtype="bfloat16", kernels=HOPPER)

    scale = array(-(-outputs // 128), -(-inputs // 128), dtype=jnp.float32)
    return call, (array(tokens, inputs, dtype=jnp.float32), array(outputs, inputs, dtype=E4M3), scale), ()


def mixture(tokens: int, dtype: Any, count: int = 256, width: int = 2048, hidden: int = 7168, k: int = 8) -> Call:
    """DeepSeek V3's experts, or others. All of ``experts.mix``."""
    shapes = {"gate_up": (count, 2, width, hidden), "down": (count, hidden, width)}

    def weight(*shape: int) -> Any:
        if dtype == jnp.uint8:
            data, scale = (array(*shape[:-1], shape[-1] // each, dtype=dtype) for each in (2, 32))
            return MxArray(data, scale)
        if dtype != E4M3:
            return array(*shape, dtype=dtype)
        blocks = (*(1,) * (len(shape) - 2), 128, 128)
        sides = (size // block for size, block in zip(shape, blocks, strict=True))
        return QuantArray(array(*shape, dtype=E4M3), array(*sides, dtype=jnp.float32), blocks, "bfloat16")

    def call(params, x, chosen, weights):
        return experts.mix(params, x, chosen, weights, lambda gate, up: jax.nn.silu(gate) * up, "tensor", HOPPER)

    params = {name: weight(*shape) for name, shape in shapes.items()}
    choices = array(tokens, k, dtype=jnp.int32), array(tokens, k, dtype=jnp.float32)
    return call, (params, array(tokens, hidden, dtype=jnp.float32), *choices), ()


def index(rows: int, queries: int, dtype: Any) -> Call:
    """DeepSeek V3.2's indexer, contexts of up to 32,768."""

    def call(q, gates, pages, tables, starts, counts):
        return indexer.select(q, gates, pages, tables, starts, counts, kernels=HOPPER, top_k=2048)

    shapes = (
        array(rows, queries, 64, 128, dtype=jnp.float32),
        array(rows, queries, 64, dtype=jnp.float32),
        array(8193, *((32 * 132,) if dtype == jnp.uint8 else (32, 128)), dtype=dtype),
        array(rows, 1024, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
        array(rows, dtype=jnp.int32),
    )
    return call, shapes, ()


KERNELS = (
    Kernel("paged_attention decode bf16 128", lambda: attention(64, 1, 128)),
    Kernel("paged_attention decode bf16 64", lambda: attention(64, 1, 64)),
    Kernel("paged_attention verify bf16 128", lambda: attention(64, 8, 128, window=1024, softcap=30.0)),
    Kernel("paged_attention prefill bf16 128", lambda: attention(64, 32, 128)),
    Kernel("paged_attention decode fp8 128", lambda: attention(64, 1, 128, jnp.uint8)),
    Kernel("paged_attention decode fp8 64", lambda: attention(64, 1, 64, jnp.uint8)),
    Kernel("mla_attention decode fp8_ds_mla", lambda: latents(64, jnp.uint8)),
    Kernel("mla_attention decode bf16", lambda: latents(64, jnp.bfloat16)),
    Kernel("sparse_mla fp8_ds_mla 128 heads", lambda: sparse(64, 128, jnp.uint8)),
    Kernel("sparse_mla bf16 128 heads", lambda: sparse(64, 128, jnp.bfloat16)),
    Kernel("indexer decode fp8 64 heads", lambda: index(64, 1, jnp.uint8)),
    Kernel("indexer prefill fp8 64 heads", lambda: index(32, 32, jnp.uint8)),
    Kernel("indexer prefill bf16 64 heads", lambda: index(32, 32, jnp.bfloat16)),
    Kernel("kv_write heads bf16", lambda: heads_written(64, jnp.bfloat16)),
    Kernel("kv_write heads fp8, 8192 tokens", lambda: heads_written(8192, jnp.uint8)),
    Kernel(
        "kv_write fp8_ds_mla",
        lambda: writes(write_latent, array(8193, 32, 656, dtype=jnp.uint8), (64, 512), (64, 64)),
    ),
    Kernel("quant_matmul decode, 1 token", lambda: quantized(1)),
    Kernel("quant_matmul decode, 64 tokens", lambda: quantized(64)),
    Kernel("quant_matmul prefill, 2048 tokens", lambda: quantized(2048)),
    Kernel("grouped_matmul decode fp8, 64 tokens", lambda: mixture(64, E4M3)),
    Kernel("grouped_matmul decode bf16, 64 tokens", lambda: mixture(64, jnp.bfloat16)),
    Kernel("grouped_matmul decode mxfp4, 64 tokens", lambda: mixture(64, jnp.uint8, 128, 2880, 2880, 4)),
    Kernel("grouped_matmul prefill mxfp4, 2048 tokens", lambda: mixture(2048, jnp.uint8, 128, 2880, 2880, 4)),
    Kernel("grouped_matmul prefill fp8, 2048 tokens", lambda: mixture(2048, E4M3)),
    Kernel("kv_write index keys", lambda: writes(write_keys, array(8193, 32 * 132, dtype=jnp.uint8), (64, 128))),
)


@contextmanager
def printed(found: list[str]) -> Iterator[None]:
    """What the libraries beneath print on stdout and stderr, in ``found``."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile("w+") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            found.append(file.read())


def build(case: Kernel | Step, mesh: Mesh) -> Outcome:
    """Compile one case."""
    begun, text, error, temp = time.perf_counter(), [""], "", 0
    try:
        with printed(text):
            for program in case.programs(mesh):
                options = {"donate_argnums": program.donate, "out_shardings": program.out_shardings}
                compiled = jax.jit(program.function, **options).lower(*program.args).compile()
                analysis = compiled.memory_analysis()
                temp = max(temp, 0 if analysis is None else analysis.temp_size_in_bytes)
    except Exception as problem:  # whatever the compiler raises: the others are still tried
        error = f"{type(problem).__name__}: {problem}"
    seconds = time.perf_counter() - begun
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", text[-1])]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", text[-1])]
    return Outcome(case.name, seconds, max(registers, default=0), max(spills, default=0), temp, len(registers), error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file too")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # read by jaxlib: the assembler's account of a kernel, on stdout
    try:
        mesh = targets.mesh_of(targets.find("h200"), EngineConfig())
    except ConfigError as problem:
        print(problem, file=sys.stderr)
        return 2
    outcomes, bad = [], 0
    for kernel in (*KERNELS, *STEPS):
        if args.names and not any(name in kernel.name for name in args.names):
            continue
        outcome = build(kernel, mesh)
        outcomes.append(outcome)
        fails = bool(outcome.error) or not outcome.kernels or (outcome.spilled_bytes > 0 and not kernel.may_spill)
        bad += fails
        line = f"{outcome.registers:4d} registers {outcome.spilled_bytes:6d} B spilled"
        line += f" {outcome.temp_bytes / 2**20:8.1f} MiB temp {outcome.seconds:6.1f} s {outcome.error[:400]}"
        print(f"{'FAIL' if fails else 'ok':4s} {kernel.name:44s} {line}")
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
