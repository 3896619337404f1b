"""Copies to and from pinned host memory by its address: the functions of ``rows.cuh``, as XLA calls them.

The library, which has the resolver's kernel too, is built by ``python -m pallas_kernels.host_rows.build`` and loaded
before the first program that uses it is compiled or read from a store. That no kernel was ever run on a GPU is said in
the package.
"""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib
import numpy as np

LIBRARY = Path(__file__).with_name("librows.so")
FETCH, WRITE, RESOLVE = "host_rows_fetch", "host_rows_write", "resolver_resolve"
"""The names that programs call the functions by."""


class LibraryError(RuntimeError):
    """The library is missing, is for another version of jaxlib, or could not pin memory; the message says which."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["address"], meta_fields=["rows"])
@dataclass(frozen=True)
class Pinned:
    """A pool of ``rows`` records that lie densely in pinned host memory."""

    address: jax.Array  # uint32 [2]: of the first record as the device sees it, low half first
    rows: int

    @classmethod
    def at(cls, address: int, rows: int) -> "Pinned":
        """With the address as a numpy array, to be placed."""
        halves = np.array([address & 0xFFFFFFFF, address >> 32], np.uint32)
        return cls(halves, rows)  # type: ignore[arg-type]


def fetch(pool: Pinned, sources: jax.Array, latents: jax.Array, targets: jax.Array) -> jax.Array:
    """Rows of the pool into the latents (see the package)."""
    out = jax.ShapeDtypeStruct(latents.shape, latents.dtype)
    call = jax.ffi.ffi_call(FETCH, out, input_output_aliases={2: 0})
    return call(pool.address, sources, latents, targets, pool_rows=np.int64(pool.rows))


def write(pool: Pinned, records: jax.Array, slots: jax.Array) -> Pinned:
    """New records into the pool (see the package). It is done even where nobody asks for the pool afterwards."""
    out = jax.ShapeDtypeStruct(pool.address.shape, pool.address.dtype)
    call = jax.ffi.ffi_call(WRITE, out, has_side_effect=True, input_output_aliases={0: 0})
    return Pinned(call(pool.address, records, slots, pool_rows=np.int64(pool.rows)), pool.rows)


@functools.cache
def load(path: Path = LIBRARY, platform: str = "CUDA") -> ctypes.CDLL:
    """Load the library and make its functions known to XLA. Raises ``LibraryError``."""
    if not path.exists():
        raise LibraryError(f"there is no {path}: python -m pallas_kernels.host_rows.build makes it")
    try:
        library = ctypes.CDLL(str(path))
        built_for = ctypes.c_char_p.in_dll(library, "HostRowsBuiltFor").value or b""
    except (OSError, ValueError) as problem:
        raise LibraryError(f"{path} cannot be loaded: {problem}") from problem
    if built_for.decode() != jaxlib.__version__:
        raise LibraryError(
            f"{path} is for jaxlib {built_for.decode()}, this is {jaxlib.__version__}: "
            "build it anew with python -m pallas_kernels.host_rows.build"
        )
    functions = {FETCH: library.HostRowsFetch, WRITE: library.HostRowsWrite, RESOLVE: library.ResolverResolve}
    for name, function in functions.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform=platform)
    library.HostRowsPin.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p))
    library.HostRowsUnpin.argtypes = (ctypes.c_void_p,)
    library.HostRowsPin.restype = library.HostRowsUnpin.restype = ctypes.c_char_p
    return library


def unavailable(path: Path = LIBRARY) -> str | None:
    """Why the library cannot be used, or None: for the start-up report."""
    try:
        load(path)
    except LibraryError as problem:
        return str(problem)
    return None


def pin(library: ctypes.CDLL, memory: np.ndarray) -> int:
    """Pin a buffer, which must outlive its use, and return the address at which devices see it. Raises
    ``LibraryError``, where the system allows no more pinned memory for one."""
    seen = ctypes.c_void_p()
    problem = library.HostRowsPin(memory.ctypes.data, memory.nbytes, ctypes.byref(seen))
    if problem is not None:
        raise LibraryError(f"{memory.nbytes} bytes of host memory cannot be pinned: {problem.decode()}")
    return seen.value or 0


def unpin(library: ctypes.CDLL, memory: np.ndarray) -> None:
    """Undo ``pin``. No step that uses the pool may be in flight."""
    problem = library.HostRowsUnpin(memory.ctypes.data)
    if problem is not None:
        raise LibraryError(f"host memory cannot be unpinned: {problem.decode()}")
