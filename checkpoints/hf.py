"""Hugging Face folders: config.json beside one model.safetensors, or shards and their index.

The safetensors layout (https://github.com/huggingface/safetensors): 8 bytes of header length, a JSON header giving each
tensor's dtype, shape and byte range, then the bytes, without gaps. It is read here directly, because rows must be read
alone and the package's numpy door knows no bfloat16.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from .checkpoint import (
    Checkpoint,
    CheckpointError,
    RawFile,
    Rows,
    TensorInfo,
    digest,
    find_tensor,
    plain_name,
    read_json,
    row_index,
)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100_000_000

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    file: RawFile
    offset: int
    info: TensorInfo


class HfCheckpoint(Checkpoint):
    """A folder with config.json and safetensors. Every header is checked on opening; no tensor data is read."""

    format = "safetensors"

    def __init__(self, path: Path):
        self.path = path
        config = path / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{path}: no config.json")
        self.config = read_json(config)
        generation = path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._headers: dict[str, bytes] = {}
        self._files: list[RawFile] = []
        self._entries: dict[str, _Entry] = {}
        try:
            self._open_weights()
        except BaseException:
            self.close()
            raise
        self.tensors = {name: entry.info for name, entry in self._entries.items()}

    def _open_weights(self) -> None:
        index_path = self.path / INDEX_NAME
        if (self.path / SINGLE_NAME).is_file():
            self._add_file(SINGLE_NAME)
            return
        if not index_path.is_file():
            raise CheckpointError(_no_weights(self.path))
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{index_path}: must hold a weight_map from tensor names to file names")
        for file_name in sorted(set(weight_map.values())):
            if not plain_name(file_name):
                raise CheckpointError(f"{index_path}: {file_name!r} is not the name of a file in this folder")
            if not (self.path / file_name).is_file():
                tensor = next(t for t, f in weight_map.items() if f == file_name)
                raise CheckpointError(f"{self.path / file_name}: shard is absent (the index puts {tensor} there)")
            self._add_file(file_name)
        for tensor, file_name in weight_map.items():
            entry = self._entries.get(tensor)
            if entry is None or entry.file.path.name != file_name:
                where = "no shard holds it" if entry is None else f"it is in {entry.file.path.name}"
                raise CheckpointError(
                    f"{self.path / file_name}: no tensor {tensor}, which the index puts there; {where}"
                )

    def _add_file(self, file_name: str) -> None:
        file = RawFile(self.path / file_name)
        self._files.append(file)
        header, data_start = _read_header(file)
        self._headers[file_name] = header
        for name, (offset, info) in _parse_header(file, header, data_start).items():
            if name in self._entries:
                other = self._entries[name].file.path.name
                raise CheckpointError(f"{file.path}: tensor {name} is also in {other}")
            self._entries[name] = _Entry(file, offset, info)

    def read(self, name: str, rows: Rows = None) -> np.ndarray:
        entry: _Entry = find_tensor(self.path, self._entries, name)
        shape, dtype = entry.info.shape, entry.info.dtype
        what = f"tensor {name}"
        if rows is None or not shape:
            if rows is not None:
                raise CheckpointError(f"{entry.file.path}: {what} is a scalar and has no rows")
            return entry.file.read(entry.offset, entry.info.nbytes, what).view(dtype).reshape(shape)
        index = row_index(f"{entry.file.path}: {what}", rows, shape[0])
        row_bytes = entry.info.nbytes // shape[0] if shape[0] else 0
        if not len(index) or not row_bytes:
            return np.empty((len(index), *shape[1:]), dtype)
        raw = entry.file.read_rows(entry.offset, row_bytes, index, what)
        return raw.reshape(-1).view(dtype).reshape(len(index), *shape[1:])

    def asset(self, name: str) -> bytes | None:
        return folder_asset(self.path, name)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted(file.path for file in self._files))

    def fingerprint(self) -> str:
        files = [p for p in self.path.iterdir() if p.is_file() and p.suffix in (".json", ".safetensors", ".jinja")]
        return digest(files, self._headers)

    def close(self) -> None:
        for file in self._files:
            file.close()


def folder_asset(folder: Path, name: str) -> bytes | None:
    """The bytes of ``folder/name``; None where there is no such file."""
    if not plain_name(name):
        raise CheckpointError(f"{folder}: {name!r} is not a file name")
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror}") from error


def _no_weights(path: Path) -> str:
    names = sorted(p.name for p in path.iterdir())
    if any(n.endswith(".safetensors") for n in names):
        return f"{path}: has safetensors shards but no {INDEX_NAME}"
    other = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".msgpack", ".h5"))]
    hint = f"; {other[0]} is of a format that is not read" if other else ""
    return f"{path}: no weights: neither {SINGLE_NAME} nor {INDEX_NAME}{hint}"


def _read_header(file: RawFile) -> tuple[bytes, int]:
    if file.size < 8:
        raise CheckpointError(f"{file.path}: corrupt safetensors header: the file has only {file.size} bytes")
    length = int(file.read(0, 8, "header length").view("<u8")[0])
    if length > min(_MAX_HEADER, file.size - 8):
        raise CheckpointError(
            f"{file.path}: corrupt safetensors header: it claims {length} bytes; the file has {file.size}"
        )
    return file.read(8, length, "header").tobytes(), 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key} appears twice")
        result[key] = value
    return result


def _parse_header(file: RawFile, header: bytes, data_start: int) -> dict[str, tuple[int, TensorInfo]]:
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: corrupt safetensors header: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file.path}: corrupt safetensors header: not a JSON object")
    entries.pop("__metadata__", None)
    result, spans = {}, []
    for name, entry in entries.items():
        begin, end, info = _parse_entry(file.path, name, entry)
        spans.append((begin, end, name))
        result[name] = (data_start + begin, info)
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise CheckpointError(f"{file.path}: corrupt safetensors header: tensor {name} {kind}")
        if data_start + end > file.size:
            missing = data_start + end - file.size
            raise CheckpointError(f"{file.path}: truncated: {missing} bytes of tensor {name} are missing")
        position = end
    if data_start + position != file.size:
        extra = file.size - data_start - position
        raise CheckpointError(f"{file.path}: {extra} bytes after the last tensor belong to no tensor")
    return result


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[int, int, TensorInfo]:
    where = f"{path}: corrupt safetensors header: tensor {name}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: not a JSON object")
    encoding, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _sizes(shape) or not _sizes(span) or len(span) != 2:
        raise CheckpointError(f"{where}: shape {shape!r} and data_offsets {span!r} must be lists of sizes")
    if not isinstance(encoding, str) or encoding not in DTYPES:
        raise CheckpointError(f"{path}: tensor {name}: dtype {encoding!r} is not supported; known: {', '.join(DTYPES)}")
    nbytes = DTYPES[encoding].itemsize
    for size in shape:
        nbytes *= size
    begin, end = span
    if end - begin != nbytes:
        raise CheckpointError(f"{where}: {encoding} {shape} needs {nbytes} bytes; data_offsets give {end - begin}")
    return begin, end, TensorInfo(tuple(shape), DTYPES[encoding], nbytes, encoding)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
