"""Converted checkpoints: a pytree of arrays written by orbax, loaded straight to where each shard belongs.

A folder holds ``jaxserve.json`` (what the caller wants to know later, and every array's name, shape and dtype),
``arrays/`` (orbax) and ``assets/`` (tokenizer files), so that it stands alone. orbax and jax are imported when
first used.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .checkpoint import Checkpoint, CheckpointError, Rows, TensorInfo, digest, find_tensor, plain_name, read_json
from .hf import folder_asset

META_NAME = "jaxserve.json"
_ARRAYS = "arrays"
_ASSETS = "assets"
_VERSION = 1


def save_tree(path: Path | str, tree: Any, meta: Mapping[str, Any], assets: Mapping[str, bytes]) -> None:
    """Write ``tree`` (a pytree of jax arrays) with ``meta`` (JSON values) and ``assets`` to the new folder ``path``.

    The folder appears whole or not at all.

    Raises:
        CheckpointError: ``path`` exists and is not an empty folder, or ``meta`` is no JSON.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path}: exists already; convert into a new folder")
    for name in assets:
        if not plain_name(name):
            raise CheckpointError(f"{path}: {name!r} is not a file name for an asset")
    manifest = {name: {"shape": list(a.shape), "dtype": np.dtype(a.dtype).name} for name, a in _named(tree).items()}
    try:
        text = json.dumps({"version": _VERSION, "meta": dict(meta), "arrays": manifest}, indent=1)
    except TypeError as error:
        raise CheckpointError(f"{path}: meta must hold JSON values only: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    draft.mkdir()
    try:
        # Uncompressed: weights hardly shrink, and unpacking them would be the longest part of a start.
        with ocp.PyTreeCheckpointer(use_compression=False) as checkpointer:
            checkpointer.save(draft / _ARRAYS, tree)
        (draft / _ASSETS).mkdir()
        for name, data in assets.items():
            (draft / _ASSETS / name).write_bytes(data)
        (draft / META_NAME).write_text(text)
        if path.exists():
            path.rmdir()
        os.replace(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def load_tree(path: Path | str, abstract_tree: Any) -> Any:
    """The arrays of ``path``, structured and sharded as ``abstract_tree`` says (``jax.ShapeDtypeStruct`` leaves).

    Each device's shards are read for that device alone.

    Raises:
        CheckpointError: names, shapes or dtypes differ from what was saved (the first are named), or data is corrupt.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    saved = _read_manifest(path)
    wanted = {name: TensorInfo(tuple(a.shape), np.dtype(a.dtype), 0, "") for name, a in _named(abstract_tree).items()}
    faults = [f"{name} is missing" for name in wanted if name not in saved]
    faults += [f"{name} is unexpected" for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        want, have = wanted[name], saved[name]
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            faults.append(f"{name} is {have.dtype.name} {have.shape}, expected {want.dtype.name} {want.shape}")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(f"{path}: {'; '.join(sorted(faults)[:8])}{more}")
    try:
        restore_args = ocp.checkpoint_utils.construct_restore_args(abstract_tree)
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(path / _ARRAYS, item=abstract_tree, restore_args=restore_args)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{path / _ARRAYS}: cannot be loaded: {error}") from error


def read_meta(path: Path | str) -> dict[str, Any]:
    """The ``meta`` that ``save_tree`` was given."""
    return _read_json(Path(path))["meta"]


class OrbaxCheckpoint(Checkpoint):
    """A converted folder. Its arrays come through ``load_tree``; ``read`` by tensor name is refused."""

    format = "orbax"

    def __init__(self, path: Path):
        self.path = path
        self.meta: dict[str, Any] = read_meta(path)
        self.config = self.meta.get("config", {})
        self.generation_config = self.meta.get("generation_config", {})
        self.tensors = _read_manifest(path)
        if not (path / _ARRAYS).is_dir():
            raise CheckpointError(f"{path / _ARRAYS}: is absent")

    def read(self, name: str, rows: Rows = None) -> np.ndarray:
        find_tensor(self.path, self.tensors, name)
        raise CheckpointError(f"{self.path}: {name} is part of a converted tree; load it with load_tree")

    def asset(self, name: str) -> bytes | None:
        return folder_asset(self.path / _ASSETS, name)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path / META_NAME, *sorted(p for p in (self.path / _ARRAYS).rglob("*") if p.is_file()))

    def fingerprint(self) -> str:
        files = [p for p in self.path.rglob("*") if p.is_file()]
        return digest(files, {META_NAME: (self.path / META_NAME).read_bytes()})

    def close(self) -> None:
        """Nothing is held open."""


def _named(tree: Any) -> dict[str, Any]:
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _read_json(path: Path) -> dict[str, Any]:
    file = path / META_NAME
    if not file.is_file():
        raise CheckpointError(f"{path}: no {META_NAME}: not a converted checkpoint")
    data = read_json(file)
    if data.get("version") != _VERSION:
        raise CheckpointError(f"{file}: version {data.get('version')!r} is not supported; convert again")
    if not isinstance(data.get("meta"), dict) or not isinstance(data.get("arrays"), dict):
        raise CheckpointError(f"{file}: must hold meta and arrays")
    return data


def _read_manifest(path: Path) -> dict[str, TensorInfo]:
    result = {}
    for name, entry in _read_json(path)["arrays"].items():
        try:
            shape, dtype = tuple(entry["shape"]), _dtype(entry["dtype"])
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path / META_NAME}: array {name} is described wrongly: {error}") from error
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        result[name] = TensorInfo(shape, dtype, nbytes, dtype.name)
    return result


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
