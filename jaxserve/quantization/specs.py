"""From the declaration of plain weights to that of quantized ones, for any family.

A parameter's ``fill`` only moves elements: it picks, permutes and pads them. So the same ``fill`` that arranges the
weights arranges their scales: it is given a checkpoint in which every element of a tensor is that element's scale, and
of what it returns one element a block is kept. How far a block reaches follows from the parameter's shape: where an
axis alone makes up a side of the matrix on disk, blocks are those on disk; where devices or other axes cut it, they are
as large as fits between the cuts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxserve.params import Index, ParamSpec, Source, Specs, WeightError
from jaxserve.quantization.array import QuantArray
from jaxserve.quantization.rules import BlockFp8
from jaxserve.sharding import Parallel, shards

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def quantized(specs: Specs, rule: BlockFp8, tensors: Mapping[str, Any], parallel: Parallel, dtype: str) -> Specs:
    """The same tree with a ``QuantArray`` of two specs in the place of each parameter that is e4m3 on disk, where there
    are ``tensors``.

    Raises ``WeightError`` naming an e4m3 tensor without scales, or where only some of the tensors that make up a
    parameter are e4m3.
    """

    def one(spec: ParamSpec) -> ParamSpec | QuantArray:
        kinds = {name: tensors[name].dtype for name in spec.pieces if name in tensors}
        fp8 = [name for name, kind in kinds.items() if kind == E4M3]
        if not fp8 or len(kinds) < len(spec.pieces):  # what is missing is for params.check to say
            return spec
        for name, kind in kinds.items():
            if kind != E4M3:
                both = f"{name}, {kind.name}, and {fp8[0]}, {E4M3.name}"
                raise WeightError(f"one parameter is made of tensors {both}")
        if not may_stay(spec):
            raise WeightError(f"tensor {fp8[0]} is {E4M3.name}: this parameter is not read quantized")
        return _pair(spec, rule, {name: _scale_name(name, tensors) for name in spec.pieces}, parallel, dtype)

    return jax.tree.map(one, specs, is_leaf=lambda x: isinstance(x, ParamSpec))


def may_stay(spec: ParamSpec) -> bool:
    """Whether a parameter may stay quantized: made of matrices, not kept in float32, no table of the vocabulary."""
    matrices = all(len(shape) == 2 for shape in spec.pieces.values())
    return matrices and spec.dtype is None and "vocab" not in spec.axes


def _scale_name(name: str, tensors: Mapping[str, Any]) -> str:
    """``X.weight`` has ``X.weight_scale_inv``, or ``X.scale`` in DeepSeek V4's spelling."""
    names = (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale")
    for found in names:
        if found in tensors:
            return found
    raise WeightError(f"tensor {name} is {E4M3.name} and has no scales: neither {names[0]} nor {names[1]}")


def _pair(spec: ParamSpec, rule: BlockFp8, scales: Mapping[str, str], parallel: Parallel, dtype: str) -> QuantArray:
    blocks = block_shape(spec, rule.block, parallel)
    sides = {name: tuple(-(-size // rule.block) for size in spec.pieces[name][-2:]) for name in scales}
    shape = tuple(-(-size // block) for size, block in zip(spec.shape, blocks, strict=True))

    def fill(source: Source, index: Index) -> np.ndarray:
        first, rest = range(index[0].start, index[0].stop), index[1:]
        if blocks[0] == 1 and len(first) > 1:  # one by one: what is made on the way is as large as the weights
            return np.concatenate([fill(source, (slice(i, i + 1), *rest)) for i in first])
        elements = tuple(
            slice(part.start * block, min(part.stop * block, size))
            for part, block, size in zip(index, blocks, spec.shape, strict=True)
        )
        values = spec.fill(_Scales(source, source.tensors, scales, rule.block, spec.pieces), elements)
        return values[tuple(slice(None, None, block) for block in blocks)]

    pieces = {scales[name]: sides[name] for name in scales}
    data = replace(spec, dtype=E4M3.name)
    scale = replace(spec, shape=shape, pieces=pieces, fill=fill, dtype="float32")
    return QuantArray(data, scale, blocks, dtype, tuple(spec.axes))


def block_shape(spec: ParamSpec, block: int, parallel: Parallel) -> tuple[int, ...]:
    """How many elements along each axis of the parameter share a scale.

    The last ``spec.inputs`` axes make up the columns on disk, the others the rows (and which of several tensors).
    """
    outer = len(spec.shape) - spec.inputs
    blocks = []
    for side in (range(outer), range(outer, len(spec.shape))):
        alone = len(side) == 1
        for axis in side:
            size = spec.shape[axis] // shards(spec.axes[axis], parallel)
            if axis != side[-1]:
                blocks.append(1)
            elif alone and size == spec.shape[axis]:
                blocks.append(block)
            else:
                blocks.append(math.gcd(size, block, spec.aligned if axis < outer else 0))
    return tuple(blocks)


@dataclass
class _Scales:
    """A checkpoint as ``fill`` sees it, with each element's scale in the element's place."""

    source: Source
    tensors: Mapping[str, Any]
    names: Mapping[str, str]
    block: int
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, rows: slice | np.ndarray | None = None) -> np.ndarray:
        height, width = self.shapes[name]
        scale = self.source.read(self.names[name])
        if scale.dtype == np.uint8:
            scale = scale.view(ml_dtypes.float8_e8m0fnu)
        wide = np.repeat(scale.astype(np.float32), self.block, axis=1)[:, :width]
        index = np.arange(height) if rows is None else np.arange(height)[rows] if isinstance(rows, slice) else rows
        return wide[index // self.block]
