"""The bytes of records in host memory: checksums, and canonical arrays. Imports no jax, but reads its arrays."""

import ctypes
import zlib
from typing import Any

import numpy as np


def checksums(data: Any) -> list[int]:
    """CRC-32 of every record of a block's data ``[records, ...]``, over all its devices' parts. Waits for the data."""
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
    """Records in the canonical layout, as bytes ``[records, record_bytes]``. Waits for the data."""
    array = np.ascontiguousarray(np.asarray(data))
    return array.reshape(len(array), -1).view(np.uint8)


def _parts(data: Any) -> list[np.ndarray]:
    """What lies in memory, as bytes ``[records, bytes]`` for each device: not what jax may keep a copy of."""
    if isinstance(data, np.ndarray):
        return [rows(data)]
    data.block_until_ready()
    return [_memory(shard.data) for shard in data.addressable_shards]


def _memory(array: Any) -> np.ndarray:
    buffer = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(buffer, np.uint8).reshape(array.shape[0], -1)
