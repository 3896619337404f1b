"""A pointer as an array that jax adopts: DLPack's unversioned struct (https://dmlc.github.io/dlpack), through ctypes.

numpy's own exporter knows neither bfloat16 nor memory on a GPU.
"""

import ctypes
from typing import Any

CPU, CUDA = 1, 2
"""DLPack's kinds of devices."""
CODES = {
    "int8": (0, 8),
    "int32": (0, 32),
    "uint8": (1, 8),
    "uint16": (1, 16),
    "uint32": (1, 32),
    "float16": (2, 16),
    "float32": (2, 32),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
}
"""Type code and bits by the dtype's name."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_alive: dict[int, tuple[Any, ...]] = {}
"""What exported structs refer to, by their address, until their consumer lets go."""


@_Deleter
def _delete(address: int) -> None:
    _alive.pop(address, None)


_delete_address = ctypes.cast(_delete, ctypes.c_void_p)
_prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_new_capsule = _prototype(("PyCapsule_New", ctypes.pythonapi))
"""Our own: ``jax.ffi.pycapsule`` changes the types of the one that all share."""


class External:
    """Memory at ``pointer``, row-major, that stays valid while ``owner`` lives, for ``jax.dlpack.from_dlpack``.

    The consumer keeps ``owner`` alive. ``device`` is DLPack's kind and the ordinal in this process.
    """

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: str, device: tuple[int, int], owner: Any):
        self._pointer, self._shape, self._dtype, self._device, self._owner = pointer, shape, dtype, device, owner

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        """A capsule for one consumer. The data must be complete on the device already: no stream is waited for."""
        code, bits = CODES[self._dtype]
        shape = (ctypes.c_int64 * max(1, len(self._shape)))(*self._shape)
        managed = _Managed(
            _Tensor(self._pointer, *self._device, len(self._shape), code, bits, 1, shape, None, 0),
            None,
            _delete_address,
        )
        address = ctypes.addressof(managed)
        _alive[address] = (managed, shape, self._owner)
        return _new_capsule(address, b"dltensor", None)
