"""Memory on a CPU: a sealed memfd, mapped read-only by every engine, adopted by jax without a copy."""

import ctypes
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.priority import give_way
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.layout import Layout, Piece, np_dtype

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_POPULATE_READ, _TOUCHED = 22, 64 << 20
ARENA_EACH = False
"""Devices share one arena, and the pieces in it that they have in common."""


class SharedArenas:
    """The owner's side. Written piece by piece, then sealed: nobody, nor the owner, can change or resize it any more.

    Raises ``SidecarError`` (``memory``) where the memory is not there.
    """

    def __init__(self, name: str, sizes: Sequence[int]):
        self.descriptors: list[int] = []
        self._maps: list[mmap.mmap] = []
        try:
            for i, size in enumerate(sizes):
                fd = os.memfd_create(f"jaxserve-{name}-{i}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                self.descriptors.append(fd)
                os.posix_fallocate(fd, 0, size)  # here it fails with an error, later with a signal
                self._maps.append(mmap.mmap(fd, size, mmap.MAP_SHARED))
        except OSError as error:
            self.close()
            raise SidecarError(f"{sum(sizes)} bytes of shared memory: {error.strerror}", "memory") from None

    def room(self, pieces: Sequence[Piece], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The pieces' memory, to be written and then given to ``commit``: one shard is in one place here."""
        return _view(self._maps[pieces[0].arena], pieces[0].offset, dtype, shape)

    def commit(self, pieces: Sequence[Piece], values: np.ndarray) -> None:
        """What was written into ``room`` is there already."""

    def read(self, piece: Piece, nbytes: int) -> np.ndarray:
        return _view(self._maps[piece.arena], piece.offset, np.dtype(np.uint8), (nbytes,))

    def seal(self) -> None:
        for i, fd in enumerate(self.descriptors):
            size = len(self._maps[i])
            self._maps[i].close()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._maps[i] = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)

    def close(self) -> None:
        """Let go of it; it lives on in the engines that have it mapped."""
        self._maps.clear()
        while self.descriptors:
            os.close(self.descriptors.pop())


def attach(
    descriptors: Sequence[int], layout: Layout, mesh: Mesh, shardings: Sequence[NamedSharding]
) -> list[jax.Array]:
    """The tensors as jax arrays, in the layout's order, in the sidecar's own memory. The descriptors stay the caller's.

    The arrays must never be donated. Raises ``SidecarError`` where the memory is not sealed or too short, or is copied.
    """
    maps = [_map(fd, size) for fd, size in zip(descriptors, layout.arenas, strict=True)]
    devices = list(mesh.devices.flat)
    columns = []
    for i, device in enumerate(devices):
        views = []
        for tensor in layout.tensors:
            piece = tensor.pieces[i if len(tensor.pieces) > 1 else 0]
            views.append(
                _view(maps[piece.arena], piece.offset, np_dtype(tensor.dtype), tensor.piece_shape(len(devices)))
            )
        arrays = jax.device_put(views, device, may_alias=True)
        for view, array, tensor in zip(views, arrays, layout.tensors, strict=True):
            if view.size and array.unsafe_buffer_pointer() != view.ctypes.data:
                raise SidecarError(f"jax copied {tensor.name} instead of adopting it", "unsupported")
        columns.append(arrays)
    out: list[jax.Array] = [
        jax.make_array_from_single_device_arrays(tensor.shape, sharding, list(pieces))
        for tensor, sharding, pieces in zip(layout.tensors, shardings, zip(*columns, strict=True), strict=True)
    ]
    threading.Thread(target=_touch, args=(maps,), name="jaxserve-touch", daemon=True).start()
    return out


def _touch(maps: Sequence[mmap.mmap]) -> None:
    """Have the kernel fill in the page tables, which the first step would otherwise wait for; a start goes first."""
    give_way()
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # mmap's own method would hold the interpreter's lock
    for found in maps:
        start, size = np.frombuffer(found, np.uint8).ctypes.data, len(found)
        for offset in range(0, size, _TOUCHED):
            # before Linux 5.14 it is an error, and the first step does it, page by page
            madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(min(_TOUCHED, size - offset)), _POPULATE_READ)


def _map(fd: int, size: int) -> mmap.mmap:
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(fd).st_size < size:
            raise SidecarError("the sidecar's memory is not sealed, or shorter than its manifest says")
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        raise SidecarError(f"the sidecar's memory cannot be mapped: {error.strerror}") from None


def _view(found: mmap.mmap, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(found, dtype, math.prod(shape), offset).reshape(shape)
