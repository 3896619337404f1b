"""Build the library of CUDA kernels (``library.cu``); no GPU is needed.

    python -m pallas_kernels.host_rows.build [--nvcc PATH] [--out FILE]

nvcc is looked for on the path, then among Python's packages (``nvidia-cuda-nvcc``, ``nvidia-cuda-crt``,
``nvidia-cuda-runtime``, ``nvidia-cuda-cccl``, ``nvidia-nvvm``). CUDA's runtime is linked in; what the library needs at
run time is the driver. It fits the jaxlib that it was built with.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib

from pallas_kernels.host_rows.foreign import LIBRARY

SOURCE = Path(__file__).with_name("library.cu")
TARGETS = ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]")
"""Ampere, Hopper, and whatever comes later by way of PTX."""


class BuildError(RuntimeError):
    """There is no compiler, or it refuses; the message says what it said."""


def cuda(out: Path, nvcc: Path | None = None) -> str:
    """Build for GPUs. Returns the assembler's account of the kernels. Raises ``BuildError``."""
    nvcc = nvcc or find_nvcc()
    if nvcc is None:
        raise BuildError("there is no nvcc on the path nor in Python's packages (nvidia-cuda-nvcc)")
    libraries = [f"-L{folder}" for name in ("lib", "lib64") if (folder := nvcc.parent.parent / name).is_dir()]
    options = ["-O3", *TARGETS, *libraries, "-Xptxas=-v", "-Xcompiler=-fPIC", "--disable-warnings"]
    return _run([str(nvcc), *options], out)


def cpu(out: Path, compiler: str = "c++") -> str:
    """Build the same functions for a CPU, for tests. Raises ``BuildError``."""
    return _run([compiler, "-x", "c++", "-O1", "-fPIC", "-w"], out)


def find_nvcc() -> Path | None:
    """On the path, or in a package beside jaxlib."""
    found = shutil.which("nvcc")
    if found:
        return Path(found)
    return next(iter(sorted(Path(jaxlib.__file__).parent.parent.glob("nvidia/cu*/bin/nvcc"))), None)


def _run(command: Sequence[str], out: Path) -> str:
    """Compile to a file beside ``out`` and move it there, so that a process that has the old one keeps it."""
    part = out.with_name(out.name + ".part")
    constants = f'-DBUILT_FOR="{jaxlib.__version__}"'
    arguments = ["-std=c++17", "-shared", constants, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(part)]
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    except OSError as problem:
        raise BuildError(f"{command[0]} cannot be run: {problem}") from problem
    if done.returncode:
        part.unlink(missing_ok=True)
        raise BuildError(f"{command[0]} failed:\n{done.stderr}")
    part.replace(out)
    return done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvcc", type=Path, help="the compiler; otherwise it is looked for")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="where the library goes; beside its source")
    args = parser.parse_args()
    try:
        said = cuda(args.out, args.nvcc)
    except BuildError as problem:
        print(problem, file=sys.stderr)
        return 1
    print(said, args.out, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
