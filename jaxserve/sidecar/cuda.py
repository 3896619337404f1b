"""Memory on NVIDIA GPUs that outlives an engine: the driver's virtual memory management, one allocation a GPU.

The owner allocates with ``cuMemCreate`` and passes the allocation on as a descriptor; an engine imports it, maps it
read-only and hands the pointers to jax. Both need the package ``cuda-bindings``.

NOT RUN ON A GPU. Names, structs and signatures were checked against cuda-bindings 13.0.3, the order of calls with a
driver that only pretends. To be seen on hardware: whether a mapping without write access satisfies XLA, and that
engines go on after the owner was killed (the driver counts references to an allocation).
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.sidecar import dlpack
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.layout import Layout, Piece


def driver() -> Any:
    """The driver's bindings, initialized. Raises ``SidecarError`` (``unsupported``) where they are not there."""
    try:
        from cuda.bindings import driver as found
    except ImportError:
        raise SidecarError(
            "the sidecar needs the package cuda-bindings on a GPU: install jaxserve[cuda13] or jaxserve[cuda12]",
            "unsupported",
        ) from None
    try:
        check(found.cuInit(0))
    except RuntimeError as error:
        raise SidecarError(f"the CUDA driver cannot be used: {error}", "unsupported") from None
    return found


def check(result: tuple[Any, ...]) -> Any:
    """The value of a call, which comes behind its error code. Raises ``SidecarError``."""
    code, *values = result
    if int(code):
        name = getattr(code, "name", str(code))
        raise SidecarError(f"CUDA driver: {name}", "memory" if name == "CUDA_ERROR_OUT_OF_MEMORY" else "failed")
    return values[0] if values else None


def uuid(ordinal: int, cu: Any = None) -> str:
    """The UUID, in hexadecimal, of the GPU with this number in this process."""
    cu = cu or driver()
    get = getattr(cu, "cuDeviceGetUuid_v2", None) or cu.cuDeviceGetUuid  # before 13: the other one knows no MIG
    return bytes(check(get(check(cu.cuDeviceGet(ordinal)))).bytes).hex()


def ordinals(uuids: Sequence[str], cu: Any) -> list[int]:
    """The numbers that GPUs have in this process. Raises ``SidecarError`` where one is not visible."""
    visible = {uuid(i, cu): i for i in range(check(cu.cuDeviceGetCount()))}
    for wanted in uuids:
        if wanted not in visible:
            raise SidecarError(f"GPU {wanted} is not visible to this process", "unsupported")
    return [visible[wanted] for wanted in uuids]


class _Device:
    """One GPU: its primary context, which jax uses as well, and its allocations."""

    def __init__(self, ordinal: int, cu: Any):
        self.ordinal, self.cu = ordinal, cu
        self._context = check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(ordinal))))

    def enter(self) -> None:
        """Make it the calling thread's device."""
        check(self.cu.cuCtxSetCurrent(self._context))

    def properties(self) -> Any:
        cu = self.cu
        found = cu.CUmemAllocationProp()
        found.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        found.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        found.location.id = self.ordinal
        found.requestedHandleTypes = self.handle_type
        return found

    @property
    def handle_type(self) -> Any:
        return self.cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def granularity(self) -> int:
        flag = self.cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(check(self.cu.cuMemGetAllocationGranularity(self.properties(), flag)))


class Mapping:
    """An allocation mapped into this process; unmapped when nothing refers to it any more."""

    def __init__(self, device: _Device, handle: Any, size: int, *, writable: bool):
        cu = device.cu
        self._device, self._handle, self.size = device, handle, size
        self._pointer: Any = None
        self._mapped = False
        device.enter()
        self._pointer = check(cu.cuMemAddressReserve(size, 0, 0, 0))
        check(cu.cuMemMap(self._pointer, size, 0, handle, 0))
        self._mapped = True
        self.protect(writable=writable)

    @property
    def pointer(self) -> int:
        return int(self._pointer)

    def protect(self, *, writable: bool) -> None:
        cu = self._device.cu
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device.ordinal
        flags = cu.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        check(cu.cuMemSetAccess(self._pointer, self.size, [access], 1))

    def __del__(self) -> None:
        cu = self._device.cu
        if self._pointer is not None:
            self._device.enter()
            if self._mapped:
                cu.cuCtxSynchronize()
                cu.cuMemUnmap(self._pointer, self.size)
            cu.cuMemAddressFree(self._pointer, self.size)
        cu.cuMemRelease(self._handle)


class CudaArenas:
    """The owner's side: an allocation on each GPU, filled from the host. Raises ``SidecarError`` (``memory``)."""

    def __init__(self, devices: Sequence[_Device], sizes: Sequence[int]):
        self.descriptors: list[int] = []
        self._devices, self._maps = list(devices), list[Mapping]()
        try:
            for device, size in zip(devices, sizes, strict=True):
                cu = device.cu
                device.enter()
                unit = device.granularity()
                whole = -(-size // unit) * unit
                handle = check(cu.cuMemCreate(whole, device.properties(), 0))
                self._maps.append(Mapping(device, handle, whole, writable=True))
                fd = int(check(cu.cuMemExportToShareableHandle(handle, device.handle_type, 0)))
                self.descriptors.append(fd)
                os.set_inheritable(fd, False)
        except BaseException:
            self.close()
            raise

    def room(self, pieces: Sequence[Piece], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Host memory to write a shard into, for ``commit``."""
        return np.empty(shape, dtype)

    def commit(self, pieces: Sequence[Piece], values: np.ndarray) -> None:
        """Copy a shard to every GPU that keeps it."""
        for piece in pieces:
            device, found = self._devices[piece.arena], self._maps[piece.arena]
            device.enter()
            check(device.cu.cuMemcpyHtoD(found.pointer + piece.offset, values.ctypes.data, values.nbytes))

    def read(self, piece: Piece, nbytes: int) -> np.ndarray:
        device, found, out = self._devices[piece.arena], self._maps[piece.arena], np.empty(nbytes, np.uint8)
        device.enter()
        check(device.cu.cuMemcpyDtoH(out.ctypes.data, found.pointer + piece.offset, nbytes))
        return out

    def seal(self) -> None:
        """Wait until all is there. Engines map it read-only; nothing keeps the owner from writing."""
        for device, found in zip(self._devices, self._maps, strict=True):
            device.enter()
            check(device.cu.cuCtxSynchronize())
            found.protect(writable=False)

    def close(self) -> None:
        self._maps.clear()
        while self.descriptors:
            os.close(self.descriptors.pop())


class CudaBackend:
    """For an owner of these GPUs, by UUID, in the order of the mesh."""

    arena_each = True

    def __init__(self, uuids: Sequence[str], cu: Any = None):
        cu = cu or driver()
        self._devices = [_Device(ordinal, cu) for ordinal in ordinals(uuids, cu)]

    def allocate(self, name: str, layout: Layout) -> CudaArenas:
        if layout.devices != len(self._devices):
            raise SidecarError(f"this sidecar is for {len(self._devices)} GPUs, not {layout.devices}", "invalid")
        return CudaArenas(self._devices, layout.arenas)

    def free(self) -> int:
        """Bytes that every GPU has at least, times their number."""
        least = []
        for device in self._devices:
            device.enter()
            code, free, _ = device.cu.cuMemGetInfo()
            check((code,))
            least.append(int(free))
        return min(least) * len(least)


_import_lock = threading.Lock()


def attach(
    descriptors: Sequence[int],
    layout: Layout,
    mesh: Mesh,
    shardings: Sequence[NamedSharding],
    *,
    cu: Any = None,
    kind: int = dlpack.CUDA,
) -> list[jax.Array]:
    """The tensors as jax arrays, in the layout's order, in the sidecar's own memory. The descriptors stay the caller's.

    jax must have been started: it makes the context. The arrays must never be donated: XLA ends the process then. An
    allocation is unmapped when the last array in it is gone. Raises ``SidecarError``.
    """
    cu = cu or driver()
    devices = list(mesh.devices.flat)
    with _import_lock:
        maps = [_import(fd, size, d.local_hardware_id, cu) for fd, size, d in _each(descriptors, layout, devices)]
    out: list[jax.Array] = []
    for tensor, sharding in zip(layout.tensors, shardings, strict=True):
        shape, pieces = tensor.piece_shape(layout.devices), []
        for device, piece in zip(devices, tensor.pieces, strict=True):
            found = maps[piece.arena]
            where = (kind, device.local_hardware_id)
            pieces.append(
                jax.dlpack.from_dlpack(dlpack.External(found.pointer + piece.offset, shape, tensor.dtype, where, found))
            )
        out.append(jax.make_array_from_single_device_arrays(tensor.shape, sharding, pieces))
    return out


def _each(descriptors: Sequence[int], layout: Layout, devices: Sequence[jax.Device]) -> Any:
    if len(layout.arenas) != len(devices):
        raise SidecarError(f"the sidecar has memory on {len(layout.arenas)} GPUs for {len(devices)}")
    return zip(descriptors, layout.arenas, devices, strict=True)


def _import(fd: int, size: int, ordinal: int, cu: Any) -> Mapping:
    device = _Device(ordinal, cu)
    device.enter()
    unit = device.granularity()
    handle = check(cu.cuMemImportFromShareableHandle(fd, device.handle_type))
    return Mapping(device, handle, -(-size // unit) * unit, writable=False)
