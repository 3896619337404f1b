"""Which kinds of memory an owner can keep weights in."""

from collections.abc import Sequence

from jaxserve import memory
from jaxserve.sidecar.layout import Layout
from jaxserve.sidecar.loading import Arenas, Backend
from jaxserve.sidecar.shared import SharedArenas

HEADROOM = 256 << 20
"""Bytes of host memory that are left for what is read and cast on the way."""


class CpuBackend:
    """Shared host memory."""

    arena_each = False

    def allocate(self, name: str, layout: Layout) -> Arenas:
        return SharedArenas(name, layout.arenas)

    def free(self) -> int:
        return memory.host().free - HEADROOM


def backend(uuids: Sequence[str]) -> Backend:
    """For these GPUs, or for the CPU where there are none. Raises ``SidecarError`` (``unsupported``)."""
    if not uuids:
        return CpuBackend()
    from jaxserve.sidecar.cuda import CudaBackend

    return CudaBackend(uuids)
