"""The owner's work: read a checkpoint, cast and shard it as an engine would, into memory that engines can map."""

import ctypes
import dataclasses
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import checkpoints
from jaxserve import models, params
from jaxserve.config import EngineConfig
from jaxserve.declare import declare, resolve_dtype
from jaxserve.sharding import Parallel
from jaxserve.sidecar import files, key
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.holdings import Progress, Wish
from jaxserve.sidecar.layout import Layout, Piece, Tensor, named, np_dtype, plan, shards

log = logging.getLogger(__name__)


class Arenas(Protocol):
    """Memory that lasts: ``shared.SharedArenas``, ``cuda.CudaArenas``."""

    descriptors: list[int]

    def room(self, pieces: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray: ...
    def commit(self, pieces: Any, values: np.ndarray) -> None: ...
    def read(self, piece: Piece, nbytes: int) -> np.ndarray: ...
    def seal(self) -> None: ...
    def close(self) -> None: ...


class Backend(Protocol):
    """Where an owner keeps weights: ``backends.CpuBackend`` or ``backends.CudaBackend``."""

    arena_each: bool

    def allocate(self, name: str, layout: Layout) -> Arenas: ...
    def free(self) -> int: ...


@dataclass(frozen=True)
class Loaded:
    """Weights that are ready: sealed, hashed, and the files they came from."""

    key: key.Fields
    layout: Layout
    arenas: Arenas
    files: tuple[files.SourceFile, ...]
    seconds: float


def load(wish: Wish, backend: Backend, progress: Progress, make_way: Callable[[], bool] = lambda: False) -> Loaded:
    """Read a checkpoint, in several threads. Raises ``ValueError`` (its kinds) or ``OSError``.

    ``make_way`` gives some of the host's memory back, and is False when there is no more to give.
    """
    begun, devices = time.perf_counter(), wish.tensor_parallel
    root = checkpoints.resolve_model(wish.path)
    with checkpoints.open_checkpoint(root) as source, ThreadPoolExecutor(_threads(), "load") as pool:
        sources = list(source.files)
        before = {found: files.look(found) for found in sources}
        sure = {found: files.settled(stat) for found, stat in before.items()}
        model = models.model_config(source.config)
        config = EngineConfig(model=wish.path, dtype=wish.dtype, tensor_parallel=devices)
        kind = resolve_dtype(config, source, model)
        specs = declare(model, Parallel(devices), source, kind)
        layout = plan(specs, kind, devices, arena_each=backend.arena_each)
        progress.total = sum(t.piece_bytes(devices) * len(t.pieces) for t in layout.tensors)
        progress.key = key.fields(model, kind, devices, specs, wish.role)
        while layout.nbytes > (free := backend.free()) and not backend.arena_each and make_way():
            pass
        if layout.nbytes > free:
            raise SidecarError(f"{wish.path} takes {layout.nbytes} bytes of memory; {max(0, free)} are free", "memory")
        hashes = pool.map(files.sha256, sources)
        arenas = backend.allocate(root.stem, layout)
        try:
            fill = _filler(source, specs, kind)
            jobs = (layout.tensors, tuple(named(specs).values()))
            tensors = tuple(pool.map(functools.partial(_tensor, layout, arenas, fill, progress), *jobs))
            found = tuple(
                files.SourceFile(files.relative(path, root), digest, before[path], sure[path])
                for path, digest in zip(sources, hashes, strict=True)
            )
            for changed in sources:
                if files.look(changed) != before[changed]:
                    raise SidecarError(f"{changed} was changed while it was read")
            arenas.seal()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            arenas.close()
            raise
    _trim()
    layout = dataclasses.replace(layout, tensors=tensors)
    return Loaded(progress.key, layout, arenas, found, time.perf_counter() - begun)


Fill = Callable[[str, params.ParamSpec, params.Index], np.ndarray]


def _filler(source: checkpoints.Checkpoint, specs: params.Specs, dtype: str) -> Fill:
    if not isinstance(source, checkpoints.OrbaxCheckpoint):
        return lambda name, spec, index: spec.fill(source, index)
    # A converted tree is read whole, by jax on one CPU device, and cut from there.
    import jax

    from jaxserve.sharding import make_mesh

    jax.config.update("jax_platforms", "cpu")
    tree = checkpoints.load_tree(source.path, params.abstract(specs, dtype, make_mesh(1)))
    leaves = dict(zip(named(specs), jax.tree.leaves(tree), strict=True))
    return lambda name, spec, index: np.asarray(leaves[name])[index]


def _tensor(
    layout: Layout, arenas: Arenas, fill: Fill, progress: Progress, tensor: Tensor, spec: params.ParamSpec
) -> Tensor:
    """Fill in the shards of one parameter and hash them."""
    state, dtype = hashlib.sha256(), np_dtype(tensor.dtype)
    shape = tensor.piece_shape(layout.devices)
    for pieces, index in zip(tensor.places(), shards(spec, layout.devices), strict=True):
        room = arenas.room(pieces, dtype, shape)
        room[...] = fill(tensor.name, spec, index)
        state.update(room.reshape(-1).view(np.uint8))
        arenas.commit(pieces, room)
        progress.add(room.nbytes * len(pieces))
    return dataclasses.replace(tensor, sha256=state.hexdigest())


def verify(loaded: Loaded) -> list[str]:
    """The names of tensors whose bytes are no longer those that were loaded."""
    wrong = []
    for tensor in loaded.layout.tensors:
        size = tensor.piece_bytes(loaded.layout.devices)
        for copy in range(len(tensor.places()[0])):
            state = hashlib.sha256()
            for pieces in tensor.places():
                state.update(loaded.arenas.read(pieces[copy], size))
            if state.hexdigest() != tensor.sha256:
                wrong.append(tensor.name)
                break
    return wrong


def _threads() -> int:
    return min(8, max(2, len(os.sched_getaffinity(0))))


def _trim() -> None:
    """Give what was needed on the way back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
