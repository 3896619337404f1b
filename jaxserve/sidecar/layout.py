"""Where each weight lies in the sidecar's memory: a tensor is one piece for every shard, in one arena or several.

An arena is what one descriptor stands for. On a CPU there is one, and devices share the pieces of a weight that is not
sharded; GPUs have an arena each, and every piece that its device needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxserve.params import Index, ParamSpec, Specs
from jaxserve.sharding import RULES
from jaxserve.sidecar.errors import SidecarError

ALIGNMENT = 256
"""Bytes. XLA's CPU backend adopts memory at 64, TMA on a GPU wants more."""
_MAX_TENSORS, _MAX_RANK, _MAX_DEVICES = 100_000, 8, 64


@dataclass(frozen=True, slots=True)
class Piece:
    """One shard's bytes."""

    arena: int
    offset: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter: its name in the tree, its whole shape, the axis that is sharded (None: none is).

    ``pieces`` has an entry for each device, or a single one that all devices share. ``sha256`` is over the distinct
    shards in their order; empty until they are loaded.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axis: int | None
    pieces: tuple[Piece, ...]
    sha256: str = ""

    def piece_shape(self, devices: int) -> tuple[int, ...]:
        if self.axis is None:
            return self.shape
        return tuple(n // devices if i == self.axis else n for i, n in enumerate(self.shape))

    def piece_bytes(self, devices: int) -> int:
        return int(np.prod(self.piece_shape(devices), dtype=np.int64)) * np_dtype(self.dtype).itemsize

    def places(self) -> list[tuple[Piece, ...]]:
        """Where each distinct shard lies, in order: in several places where devices have a copy each."""
        return [self.pieces] if self.axis is None else [(piece,) for piece in self.pieces]


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors of one model, and the size of each arena in bytes."""

    devices: int
    arenas: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.arenas)

    def as_json(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "arenas": list(self.arenas),
            "tensors": [
                {
                    "name": t.name,
                    "dtype": t.dtype,
                    "shape": list(t.shape),
                    "axis": t.axis,
                    "pieces": [[p.arena, p.offset] for p in t.pieces],
                    "sha256": t.sha256,
                }
                for t in self.tensors
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> "Layout":
        """Read and check what a sidecar sent. Raises ``SidecarError``."""
        try:
            devices, arenas = value["devices"], tuple(value["arenas"])
            _need(type(devices) is int and 1 <= devices <= _MAX_DEVICES, "devices")
            _need(1 <= len(arenas) <= devices and all(type(n) is int and n > 0 for n in arenas), "arenas")
            _need(len(value["tensors"]) <= _MAX_TENSORS, "tensors")
            tensors = tuple(_tensor(entry, devices, arenas) for entry in value["tensors"])
        except (KeyError, TypeError, ValueError) as error:
            raise SidecarError(f"the sidecar's manifest is wrong: {error}") from None
        return cls(devices, arenas, tensors)


def np_dtype(name: str) -> np.dtype:
    """The dtype of a name, bfloat16 and the like as well."""
    return np.dtype(jax.numpy.dtype(name))


def named(specs: Specs) -> dict[str, ParamSpec]:
    """The leaves of a tree of parameters by name, in the tree's order."""
    leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, ParamSpec))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def sharded_axis(spec: ParamSpec) -> int | None:
    """The dimension that the mesh divides. At most one: experts are not divided among groups of devices here."""
    axes = [i for i, axis in enumerate(spec.axes) if axis and "tensor" in RULES.get(axis, ())]
    if len(axes) > 1:
        raise ValueError(f"a parameter with axes {spec.axes} would be sharded twice")
    return axes[0] if axes else None


def shards(spec: ParamSpec, devices: int) -> list[Index]:
    """What each device keeps, as ``NamedSharding.devices_indices_map`` says; one for all where nothing is sharded."""
    whole = tuple(slice(0, n) for n in spec.shape)
    axis = sharded_axis(spec)
    if axis is None:
        return [whole]
    size = spec.shape[axis] // devices
    return [(*whole[:axis], slice(i * size, (i + 1) * size), *whole[axis + 1 :]) for i in range(devices)]


def plan(specs: Specs, dtype: str, devices: int, *, arena_each: bool) -> Layout:
    """Lay the parameters out for ``devices``, in an arena each or all in one."""
    sizes = [0] * (devices if arena_each else 1)
    tensors = []
    for name, spec in named(specs).items():
        kind = spec.dtype or dtype
        tensor = Tensor(name, kind, spec.shape, sharded_axis(spec), ())
        count = devices if arena_each or tensor.axis is not None else 1
        pieces = []
        for i in range(count):
            arena = i if arena_each else 0
            pieces.append(Piece(arena, sizes[arena]))
            sizes[arena] += -(-tensor.piece_bytes(devices) // ALIGNMENT) * ALIGNMENT
        tensors.append(replace(tensor, pieces=tuple(pieces)))
    return Layout(devices, tuple(sizes), tuple(tensors))


def compare(have: Layout, want: Layout) -> list[str]:
    """What of the tensors differs, offsets and contents aside, in words."""
    mine, theirs = ({t.name: (t.dtype, t.shape, t.axis) for t in layout.tensors} for layout in (want, have))
    out = [f"devices: {have.devices} in the sidecar, {want.devices} here"] if have.devices != want.devices else []
    out += [f"tensor {name} is not in the sidecar" for name in mine if name not in theirs]
    out += [f"tensor {name} is only in the sidecar" for name in theirs if name not in mine]
    out += [
        f"tensor {name}: {theirs[name]} in the sidecar, {mine[name]} here"
        for name in mine
        if name in theirs and theirs[name] != mine[name]
    ]
    return out


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} out of range")


def _tensor(entry: dict[str, Any], devices: int, arenas: Sequence[int]) -> Tensor:
    name, shape, axis = entry["name"], tuple(entry["shape"]), entry["axis"]
    pieces = tuple(Piece(arena, offset) for arena, offset in entry["pieces"])
    _need(isinstance(name, str) and isinstance(entry["dtype"], str) and isinstance(entry["sha256"], str), "a name")
    _need(len(shape) <= _MAX_RANK and all(type(n) is int and n >= 0 for n in shape), f"{name}: shape")
    _need(axis is None or (type(axis) is int and 0 <= axis < len(shape) and not shape[axis] % devices), f"{name}: axis")
    _need(len(pieces) == devices or (len(pieces) == 1 and axis is None), f"{name}: pieces")
    tensor = Tensor(name, entry["dtype"], shape, axis, pieces, entry["sha256"])
    size = tensor.piece_bytes(devices)
    for piece in pieces:
        _need(type(piece.arena) is int and 0 <= piece.arena < len(arenas), f"{name}: arena")
        fits = type(piece.offset) is int and piece.offset >= 0 and piece.offset + size <= arenas[piece.arena]
        _need(fits and not piece.offset % ALIGNMENT, f"{name}: offset")
    return tensor
