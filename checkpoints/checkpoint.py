"""What every checkpoint format offers: names, shapes, a config, and reads of single rows; and how they fail."""

import abc
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

Rows = slice | np.ndarray | None
_MAX_READ = 1 << 30  # one preadv moves at most 2 GiB


TOKENIZER_ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files beside the weights that a copy of a checkpoint takes along, so that it stands alone."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it stands. The message names the file and, where there is one, the tensor."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as ``Checkpoint.read`` would return it.

    ``dtype`` is what ``read`` returns (float32 for a quantized GGUF tensor), ``nbytes`` is its size on disk and
    ``encoding`` how the file stores it ("BF16", "Q4_1", ...).
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int
    encoding: str


class Checkpoint(abc.ABC):
    """An opened checkpoint. Reads are thread-safe; use as a context manager or call ``close``."""

    path: Path
    format: str
    """"safetensors", "gguf" or "orbax"."""
    config: dict[str, Any]
    """In the schema of Hugging Face's config.json, whatever the format."""
    generation_config: dict[str, Any]
    """As in generation_config.json; empty where absent."""
    tensors: Mapping[str, TensorInfo]
    """By Hugging Face names."""

    @abc.abstractmethod
    def read(self, name: str, rows: Rows = None) -> np.ndarray:
        """Tensor ``name``, or its ``rows`` along axis 0 (a slice, or an array of indices in any order).

        Only those rows are read and dequantized. The result is the caller's own and contiguous.

        Raises:
            CheckpointError: the tensor is not there, a row is out of range, or the file ended too soon.
        """

    @abc.abstractmethod
    def asset(self, name: str) -> bytes | None:
        """A file beside the weights, such as "tokenizer.json"; None where there is none."""

    @property
    @abc.abstractmethod
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights, sorted."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A cheap identity of the content, as sha256 in hex: names, sizes, headers and modification times."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files. Reads afterwards raise ``CheckpointError``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawFile:
    """A file read by position: any thread, no shared offset, and a short read is an error instead of a crash."""

    def __init__(self, path: Path):
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        self.path = path
        self.size = os.fstat(self._fd).st_size
        self._closed = False
        self._lock = threading.Lock()

    def read_into(self, out: np.ndarray, offset: int, what: str) -> None:
        """Fill the contiguous uint8 array ``out`` from ``offset``."""
        if self._closed:
            raise CheckpointError(f"{self.path}: the checkpoint is closed; cannot read {what}")
        view = memoryview(out)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done : done + _MAX_READ]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {what}: {error.strerror}") from error
            if count == 0:
                missing = len(view) - done
                raise CheckpointError(f"{self.path}: {what}: the file ends {missing} bytes too soon")
            done += count

    def read(self, offset: int, nbytes: int, what: str) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        self.read_into(out, offset, what)
        return out

    def read_rows(self, offset: int, row_bytes: int, index: range | np.ndarray, what: str) -> np.ndarray:
        """Rows ``index`` of a row-major table at ``offset``: uint8 ``[len(index), row_bytes]``.

        Rows that lie close together come with one read, so a permutation within a block costs no more than the block.
        """
        count = len(index)
        if isinstance(index, range):
            if index.step == 1:
                return self.read(offset + index.start * row_bytes, count * row_bytes, what).reshape(count, row_bytes)
            index = np.asarray(index, np.int64)
        out = np.empty((count, row_bytes), np.uint8)
        for start in range(0, count, _ROWS_PER_GATHER):
            part = index[start : start + _ROWS_PER_GATHER]
            self._gather(offset, row_bytes, part, out[start : start + len(part)], what)
        return out

    def _gather(self, offset: int, row_bytes: int, index: np.ndarray, out: np.ndarray, what: str) -> None:
        low, high = int(index.min()), int(index.max()) + 1
        if high - low <= 2 * len(index):
            block = self.read(offset + low * row_bytes, (high - low) * row_bytes, what).reshape(-1, row_bytes)
            np.take(block, index - low, axis=0, out=out)
            return
        breaks = np.flatnonzero(np.diff(index) != 1) + 1
        bounds = [0, *breaks.tolist(), len(index)]
        for begin, end in itertools.pairwise(bounds):
            self.read_into(out[begin:end].reshape(-1), offset + int(index[begin]) * row_bytes, what)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)


_ROWS_PER_GATHER = 65_536


def row_index(name: str, rows: Rows, length: int) -> range | np.ndarray:
    """``rows`` of a tensor with ``length`` rows as a range or an int64 array, checked."""
    if rows is None:
        return range(length)
    if isinstance(rows, slice):
        return range(length)[rows]
    index = np.asarray(rows)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise CheckpointError(f"{name}: rows must be a slice or a list of indices, got {index.dtype} {index.shape}")
    index = index.astype(np.int64)
    bad = index[(index < 0) | (index >= length)]
    if bad.size:
        raise CheckpointError(f"{name}: row {int(bad[0])} is out of range; the tensor has {length} rows")
    return index


def find_tensor(path: Path, tensors: Mapping[str, Any], name: str) -> Any:
    try:
        return tensors[name]
    except KeyError:
        raise CheckpointError(f"{path}: no tensor {name}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; anything else is a ``CheckpointError`` that names the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def digest(files: Iterable[Path], headers: Mapping[str, bytes]) -> str:
    """sha256 over names, sizes, modification times and header bytes."""
    state = hashlib.sha256()
    for path in sorted(files):
        try:
            stat = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        state.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        state.update(hashlib.sha256(headers.get(path.name, b"")).digest())
    return state.hexdigest()


def plain_name(name: str) -> bool:
    """Whether ``name`` is a file name and no path: nothing outside the folder can be reached through it."""
    return bool(name) and name not in (".", "..") and not any(c in name for c in "/\\\0")
