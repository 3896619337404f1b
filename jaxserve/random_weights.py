"""Weights that are made up: a checkpoint as a model's config promises it, for shapes of which there are no weights.

Every tensor is made of 256 values; random bytes choose among them. A byte follows from the seed, the tensor's name and
its place alone, so that the model is the same however many devices share it, and any rows can be made without the rest.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import jax
import numpy as np

from checkpoints import TensorInfo
from jaxserve.params import ParamSpec, Specs
from jaxserve.quantization import BlockFp8, MxArray, QuantArray, may_stay
from jaxserve.quantization.specs import E4M3

BLOCK = 32
"""Bytes that a count of the generator makes."""
CHUNK = 1 << 16
"""Pairs of bytes looked up at once: what fits the cache."""
SCALE = 128.0
"""The standard deviation of e4m3 numbers, which end at 448; their scales make up for it."""
E2M1_RMS = math.sqrt(137 / 16)
"""Of a number of random bits."""


def _normal() -> np.ndarray:
    """The 256 quantiles of a normal distribution, of variance 1."""
    law = NormalDist()
    values = np.array([law.inv_cdf((i + 0.5) / 256) for i in range(256)])
    return values / values.std()


def promised(specs: Specs, rule: BlockFp8, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The tensors of an fp8 checkpoint: every matrix that may stay quantized, but what ``config`` excepts, has scales.

    ``config`` is that of the model; only name, shape and dtype of the tensors mean anything.
    """
    names = (config.get("quantization_config") or {}).get("modules_to_not_convert") or []
    found = {}
    for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, ParamSpec)):
        excepted = any(part in name for name in spec.pieces for part in names)
        for name, shape in spec.pieces.items():
            kind = E4M3 if may_stay(spec) and not excepted else np.dtype(np.float32)
            found[name] = TensorInfo(shape, kind, 0, kind.name)
            if kind == E4M3:
                sides = tuple(-(-size // rule.block) for size in shape)
                found[f"{name}_scale_inv"] = TensorInfo(sides, np.dtype(np.float32), 0, "F32")
    return found


@dataclass(frozen=True)
class Tensor:
    """What a tensor is made of: ``values`` has 256 of them."""

    shape: tuple[int, ...]
    values: np.ndarray


class RandomWeights:
    """The tensors that ``specs`` are made of, for ``params.load``: matrices normal with variance 1 / inputs, norms 1.

    ``dtype`` is the engine's.
    """

    def __init__(self, specs: Specs, dtype: str, seed: int = 0):
        self._seed = seed
        self._normal = _normal()
        found: dict[str, Tensor] = {}
        whole = (ParamSpec, QuantArray, MxArray)
        for leaf in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, whole)):
            for spec, values in self._parts(leaf, dtype):
                found |= {name: Tensor(shape, values) for name, shape in spec.pieces.items()}
        self.tensors: Mapping[str, Any] = found

    def _parts(self, leaf: Any, dtype: str) -> Iterator[tuple[ParamSpec, np.ndarray]]:
        """The declarations that a parameter consists of, and of which values each is made."""
        if isinstance(leaf, QuantArray):
            size = _inputs(leaf.data) ** -0.5 / SCALE
            yield leaf.data, (self._normal * SCALE).astype(E4M3)
            yield leaf.scale, np.linspace(0.75 * size, 1.25 * size, 256, dtype=np.float32)
        elif isinstance(leaf, MxArray):
            power = round(math.log2(leaf.shape[-1] ** -0.5 / E2M1_RMS))
            yield leaf.data, np.arange(256, dtype=np.uint8)
            yield leaf.scale, np.full(256, 127 + power, np.uint8)
        elif leaf.ones:
            yield leaf, np.full(256, 1.0 - leaf.fill(_Zeros(), (slice(0, 1),))[0], np.float32)
        else:
            yield leaf, (self._normal * _inputs(leaf) ** -0.5).astype(leaf.dtype or dtype)

    def read(self, name: str, rows: slice | np.ndarray | None = None) -> np.ndarray:
        tensor: Tensor = self.tensors[name]
        width = math.prod(tensor.shape[1:])
        if rows is None or isinstance(rows, slice):
            part = range(tensor.shape[0])[slice(None) if rows is None else rows]
            return self._elements(name, part.start * width, part.stop * width).reshape(-1, *tensor.shape[1:])
        breaks = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        runs = [
            self._elements(name, int(rows[first]) * width, (int(rows[last - 1]) + 1) * width)
            for first, last in itertools.pairwise(breaks)
            if last > first
        ]
        values = np.concatenate(runs) if runs else np.empty(0, tensor.values.dtype)
        return values.reshape(-1, *tensor.shape[1:])

    def _elements(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements of a tensor, counted through its rows."""
        values = self.tensors[name].values
        if start >= stop:
            return np.empty(0, values.dtype)
        first, last = start // BLOCK, -(-stop // BLOCK)
        key = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=16).digest()
        draw = np.random.Philox(counter=first, key=int.from_bytes(key))
        pairs = draw.random_raw((last - first) * BLOCK // 8).view(np.uint16)
        table = _pairs(values.tobytes(), values.itemsize)
        out = np.empty(len(pairs), table.dtype)
        for i in range(0, len(pairs), CHUNK):
            np.take(table, pairs[i : i + CHUNK], out=out[i : i + CHUNK], mode="clip")
        return out.view(values.dtype)[start - first * BLOCK : stop - first * BLOCK]


def _inputs(spec: ParamSpec) -> int:
    return math.prod(spec.shape[len(spec.shape) - spec.inputs :])


@functools.lru_cache(maxsize=64)
def _pairs(values: bytes, size: int) -> np.ndarray:
    """For any two bytes the two values of ``size`` bytes that they stand for, as one unsigned integer: half the time of
    one at a time."""
    one = np.frombuffer(values, f"u{size}")
    both = np.empty((256, 256, 2), one.dtype)
    both[..., 0], both[..., 1] = one, one[:, None]  # the lower byte comes first
    return both.reshape(-1).view(f"u{2 * size}")


class _Zeros:
    """A checkpoint of vectors of zeros: shows what is added to them as they are read."""

    tensors: Mapping[str, Any] = {}

    def read(self, name: str, rows: slice | np.ndarray | None = None) -> np.ndarray:
        return np.zeros(1, np.float32)
