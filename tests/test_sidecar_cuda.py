"""The sidecar on GPUs, as far as it can be tested without one: the driver's calls in order, and DLPack on a CPU.

``FakeDriver`` keeps allocations in host memory, so that what the owner copies to a "GPU" is what an engine finds.
"""

import ctypes
import gc
import os
import types
from enum import IntEnum

import jax
import numpy as np
import pytest
from tiny import FIXTURES

import checkpoints
from jaxserve import models, params
from jaxserve.declare import declare
from jaxserve.sharding import Parallel, make_mesh, sharding
from jaxserve.sidecar import SidecarError, cuda, dlpack, groups, holdings, layout, loading


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_VALUE = 1


OK = (Result.CUDA_SUCCESS,)
UNIT = 2 << 20


class FakeDriver:
    """Allocations are memfds; addresses are those of host memory. Every call is noted; wrong orders are errors."""

    def __init__(self, uuids, memory=64 << 20):
        self.uuids, self.memory = uuids, memory
        self.calls = []
        self.handles: dict[int, int] = {}
        """Descriptor by handle."""
        self.reserved: dict[int, tuple[np.ndarray, int]] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.access: dict[int, int] = {}
        self.context = None
        enum = types.SimpleNamespace
        self.CUmemAllocationType = enum(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemLocationType = enum(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAllocationHandleType = enum(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
        self.CUmemAllocationGranularity_flags = enum(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
        self.CUmemAccess_flags = enum(CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
        self.CUmemAllocationProp = lambda: enum(location=enum())
        self.CUmemAccessDesc = lambda: enum(location=enum())

    def cuInit(self, flags):
        return OK

    def cuDeviceGetCount(self):
        return (*OK, len(self.uuids))

    def cuDeviceGet(self, ordinal):
        return (*OK, ordinal)

    def cuDeviceGetUuid(self, device):
        return (*OK, types.SimpleNamespace(bytes=bytes.fromhex(self.uuids[device])))

    def cuDevicePrimaryCtxRetain(self, device):
        return (*OK, f"context {device}")

    def cuCtxSetCurrent(self, context):
        self.context = context
        return OK

    def cuCtxSynchronize(self):
        self.calls.append("synchronize")
        return OK

    def cuMemGetInfo(self):
        return (*OK, self.memory, self.memory)

    def cuMemGetAllocationGranularity(self, properties, flag):
        return (*OK, UNIT)

    def cuMemCreate(self, size, properties, flags):
        assert size % UNIT == 0
        assert properties.requestedHandleTypes == properties.type == properties.location.type == 1
        if size > self.memory:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, 0)
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, size)
        return (*OK, self._handle(fd))

    def _handle(self, fd):
        self.handles[len(self.handles) + 100] = fd
        return len(self.handles) + 99

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        return (*OK, os.dup(self.handles[handle]))

    def cuMemImportFromShareableHandle(self, fd, kind):
        assert isinstance(fd, int)
        return (*OK, self._handle(os.dup(fd)))

    def cuMemAddressReserve(self, size, alignment, address, flags):
        memory = np.zeros(size + 4096, np.uint8)
        start = memory.ctypes.data + -memory.ctypes.data % 4096
        self.reserved[start] = (memory, size)
        return (*OK, start)

    def cuMemMap(self, pointer, size, offset, handle, flags):
        assert self.reserved[int(pointer)][1] == size
        content = os.pread(self.handles[handle], size, 0)
        ctypes.memmove(pointer, content, size)
        self.mapped[int(pointer)] = (handle, size)
        return OK

    def cuMemSetAccess(self, pointer, size, access, count):
        assert (len(access), count) == (1, 1)
        assert int(pointer) in self.mapped
        self.access[int(pointer)] = access[0].flags
        return OK

    def _place(self, address):
        start = max(p for p in self.mapped if p <= address)
        return start, address - start

    def cuMemcpyHtoD(self, target, source, size):
        start, offset = self._place(target)
        assert self.access[start] == 3
        os.pwrite(self.handles[self.mapped[start][0]], ctypes.string_at(source, size), offset)
        return OK

    def cuMemcpyDtoH(self, target, source, size):
        start, offset = self._place(source)
        ctypes.memmove(target, os.pread(self.handles[self.mapped[start][0]], size, offset), size)
        return OK

    def cuMemUnmap(self, pointer, size):
        del self.mapped[int(pointer)]
        return OK

    def cuMemAddressFree(self, pointer, size):
        assert int(pointer) not in self.mapped
        del self.reserved[int(pointer)]
        return OK

    def cuMemRelease(self, handle):
        os.close(self.handles[handle])
        self.handles[handle] = -1
        return OK


UUIDS = ["aa" * 16, "bb" * 16, "cc" * 16]


@pytest.mark.parametrize("devices", [1, 2])
def test_weights_go_to_the_gpus_and_come_out_the_same(devices):
    cu = FakeDriver(UUIDS)
    backend = cuda.CudaBackend(UUIDS[:devices], cu)
    model = FIXTURES / "qwen2"
    loaded = loading.load(holdings.Wish(str(model), "bfloat16", devices, "target"), backend, holdings.Progress())
    assert loaded.layout.arenas == tuple([loaded.layout.arenas[0]] * devices)
    assert loading.verify(loaded) == []
    assert set(cu.access.values()) == {1}, "read-only once it is loaded"
    with checkpoints.open_checkpoint(model) as source:
        specs = declare(models.model_config(source.config), Parallel(devices), source, "bfloat16")
        mesh = make_mesh(devices)
        read = params.load(specs, source, "bfloat16", mesh)
    leaves = list(layout.named(specs).values())
    arrays = cuda.attach(
        loaded.arenas.descriptors,
        loaded.layout,
        mesh,
        [sharding(mesh, leaf.axes) for leaf in leaves],
        cu=cu,
        kind=dlpack.CPU,
    )
    mine = len(cu.mapped) - devices
    assert mine == devices, "an import a GPU"
    assert [cu.access[p] for p in list(cu.mapped)[devices:]] == [1] * devices
    for ours, theirs in zip(arrays, jax.tree.leaves(read), strict=True):
        assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    del ours
    arrays.clear()
    gc.collect()
    assert len(cu.mapped) == devices, "unmapped with the last array, the owner's own kept"
    loaded.arenas.close()
    del loaded
    gc.collect()
    assert not cu.mapped
    assert not cu.reserved
    assert set(cu.handles.values()) == {-1}


def test_gpus_are_found_by_uuid_and_a_full_one_says_so():
    cu = FakeDriver(UUIDS, memory=4 << 20)
    assert cuda.ordinals([UUIDS[2], UUIDS[0]], cu) == [2, 0]
    with pytest.raises(SidecarError, match="is not visible"):
        cuda.ordinals(["dd" * 16], cu)
    assert groups.gpu_group(UUIDS[:2]) != groups.gpu_group(UUIDS[1::-1])
    backend = cuda.CudaBackend(UUIDS[:2], cu)
    assert backend.free() == 8 << 20
    with pytest.raises(SidecarError, match="CUDA_ERROR_OUT_OF_MEMORY") as error:
        backend.allocate("x", layout.Layout(2, (1 << 20, 8 << 20), ()))
    assert error.value.code == "memory"
    gc.collect()
    assert not cu.mapped
    with pytest.raises(SidecarError, match="for 2 GPUs, not 1"):
        backend.allocate("x", layout.Layout(1, (1 << 20,), ()))


def test_what_has_no_sidecar_says_so(monkeypatch):
    def mesh(platform, version):
        device = types.SimpleNamespace(platform=platform, client=types.SimpleNamespace(platform_version=version))
        return types.SimpleNamespace(devices=np.array([device], object))

    for platform, version in (("tpu", "libtpu"), ("gpu", "rocm 6")):
        with pytest.raises(SidecarError, match=f"NVIDIA GPUs; this is {platform}") as error:
            groups.group_of(mesh(platform, version))
        assert error.value.code == "unsupported"
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(SidecarError, match="cuda-bindings"):
        cuda.driver()


@pytest.mark.parametrize("dtype", list(dlpack.CODES))
def test_jax_adopts_a_pointer_of_every_dtype(dtype):
    kept = np.zeros(4096 + 64, np.uint8)
    start = -kept.ctypes.data % 64
    values = (
        kept[start : start + 24 * np.dtype(jax.numpy.dtype(dtype)).itemsize].view(jax.numpy.dtype(dtype)).reshape(4, 6)
    )
    values[...] = np.arange(24).reshape(4, 6) % 7
    owner = types.SimpleNamespace()
    external = dlpack.External(values.ctypes.data, (4, 6), dtype, (dlpack.CPU, 0), owner)
    count = len(dlpack._alive)
    array = jax.dlpack.from_dlpack(external)
    assert array.unsafe_buffer_pointer() == values.ctypes.data
    assert array.dtype == jax.numpy.dtype(dtype)
    assert np.array_equal(np.asarray(array), values)
    assert len(dlpack._alive) == count + 1
    del array
    gc.collect()
    assert len(dlpack._alive) == count, "its owner is let go with the array"
