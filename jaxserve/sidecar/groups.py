"""The devices that one owner serves: their name, and which kinds of devices can have one."""

import hashlib
from collections.abc import Sequence

from jax.sharding import Mesh

from jaxserve.sidecar.errors import SidecarError

CPU = "cpu"


def gpu_group(uuids: Sequence[str]) -> str:
    """The group of these GPUs in this order. UUIDs stay what they are where ordinals are renumbered."""
    return f"gpu-{hashlib.sha256(' '.join(uuids).encode()).hexdigest()[:16]}"


def group_of(mesh: Mesh) -> tuple[str, list[str]]:
    """The group that serves a mesh, and its GPUs' UUIDs. Raises ``SidecarError`` (``unsupported``)."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        return CPU, []
    version = getattr(devices[0].client, "platform_version", "")
    if devices[0].platform not in ("gpu", "cuda") or "cuda" not in version.lower():
        raise SidecarError(
            f"the sidecar serves CPUs and NVIDIA GPUs; this is {devices[0].platform} ({version.strip()})", "unsupported"
        )
    from jaxserve.sidecar import cuda

    uuids = [cuda.uuid(device.local_hardware_id) for device in devices]
    return gpu_group(uuids), uuids
