"""Zeros on a CPU that take no memory, and no time, before they are used.

XLA writes the zeros that it is asked for: half a second for a gigabyte of KV pages, most of it page faults. Here a
foreign function stands for them, which asks the kernel to take the pages back: it gives zeros to whoever touches one
next. Elsewhere than on a CPU zeros are written, which takes no time there.
"""

import ctypes
import math
import mmap
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

TARGET = "jaxserve_untouched"
LEAST = 1 << 20
"""Bytes of an array, or of a device's part of it, below which writing zeros is as good."""


def zeros(shapes: Any) -> Any:
    """Zeros like the ``ShapeDtypeStruct`` leaves of a tree, which name their shardings; to be called while tracing."""
    leaves, tree = jax.tree.flatten(shapes)
    large = [i for i, leaf in enumerate(leaves) if _is_worth_it(leaf)]
    made: list[Any] = [None if i in large else jnp.zeros(leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    if large:
        parts = [leaves[i] for i in large]
        local = [jax.ShapeDtypeStruct(part.sharding.shard_shape(part.shape), part.dtype) for part in parts]
        call = jax.ffi.ffi_call(TARGET, local)
        specs = [part.sharding.spec for part in parts]
        each = jax.shard_map(lambda: call(), mesh=parts[0].sharding.mesh, in_specs=(), out_specs=specs, check_vma=False)
        for i, array in zip(large, each(), strict=True):
            made[i] = array
    return jax.tree.unflatten(tree, made)


def _is_worth_it(leaf: jax.ShapeDtypeStruct) -> bool:
    where = leaf.sharding
    if not isinstance(where, NamedSharding) or where.mesh.devices.flat[0].platform != "cpu":
        return False
    return math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize >= LEAST and leaf.dtype.name in _CODES


# -- the foreign function, by XLA's C interface (xla/ffi/api/c_api.h) --------------------------------------------------

_CODES = {"float32": 11, "float16": 10, "bfloat16": 16, "float8_e4m3fn": 20, "uint8": 6, "int8": 2, "int32": 4}
_WIDTHS = {code: jnp.dtype(name).itemsize for name, code in _CODES.items()}
_METADATA, _EXECUTE = 1, 3
"""The kind of extension that asks for metadata; the stage at which results are wanted."""


class _Version(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("more", ctypes.c_void_p), ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Api(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("more", ctypes.c_void_p), ("version", _Version))


class _Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", _Version))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("more", ctypes.c_void_p),
        ("code", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("more", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("kinds", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
    )


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
def _handler(frame: Any) -> None:
    """Called by XLA. Returns NULL: there are no errors."""
    call = frame.contents
    if call.extension and call.extension.contents.kind == _METADATA:  # which interface are we made for: this one
        said, ours = call.extension.contents.metadata.contents.version, call.api.contents.version
        said.major, said.minor = ours.major, ours.minor
    elif call.stage == _EXECUTE:
        for i in range(call.results.count):
            found = call.results.buffers[i].contents
            clear(found.data, math.prod(found.dims[: found.rank]) * _WIDTHS[found.code])


def clear(pointer: int, nbytes: int) -> None:
    """Make private anonymous memory zeros: whole pages are given back to the kernel, the rest is written.

    They come back as huge pages where the kernel has any: KV pages move a tenth quicker between those.
    """
    page = mmap.PAGESIZE
    start, end = -(-pointer // page) * page, (pointer + nbytes) // page * page
    if start < end:
        _madvise(start, end - start, mmap.MADV_HUGEPAGE)
    if start >= end or _madvise(start, end - start, mmap.MADV_DONTNEED):
        ctypes.memset(pointer, 0, nbytes)
        return
    ctypes.memset(pointer, 0, start - pointer)
    ctypes.memset(end, 0, pointer + nbytes - end)


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler), platform="cpu")
