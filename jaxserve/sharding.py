"""Where arrays live: the device mesh, the rules from logical to mesh axes, and the physical layout of attention heads.

A weight or cache names its dimensions by logical axes ("kv_heads", "ff", "vocab"); ``RULES`` says which mesh axes
shard each. Heads rarely divide by the number of devices, so ``HeadLayout`` pads and replicates them once, at load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.layer_spec import Mixer

DEVICES = ("expert", "tensor")
"""The mesh axes: groups of devices that hold different experts, and the devices of a group."""

RULES: dict[str, str | tuple[str, ...]] = {
    "heads": DEVICES,
    "kv_heads": DEVICES,
    "ff": DEVICES,
    "vocab": DEVICES,
    "experts": "expert",
    "expert_ff": "tensor",
}
"""Logical axis to mesh axes; an axis that is not listed is replicated."""


@dataclass(frozen=True)
class Parallel:
    """How many devices share a model, and in how many groups of them the experts are divided."""

    devices: int = 1
    expert_groups: int = 1

    @property
    def group(self) -> int:
        """Devices that share the width of an expert."""
        return self.devices // self.expert_groups


def make_mesh(
    tensor_parallel: int, expert_parallel: int = 1, devices: Sequence[jax.Device] | np.ndarray | None = None
) -> Mesh:
    """A mesh ``[expert_parallel, tensor_parallel / expert_parallel]`` of the first ``tensor_parallel`` devices.

    Raises ValueError where there are too few.
    """
    found = np.asarray(devices if devices is not None else jax.devices())
    if len(found) < tensor_parallel:
        more = "" if found[0].platform != "cpu" else "; README.md says how a CPU passes for several"
        raise ValueError(f"tensor_parallel is {tensor_parallel} but only {len(found)} device(s) are visible{more}")
    return Mesh(found[:tensor_parallel].reshape(expert_parallel, -1), DEVICES)


def partition(axes: Sequence[str | None] = ()) -> PartitionSpec:
    """How the mesh shards an array whose dimensions carry these logical axes (none: replicated)."""
    return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))


def sharding(mesh: Mesh, axes: Sequence[str | None] = ()) -> NamedSharding:
    """The same as a sharding over the mesh's devices."""
    return NamedSharding(mesh, partition(axes))


def shards(axis: str | None, parallel: Parallel) -> int:
    """How many parts an array's dimension with this logical axis is cut into."""
    sizes = {"expert": parallel.expert_groups, "tensor": parallel.group}
    rule = RULES.get(axis, ()) if axis else ()
    return math.prod(sizes[name] for name in ([rule] if isinstance(rule, str) else rule))


def pad_to_multiple(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class HeadLayout:
    """Physical heads: ``kv_heads`` groups of ``group`` query heads, ``kv_heads`` a multiple of the devices.

    ``kv_source[j]`` is the checkpoint's KV head behind physical KV head j and ``q_source[j]`` its query heads; -1
    stands for a padding head of zero weights, which attends but whose output meets zero columns of the output
    projection.
    """

    kv_source: tuple[int, ...]
    q_source: tuple[tuple[int, ...], ...]

    @property
    def kv_heads(self) -> int:
        return len(self.kv_source)

    @property
    def group(self) -> int:
        return len(self.q_source[0])

    @classmethod
    def of(cls, mixer: Mixer, devices: int) -> "HeadLayout":
        """A layer's heads over the devices."""
        return head_layout(mixer.heads, mixer.kv_heads, devices)


def head_layout(num_heads: int, num_kv_heads: int, tensor_parallel: int) -> HeadLayout:
    """Lay ``num_heads`` query and ``num_kv_heads`` KV heads out over the devices.

    KV heads are padded with zero heads until they divide, or are divided by, the number of devices; where there are
    fewer than devices each is replicated, and its query heads are split (and padded) among the replicas.
    """
    group = num_heads // num_kv_heads
    padded = num_kv_heads
    while padded % tensor_parallel and tensor_parallel % padded:
        padded += 1
    replicas = max(1, tensor_parallel // padded)
    share = -(-group // replicas)
    kv_source: list[int] = []
    q_source: list[tuple[int, ...]] = []
    for head in range(padded):
        for replica in range(replicas):
            real = head < num_kv_heads
            mine = range(replica * share, (replica + 1) * share)
            kv_source.append(head if real else -1)
            q_source.append(tuple(head * group + i if real and i < group else -1 for i in mine))
    return HeadLayout(tuple(kv_source), tuple(q_source))
