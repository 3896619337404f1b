"""Compile every kernel for an H200 on a machine without a GPU, and print the registers, spills and shared memory.

    python -m benchmarks.compile_sm90 [NAME ...] [--json FILE]

XLA's compiler with a description of the device (see ``jaxserve.targets``) and NVIDIA's assembler do the work; nothing
is run. Exits with 1 where something does not compile, or spills.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from benchmarks.compile_steps import STEPS, Step
from benchmarks.kernel_cases import KERNELS, Kernel
from jaxserve import targets
from jaxserve.config import ConfigError, EngineConfig


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
        fails = bool(outcome.error) or not outcome.kernels or outcome.spilled_bytes > 0
        bad += fails
        line = f"{outcome.registers:4d} registers {outcome.spilled_bytes:6d} B spilled"
        line += f" {outcome.temp_bytes / 2**20:8.1f} MiB temp {outcome.seconds:6.1f} s {outcome.error[:400]}"
        print(f"{'FAIL' if fails else 'ok':4s} {kernel.name:44s} {line}")
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
