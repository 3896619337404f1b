"""GPUs that programs can be compiled for without having one: XLA's compiler with a description of the device.

Numbers from the vendor's published tables; they steer the compiler's choices, not its results. Nothing is tuned on the
device, and what places arrays in the host's memory cannot be compiled so: XLA drops such places without a word.
"""

import importlib.metadata
import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.config import ConfigError, EngineConfig
from jaxserve.memory import Memory
from jaxserve.sharding import make_mesh

SHARE = 0.75
"""Of a device's memory, what XLA takes unless told otherwise."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the compiler wants to know it."""

    kind: str
    """What jax calls the device on a machine that has it."""
    capability: tuple[int, int]
    cores: int
    core_threads: int
    core_shared: int
    block_shared: int
    l2: int
    memory: int
    bandwidth: int
    ghz: float
    float32_units: int = 128

    @property
    def text(self) -> str:
        """A ``stream_executor.GpuTargetConfigProto`` in text form."""
        major, minor = self.capability
        extension = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32
              shared_memory_per_block: 49152 shared_memory_per_core: {self.core_shared}
              shared_memory_per_block_optin: {self.block_shared}
              threads_per_core_limit: {self.core_threads} core_count: {self.cores} fpus_per_core: {self.float32_units}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} clock_rate_ghz: {self.ghz}
              device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
            runtime_version {{ major: 13 minor: 0 patch: 0 }}
            device_description_str: "{self.kind}"
        """


GPUS = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 2048, 167936, 166912, 40 << 20, 80 << 30, 2_039 * 10**9, 1.41, 64
    ),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 233472, 232448, 50 << 20, 80 << 30, 3_350 * 10**9, 1.98),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 2048, 233472, 232448, 60 << 20, 140 << 30, 4_800 * 10**9, 1.98),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 2048, 233472, 232448, 126 << 20, 180 << 30, 8_000 * 10**9, 1.97),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 1536, 102400, 101376, 96 << 20, 45 << 30, 864 * 10**9, 2.52),
}


@dataclass(frozen=True)
class Target:
    """A device to compile for: ``text`` describes it to XLA."""

    text: str
    memory: Memory


def find(name: str) -> Target:
    """A GPU by its short name, or by a file with XLA's own description of it (``*.gpu_target_config.pbtxt``).

    Raises ``ConfigError``, also where this machine lacks what compiling for one takes.
    """
    if name in GPUS:
        text, size = GPUS[name].text, GPUS[name].memory
    else:
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError):
            known = ", ".join(sorted(GPUS))
            raise ConfigError(f"--target {name}: no such GPU is known ({known}), and no such file is there") from None
        found = re.search(r"device_memory_size:\s*(\d+)", text)
        if found is None or "device_description_str" not in text:
            raise ConfigError(f"--target {name}: is no description of a GPU by XLA")
        size = int(found[1])
    _check_compiler()
    return Target(text, Memory(int(size * SHARE), int(size * SHARE)))


def _check_compiler() -> None:
    version = jax.__version__
    plugin = next((name for name in ("cuda13", "cuda12") if importlib.util.find_spec(f"jax_{name}_plugin")), None)
    if plugin is None:
        raise ConfigError(
            f"--target: XLA's compiler for GPUs is not installed; it is in jax-cuda13-plugin=={version} and "
            f"jax-cuda13-pjrt=={version}, which need no other package for this (pip install --no-deps)"
        )
    have = importlib.metadata.version(f"jax-{plugin}-plugin")
    if have != version:
        raise ConfigError(f"--target: jax-{plugin}-plugin is {have}, and jax is {version}; they must be equal")
    if shutil.which("ptxas") is None and not _ptxas_in_wheels():
        raise ConfigError(
            "--target: NVIDIA's assembler ptxas is not there; it is in the CUDA toolkit, and in the packages "
            "nvidia-cuda-nvcc, nvidia-nvvm and nvidia-cuda-crt"
        )


def _ptxas_in_wheels() -> bool:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return any(True for folder in folders for _ in folder.glob("*/bin/ptxas"))


def mesh_of(target: Target, config: EngineConfig) -> Mesh:
    """A mesh of devices that are only described."""
    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target.text, topology=f"1x1x{config.tensor_parallel}"
        )
    except Exception as error:  # whatever the plugin raises: it is not jax's to name
        raise ConfigError(f"--target: XLA cannot compile for it here: {str(error)[:300]}") from None
    return make_mesh(config.tensor_parallel, config.expert_parallel, np.array(found.devices))
