"""How large the KV cache may be: measured memory, less what the weights and a step's temporaries take."""

import ctypes
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    import jax

GPU_UTILIZATION = 0.9
CPU_UTILIZATION = 0.5
HOST_KV_GIB = 8
"""What a GPU's host gives to pages that leave the device, unless told otherwise."""
STAGING_KV_GIB = 1
"""What a CPU's pages pass through on their way to a disk, or have in a sidecar, unless told otherwise."""
STAGING_BYTES = 256 << 20
DISK_KV_GIB = 16
CPU_KV_BYTES = 1 << 30
"""What a CPU gives the KV cache unless told otherwise: its memory is for others too."""


@dataclass(frozen=True)
class Memory:
    """Bytes a device has in all, and bytes of it that are free."""

    total: int
    free: int


def measure(device: "jax.Device") -> Memory:
    """What the device's allocator may use; for a CPU, the host's memory."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return Memory(stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"])
    return host()


def host() -> Memory:
    """The machine's memory, or its control group's."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    total, free = fields["MemTotal"], fields["MemAvailable"]
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, limit), min(free, limit - used)
    except (OSError, ValueError):
        pass
    return Memory(total, free)


def reuse_freed_blocks() -> None:
    """Have glibc keep freed blocks of the host tier for the next ones, on a CPU, where they are ordinary memory.

    Otherwise it gives them back to the system, and faulting new ones in costs more than copying into them (measured:
    1.3 instead of 3.5 GB/s of CPU time). Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 << 20)  # the most that glibc allows
        mallopt(trim_threshold, 256 << 20)


def host_budget(config: EngineConfig, *, gpu: bool) -> int:
    """Bytes of host memory for KV pages that leave the device. Raises ``ConfigError`` where they are not there."""
    if not config.prefix_caching:
        return 0
    outlives = config.disk_kv_path is not None or config.uses_sidecar
    default = HOST_KV_GIB if gpu else STAGING_KV_GIB if outlives else 0
    wanted = default if config.host_kv_gib is None else config.host_kv_gib
    budget, free = int(wanted * 2**30), host().free
    if budget > free:
        if config.host_kv_gib is None:
            return free // 4
        raise ConfigError(f"host_kv_gib {wanted:g} does not fit: {free / 2**30:.1f} GiB of host memory are free")
    return budget


def step_below(pages: int) -> int:
    """The highest of 32 steps an octave that is at most ``pages``."""
    step = 1 << max(0, pages.bit_length() - 6)
    return pages // step * step


def staging(pool_bytes: int, longest_bytes: int) -> int:
    """Bytes of the engine's own host memory for pages on their way from a pool in a sidecar.

    A quarter of the pool or 256 MiB, but as much as the longest sequence takes if that is half of the pool at most.
    """
    return min(pool_bytes // 2, max(longest_bytes, min(pool_bytes // 4, STAGING_BYTES)))


def disk_budget(config: EngineConfig) -> int:
    """Bytes on disk for KV pages: unless told otherwise, at most half of the file system."""
    if config.disk_kv_path is None:
        return 0
    if config.disk_kv_gib is not None:
        return int(config.disk_kv_gib * 2**30)
    folder = Path(config.disk_kv_path).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return min(DISK_KV_GIB << 30, shutil.disk_usage(there).total // 2)


def kv_budget(config: EngineConfig, memory: Memory, *, gpu: bool, weights: int, temporaries: int) -> int:
    """Bytes of one device for KV pages. ``weights`` are the bytes it will hold, ``temporaries`` the largest step's.

    Raises ``ConfigError`` where nothing is left, or where the bytes asked for are not there.
    """
    asked = config.kv_cache_memory_bytes
    if asked is not None:
        if asked + weights + temporaries > memory.total:
            raise ConfigError(
                f"kv_cache_memory_bytes {asked} does not fit: the device has {memory.total} bytes, "
                f"the weights take {weights} and a step {temporaries}"
            )
        return asked
    share = config.device_memory_utilization or (GPU_UTILIZATION if gpu else CPU_UTILIZATION)
    budget = int(memory.total * share) - weights - temporaries
    if not gpu and config.device_memory_utilization is None:
        budget = min(budget, CPU_KV_BYTES)
    if budget <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: {share:.0%} of {memory.total} bytes, less {weights} for the weights "
            f"and {temporaries} for a step; raise device_memory_utilization or use more devices"
        )
    return budget
