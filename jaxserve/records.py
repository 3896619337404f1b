"""The bytes of records in host memory: checksums, and canonical arrays. Imports no jax, but reads its arrays.

A block's data are an array ``[records, ...]``, or a tuple of them: a record is what it has in all of them.
"""

import ctypes
import zlib
from typing import Any

import numpy as np


def checksums(data: Any) -> list[int]:
    """CRC-32 of every record of a block's data, over all its devices' parts. Waits for the data."""
    parts = _parts(data)
    sums = [0] * len(parts[0])
    for part in parts:
        sums = [zlib.crc32(record, value) for record, value in zip(part, sums, strict=True)]
    return sums


def checksum(data: Any, number: int) -> int:
    """The same of one record."""
    value = 0
    for part in _parts(data):
        value = zlib.crc32(part[number], value)
    return value


def rows(data: Any) -> np.ndarray:
    """Records in the canonical layout, as bytes ``[records, record_bytes]``. Waits for the data, and may be a view of
    them: keep the block as long."""
    parts = [_rows(array) for array in _arrays(data)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def ready(data: Any) -> bool:
    """Whether the data have arrived."""
    return all(bool(getattr(array, "is_ready", lambda: True)()) for array in _arrays(data))


def nbytes(data: Any) -> int:
    return sum(int(array.nbytes) for array in _arrays(data))


def _arrays(data: Any) -> tuple[Any, ...]:
    return data if isinstance(data, tuple) else (data,)


def _rows(array: Any) -> np.ndarray:
    if len(getattr(array, "addressable_shards", ())) == 1:
        # Not asarray: jax would keep what it returns, and never write to this memory again.
        return _memory(array.block_until_ready())
    whole = np.ascontiguousarray(np.asarray(array))
    return whole.reshape(len(whole), -1).view(np.uint8)


def _parts(data: Any) -> list[np.ndarray]:
    """What lies in memory, as bytes ``[records, bytes]`` for each device: not what jax may keep a copy of."""
    found = []
    for array in _arrays(data):
        if isinstance(array, np.ndarray):
            found.append(rows(array))
        else:
            array.block_until_ready()
            found += [_memory(shard.data) for shard in array.addressable_shards]
    return found


def _memory(array: Any) -> np.ndarray:
    buffer = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(buffer, np.uint8).reshape(array.shape[0], -1)
