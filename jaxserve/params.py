"""Weights: one declaration each, from which follow abstract shape, sharding and reading from a checkpoint.

A tree of ``ParamSpec`` mirrors the tree of parameters. ``load`` reads shard by shard: for every device it reads only
the rows that device keeps, so that host memory holds no more than a few shards at a time.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.sharding import sharding

Index = tuple[slice, ...]


class Source(Protocol):
    """What ``load`` needs of a checkpoint (``checkpoints.Checkpoint`` has it)."""

    tensors: Mapping[str, Any]

    def read(self, name: str, rows: slice | np.ndarray | None = None) -> np.ndarray: ...


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its physical shape, logical axes, and the tensors on disk it is made of.

    ``pieces`` maps names on disk to the shapes they must have there. ``fill(source, index)`` returns the part of the
    parameter that ``index`` (a slice a dimension, with bounds) selects, in any float dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    pieces: Mapping[str, tuple[int, ...]]
    fill: Callable[[Source, Index], np.ndarray]
    dtype: str | None = None
    """Kept in this dtype; None: in the engine's."""
    ones: bool = False
    """Where weights are made up it is one (norms), not around zero."""
    inputs: int = 1
    """Of a matrix, how many axes from the last are what a product contracts over: the columns on disk."""
    aligned: int = 0
    """Where rows on disk are read in runs, one a head: the runs begin at multiples of this; 0: of a run's length."""


Specs = Any  # a pytree of ParamSpec
Params = Any  # the same tree of jax arrays
Abstract = Any  # a jax.ShapeDtypeStruct, or a tree of them, in the place of the arrays it describes


def _leaves(specs: Specs) -> list[ParamSpec]:
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def _map(f: Callable[[ParamSpec], Any], specs: Specs) -> Any:
    return jax.tree.map(f, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def _dtype(spec: ParamSpec, dtype: str) -> jnp.dtype:
    return jnp.dtype(spec.dtype or dtype)


def abstract(specs: Specs, dtype: str, mesh: Mesh) -> Abstract:
    """The same tree of ``jax.ShapeDtypeStruct`` with shardings: enough to compile, and to restore into."""
    return _map(lambda s: jax.ShapeDtypeStruct(s.shape, _dtype(s, dtype), sharding=sharding(mesh, s.axes)), specs)


def nbytes(specs: Specs, dtype: str) -> int:
    """Bytes of all parameters, one copy."""
    return sum(int(np.prod(s.shape)) * _dtype(s, dtype).itemsize for s in _leaves(specs))


def shapes(specs: Specs) -> list[tuple[int, ...]]:
    """The shapes of all parameters in memory."""
    return [spec.shape for spec in _leaves(specs)]


def check(specs: Specs, source: Source, endings: Iterable[str] = (), beginnings: Iterable[str] = ()) -> None:
    """Compare names and shapes with the checkpoint. Tensors whose names end or begin as given may be left over.

    Raises ``WeightError`` listing what is missing, unused or misshapen.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for spec in _leaves(specs):
        expected.update(spec.pieces)
    have = {name: tuple(info.shape) for name, info in source.tensors.items()}
    problems = [f"missing tensor {name} {list(shape)}" for name, shape in expected.items() if name not in have]
    problems += [
        f"tensor {name} has shape {list(have[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in have and have[name] != shape
    ]
    unknown = [name for name in have if name not in expected]
    spare = (tuple(endings), tuple(beginnings))
    problems += [f"unexpected tensor {n}" for n in unknown if not n.endswith(spare[0]) and not n.startswith(spare[1])]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise WeightError(f"the checkpoint does not fit the model: {shown}")


class WeightError(ValueError):
    """A checkpoint whose tensors do not fit the model; the message names them."""


def load(
    specs: Specs, source: Source, dtype: str, mesh: Mesh, progress: Callable[[int, int], None] | None = None
) -> Params:
    """Read every parameter to its devices. ``progress(done, total)`` is told bytes after each parameter."""
    total, done = nbytes(specs, dtype), 0
    leaves, tree = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, ParamSpec))

    def read(spec: ParamSpec) -> jax.Array:
        kind = _dtype(spec, dtype)
        memory: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # replicas of a shard are read once

        def part(index: Index | None) -> np.ndarray:
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), spec.shape, strict=True))
            if bounds not in memory:
                values = spec.fill(source, tuple(slice(*b) for b in bounds))
                memory[bounds] = _aligned(values, kind)
            return memory[bounds]

        return jax.make_array_from_callback(spec.shape, sharding(mesh, spec.axes), part)

    out = []
    with ThreadPoolExecutor(4, "weights") as pool:
        for spec, array in zip(leaves, pool.map(read, leaves), strict=True):
            done += int(np.prod(spec.shape)) * array.dtype.itemsize
            if progress:
                progress(done, total)
            out.append(array)
    return jax.tree.unflatten(tree, out)


def _aligned(values: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """Cast into memory at a 64-byte border, which the CPU backend adopts without a copy."""
    size = values.size * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + size].view(dtype).reshape(values.shape)
    out[...] = values
    return out


def vector(name: str, size: int, plus: float = 0.0) -> ParamSpec:
    """A replicated float32 vector, read with ``plus`` added (norm weights)."""

    def fill(source: Source, index: Index) -> np.ndarray:
        return source.read(name)[index].astype(np.float32) + np.float32(plus)

    return ParamSpec((size,), (None,), {name: (size,)}, fill, dtype="float32", ones=True)


def rows(name: str, shape: tuple[int, ...], padded: int, axis: str) -> ParamSpec:
    """A tensor ``[padded, ...]`` sharded by rows; rows beyond the checkpoint's ``shape[0]`` are zero."""

    def fill(source: Source, index: Index) -> np.ndarray:
        lo, hi = index[0].start, index[0].stop
        part = source.read(name, slice(min(lo, shape[0]), min(hi, shape[0])))
        missing = hi - lo - part.shape[0]
        return np.concatenate([part, np.zeros((missing, *shape[1:]), part.dtype)]) if missing else part

    return ParamSpec((padded, *shape[1:]), (axis, *(None,) * (len(shape) - 1)), {name: shape}, fill)


def columns(name: str, shape: tuple[int, int], padded: int, axis: str) -> ParamSpec:
    """A matrix ``[out, padded]`` sharded by columns; columns beyond the checkpoint's are zero."""

    def fill(source: Source, index: Index) -> np.ndarray:
        lo, hi = index[1].start, index[1].stop
        part = source.read(name)[:, min(lo, shape[1]) : min(hi, shape[1])]
        return np.pad(part, ((0, 0), (0, hi - lo - part.shape[1])))

    return ParamSpec((shape[0], padded), (None, axis), {name: shape}, fill)
